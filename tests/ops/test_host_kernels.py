"""Kernels for few rows on a CPU: examined on their own path, and in the layouts they ask for."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.feedback.gate import examine
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, Kernel

CPU = Facts(device=torch.device("cpu"), dtype=torch.float32)
KERNELS = builtin_kernels()
HOST = [k for k in KERNELS if k.name == "torch-host"]
LAID = [k for k in KERNELS if k.layouts]
GENERAL = {k.op: k.run.__name__ for k in KERNELS if k.name == "torch"}


def _laid(kernel: Kernel) -> Any:
    """Return the kernel's run with every weight brought into the layout it asks for."""
    order = tuple(CONTRACTS[kernel.op].inputs)

    def run(*positional: Any, **named: Any) -> Any:
        args = dict(zip(order, positional, strict=False)) | named
        for name, layout in kernel.layouts.items():
            args[name] = layout(args[name])
        return kernel.run(**args)

    return run


@pytest.mark.parametrize(
    ("kernel", "case"),
    [pytest.param(k, c.name, id=f"{k.op}-{k.name}-{c.name}")
     for k in LAID for c in CONTRACTS[k.op].cases],
)  # fmt: skip
def test_a_kernel_conforms_in_the_layout_it_asks_for(kernel: Kernel, case: str) -> None:
    contract = CONTRACTS[kernel.op]
    finding = examine(contract, kernel.name, _laid(kernel), contract.case(case))
    assert finding.ok, str(finding)


@pytest.mark.parametrize("kernel", LAID, ids=lambda k: f"{k.op}-{k.name}")
def test_a_layout_changes_strides_only(kernel: Kernel) -> None:
    shapes = {"linear": (512, 128), "experts": (3, 64, 16)}
    for layout in kernel.layouts.values():
        weight = torch.randn(shapes[kernel.op])
        laid = layout(weight)
        assert torch.equal(laid, weight)
        assert laid.stride() != weight.stride()
        half = weight.bfloat16()
        assert layout(half) is half


@pytest.mark.parametrize("kernel", HOST, ids=lambda k: k.op)
def test_some_case_of_the_contract_takes_the_short_path(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conformance says nothing of a path that no case takes: count those that stay on it."""
    module = sys.modules[kernel.run.__module__]
    general, name = getattr(module, GENERAL[kernel.op]), GENERAL[kernel.op]
    calls: list[str] = []

    def noted(*args: Any, **named: Any) -> Any:
        calls.append(name)
        return general(*args, **named)

    def run(*args: Any, **named: Any) -> Any:
        calls.append(kernel.name)
        return kernel.run(*args, **named)

    monkeypatch.setattr(module, name, noted)
    contract, own = CONTRACTS[kernel.op], 0
    for case in contract.cases:
        calls.clear()
        finding = examine(contract, kernel.name, run, case)
        assert finding.ok, str(finding)
        own += calls.count(kernel.name) > calls.count(name)
    assert own, f"no case of {kernel.op} stays on the short path"


@pytest.mark.parametrize("kernel", HOST, ids=lambda k: k.op)
def test_host_kernels_are_offered_on_the_cpu_alone(kernel: Kernel) -> None:
    assert kernel.supports(CPU).ok
    assert not kernel.supports(Facts(device=torch.device("cuda"), dtype=torch.float32)).ok
    assert not kernel.invariant
