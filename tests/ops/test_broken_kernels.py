"""The gate rejects every planted fault for the right reason, and each contract has at least one."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import tests.ops.broken as broken
from oxplow.contracts import CONTRACTS
from oxplow.feedback.gate import examine
from tests.ops.broken import Broken

ALL: tuple[Broken, ...] = tuple(
    b
    for module in pkgutil.iter_modules(broken.__path__)
    for b in importlib.import_module(f"tests.ops.broken.{module.name}").BROKEN
)


@pytest.mark.parametrize("planted", ALL, ids=lambda b: f"{b.op}-{b.fault}".replace(" ", "_"))
def test_a_broken_kernel_is_rejected_for_its_fault(planted: Broken) -> None:
    contract = CONTRACTS[planted.op]
    finding = examine(
        contract, planted.fault, planted.run, contract.case(planted.case), dtype=torch.float32
    )
    assert finding.reason is planted.reason, str(finding)
    assert finding.tensor == planted.tensor, str(finding)


def test_every_contract_has_a_broken_kernel() -> None:
    assert sorted(set(CONTRACTS) - {b.op for b in ALL}) == []
