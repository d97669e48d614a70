"""Invariant vision kernels: an image's bits, and a merged block's, do not depend on the company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.contracts.vision import _attention_case
from oxplow.contracts.vision_merge import _merge_case
from oxplow.feedback.gate import cast_args
from oxplow.ops.kernels import builtin_kernels

GRIDS = ((4, 6), (4, 6), (2, 2), (8, 10), (1, 1), (4, 6), (30, 30))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _invariant(op: str) -> list[pytest.param]:
    return [pytest.param(k.run, id=k.name) for k in builtin_kernels() if k.op == op and k.invariant]


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test on one and on two threads; the former number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_both_ops_have_an_invariant_kernel() -> None:
    assert all(_invariant(op) for op in ("vision_attention", "vision_merge"))


@dtypes
@pytest.mark.parametrize("run", _invariant("vision_attention"))
def test_an_image_has_the_same_bits_in_every_company(run, dtype, threads) -> None:
    args = _attention_case(torch.Generator().manual_seed(0), GRIDS, heads=3, head_dim=16)
    args = cast_args(CONTRACTS["vision_attention"], args, dtype)
    together = run(**args)
    ends = args["cu_seqlens"].tolist()
    for first in range(len(GRIDS)):
        for last in range(first + 1, len(GRIDS) + 1):
            rows = slice(ends[first], ends[last])
            some = {n: args[n][rows].contiguous() for n in ("q", "k", "v", "coords")}
            cu = args["cu_seqlens"][first : last + 1] - ends[first]
            got = run(**some, cu_seqlens=cu, theta=args["theta"])
            assert torch.equal(got, together[rows]), f"images {first} to {last}"


@dtypes
@pytest.mark.parametrize("sizes", [(16, 24, 40), (7, 13, 19), (64, 96, 160)], ids=str)
@pytest.mark.parametrize("run", _invariant("vision_merge"))
def test_a_block_has_the_same_bits_in_every_company(run, sizes, dtype, threads) -> None:
    args = _merge_case(torch.Generator().manual_seed(1), 37, *sizes)
    args = cast_args(CONTRACTS["vision_merge"], args, dtype)
    together = run(**args)
    for count in (1, 2, 3, 5, 8, 17):
        for first in range(0, 37, 5):
            some = {**args, "x": args["x"][4 * first : 4 * (first + count)].contiguous()}
            assert torch.equal(run(**some), together[first : first + count]), f"{count} at {first}"
