"""Held-out shapes: every contract gets some, they are valid, and our own kernels survive them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Case, CaseKind
from oxplow.errors import ContractError
from oxplow.feedback.gate import examine
from oxplow.feedback.shapes import free_axes, grown_case, held_out_case, resized
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts

_HERE = Facts(device=torch.device("cpu"), dtype=torch.float32)


def _ordinary(op: str) -> Case:
    return next(c for c in CONTRACTS[op].cases if c.kind is CaseKind.ORDINARY)


def _shapes(case: Case, seed: int) -> dict[str, tuple[int, ...]]:
    args = case.build(torch.Generator().manual_seed(seed))
    return {n: tuple(v.shape) for n, v in args.items() if isinstance(v, Tensor)}


@pytest.mark.parametrize("op", CONTRACTS)
def test_every_contract_has_other_shapes_and_every_kernel_of_ours_takes_them(op: str) -> None:
    contract, source = CONTRACTS[op], _ordinary(op)
    case = held_out_case(contract, source, 11)
    assert case is not None, f"no other shape of {source.name} was found"
    assert _shapes(case, 0) != _shapes(source, 0)
    contract.validate(case.build(torch.Generator().manual_seed(3)))
    for kernel in builtin_kernels():
        if kernel.op == op and kernel.supports(_HERE).ok:
            told = examine(contract, kernel.name, kernel.run, case)
            assert told.ok, str(told)


def test_the_seed_decides_the_shape_and_the_values() -> None:
    contract, source = CONTRACTS["linear"], _ordinary("linear")
    names = {held_out_case(contract, source, seed).name for seed in range(6)}  # type: ignore[union-attr]
    assert len(names) > 3
    assert held_out_case(contract, source, 4).name == held_out_case(contract, source, 4).name  # type: ignore[union-attr]


def test_grown_rows_are_not_copies_of_each_other() -> None:
    contract = CONTRACTS["linear"]
    g = torch.Generator().manual_seed(0)
    args = _ordinary("linear").build(g)
    made = resized(contract, args, {"T": 9, "N": 7}, g)
    assert made["x"].shape[0] == 9 and made["weight"].shape[0] == 7
    assert len({tuple(row.tolist()) for row in made["x"]}) == 9
    assert torch.equal(made["x"][:3], args["x"])


def test_an_axis_that_others_depend_on_is_refused() -> None:
    with pytest.raises(ContractError, match="cannot be resized"):
        resized(CONTRACTS["linear"], {}, {"Q": 3}, torch.Generator())
    assert "P" not in free_axes(CONTRACTS["experts"]) and "T" not in free_axes(CONTRACTS["experts"])


def test_a_case_grows_until_it_is_enough_or_not_at_all() -> None:
    contract = CONTRACTS["linear"]
    large = grown_case(contract, _ordinary("linear"), lambda a: contract.cost(a).flops > 1e7)
    assert large is not None
    args = large.build(torch.Generator().manual_seed(0))
    assert contract.cost(args).flops > 1e7
    assert grown_case(contract, _ordinary("linear"), lambda a: False) is None
