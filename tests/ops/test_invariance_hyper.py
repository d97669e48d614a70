"""Invariant hyper-connection kernels: a token's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.hyper import _collapse_case, _expand_case
from oxplow.contracts.schema import Args
from oxplow.feedback.gate import cast_args
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Kernel

NUM_TOKENS = 67
SIZES = ((4, 32), (4, 67), (2, 9), (3, 130), (4, 512))
PER_TOKEN = {"mhc_collapse": ("streams",), "mhc_expand": ("streams", "y", "post", "mix")}
INVARIANT = [k for k in builtin_kernels() if k.op in PER_TOKEN and k.invariant]


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test on one and on two threads; the former number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _build(op: str, size: tuple[int, int]) -> Args:
    g = torch.Generator().manual_seed(sum(size))
    build = {"mhc_collapse": _collapse_case, "mhc_expand": _expand_case}[op]
    return build(g, NUM_TOKENS, *size)


def _rows(kernel: Kernel, args: Args, rows: Tensor | slice) -> tuple[Tensor, ...]:
    """Run the kernel on some tokens of `args`."""
    some = {n: v[rows].contiguous() if n in PER_TOKEN[kernel.op] else v for n, v in args.items()}
    out = kernel.run(**some)
    return out if isinstance(out, tuple) else (out,)


def test_both_ops_have_an_invariant_kernel() -> None:
    assert {k.op for k in INVARIANT} == set(PER_TOKEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kernel", INVARIANT, ids=lambda k: f"{k.op}-{k.name}")
def test_a_token_has_the_same_bits_in_every_company(kernel, size, dtype, threads) -> None:
    args = cast_args(CONTRACTS[kernel.op], _build(kernel.op, size), dtype)
    together = _rows(kernel, args, slice(None))
    for width in (1, 2, 3, 5, 8, 17, 64):
        for start in range(0, NUM_TOKENS, 11):
            rows = slice(start, min(start + width, NUM_TOKENS))
            for got, want in zip(_rows(kernel, args, rows), together, strict=True):
                assert torch.equal(got, want[rows]), f"{width} tokens from {start}"


@pytest.mark.parametrize("kernel", INVARIANT, ids=lambda k: f"{k.op}-{k.name}")
def test_order_and_poisoned_neighbours_do_not_matter(kernel) -> None:
    args = _build(kernel.op, (4, 32))
    together = _rows(kernel, args, slice(None))
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(1))
    for got, want in zip(_rows(kernel, args, order), together, strict=True):
        assert torch.equal(got, want[order])
    for name in PER_TOKEN[kernel.op]:
        args[name] = args[name].clone()
        args[name][1::2] = float("nan")
    for got, want in zip(_rows(kernel, args, slice(None)), together, strict=True):
        assert torch.equal(got[::2], want[::2])
