"""Mixture-of-experts kernels beyond generated conformance: bounds, call counts, drawn routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxplow.contracts import CONTRACTS
from oxplow.contracts.dense import block_scales, normal_codes
from oxplow.contracts.laws import Evidence
from oxplow.contracts.schema import Args, Case, CaseKind
from oxplow.feedback.gate import examine, reference_values
from oxplow.ops.kernels.torch import moe

FLOAT, HALF = torch.float32, torch.bfloat16


class Calls(TorchDispatchMode):
    """Count torch calls and remember the most bytes that one of their results held."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.num_bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; views hold no bytes of their own."""
        out = func(*args, **(kwargs or {}))
        self.count += 1
        if isinstance(out, Tensor) and not func.is_view:
            self.num_bytes = max(self.num_bytes, out.numel() * out.element_size())
        return out


def _draw(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, seed: int = 0
) -> Args:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=g).argsort(-1)[:, :top_k]
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        "expert_ids": ids,
        "expert_weights": torch.rand(num_tokens, top_k, generator=g),
        "gate_up": torch.randn(num_experts, 2, inner, width, generator=g) * width**-0.5,
        "down": torch.randn(num_experts, width, inner, generator=g) * inner**-0.5,
        "limit": 10.0,
    }


def _as_fp8(args: Args, seed: int = 0) -> Args:
    g = torch.Generator().manual_seed(seed)
    num_experts, width, inner = args["down"].shape
    across, within = -(-width // 128), -(-inner // 128)
    return args | {
        "gate_up": normal_codes((num_experts, 2, inner, width), g),
        "gate_up_scale": block_scales((num_experts, 2, within, across), 2.0, g),
        "down": normal_codes((num_experts, width, inner), g),
        "down_scale": block_scales((num_experts, across, within), 2.0, g),
        "block": 128,
    }


@pytest.mark.parametrize("op", ("experts", "experts_fp8"))
def test_many_panels_of_experts_give_what_one_gives(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "EXPERT_ELEMENTS", 3000)  # one to three experts of the cases
    run = moe.experts_wide if op == "experts" else moe.experts_fp8
    for case in CONTRACTS[op].cases:
        for dtypes in ((FLOAT, HALF), (HALF, HALF)):
            finding = examine(CONTRACTS[op], op, run, case, dtype=dtypes[0], weight=dtypes[1])
            assert finding.ok, str(finding)


def test_only_picked_experts_are_widened_and_in_bounded_panels() -> None:
    one_expert = 4 * 2 * 256 * 128  # gate and up in float32
    args = _as_fp8(_draw(1, 64, 2, 256, 128))
    with Calls() as few:
        moe.experts_fp8(**args)
    assert few.num_bytes <= 2 * one_expert
    args = _as_fp8(_draw(40, 64, 8, 256, 128))  # every expert is picked: 16 MiB if widened at once
    with Calls() as many:
        moe.experts_fp8(**args)
    assert many.num_bytes <= 4 * moe.EXPERT_ELEMENTS


def test_the_number_of_torch_calls_grows_with_neither_experts_nor_tokens() -> None:
    counts = []
    for num_tokens, num_experts in ((2, 4), (200, 64)):
        args = _draw(num_tokens, num_experts, 2, 32, 16)
        with Calls() as calls:
            moe.experts(**args)
        counts.append(calls.count)
    assert counts[0] == counts[1]


def test_renaming_experts_changes_no_bit_of_the_deterministic_kernel() -> None:
    args = _draw(23, 9, 3, 40, 24)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    renamed = args | {
        "expert_ids": order.argsort()[args["expert_ids"]],
        "gate_up": args["gate_up"][order],
        "down": args["down"][order],
    }
    assert torch.equal(moe.experts_invariant(**args), moe.experts_invariant(**renamed))


def test_a_slice_of_the_inner_axis_needs_no_copy_by_the_caller() -> None:
    args = _draw(6, 5, 2, 32, 24)
    sliced = args | {"gate_up": args["gate_up"][:, :, 8:16], "down": args["down"][:, :, 8:16]}
    whole = sliced | {name: sliced[name].contiguous() for name in ("gate_up", "down")}
    contract = CONTRACTS["experts"]
    truth = reference_values(contract, whole, torch.float64)["y"]
    baseline = reference_values(contract, whole, FLOAT)["y"]
    for run in (moe.experts, moe.experts_wide, moe.experts_invariant):
        evidence = Evidence(got=run(**sliced), truth=truth, baseline=baseline, args=whole)
        verdict = contract.checks["y"].judge(evidence)
        assert verdict.ok, verdict.reason


def test_an_expert_may_stand_twice_in_a_row() -> None:
    args = _draw(4, 3, 2, 16, 8)
    args["expert_ids"] = torch.tensor([[1, 1], [2, 0], [0, 0], [2, 2]])
    case = Case("twice", CaseKind.EDGE, lambda _: dict(args))
    for kernel in (k for k in moe.KERNELS if k.op == "experts"):
        finding = examine(CONTRACTS["experts"], kernel.name, kernel.run, case)
        assert finding.ok, str(finding)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 30), st.integers(1, 20), st.integers(1, 4), st.integers(1, 40),
    st.integers(1, 40), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_experts_conform_at_drawn_sizes(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, fp8: bool, seed: int
) -> None:
    def build(g: torch.Generator) -> Args:
        args = _draw(num_tokens, num_experts, min(top_k, num_experts), width, inner, seed)
        gone = torch.rand(args["expert_ids"].shape, generator=g) < 0.2
        args["expert_ids"] = args["expert_ids"].masked_fill(gone, -1)
        return _as_fp8(args, seed) if fp8 else args

    op = "experts_fp8" if fp8 else "experts"
    for kernel in (k for k in moe.KERNELS if k.op == op):
        finding = examine(
            CONTRACTS[op], kernel.name, kernel.run, Case("drawn", CaseKind.ORDINARY, build)
        )
        assert finding.ok, str(finding)
