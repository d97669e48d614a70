"""Row-invariant building blocks: a row's bits depend on that row and the weight, on nothing else.

Owns the fixed tiling and the elementwise forms that deterministic kernels share, and the probe that
tests both on a device. Knows no op. Invariant: every product runs as [ROW_TILE, K] x [K, panel] on
float32 rows that start on a 64-byte border, so neither the number of rows, nor a row's place, nor
its neighbours can select another code path.

On a CPU torch computes the last elements of a tensor by other code than the rest: sigmoid, silu,
softplus, exp2 and pow give other bits there (seen with AVX-512); exp, log, log1p, expm1, tanh,
sqrt, rsqrt and softmax do not. Sums over a last axis of up to 32768 elements are invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from oxplow.ops.table import Facts, Support

ROW_TILE = 8
"""Rows of one product. Measured with MKL over 2,700 shapes: 1, 2, 3 and 6 rows take paths whose
bits differ or depend on the place; 4, 8, 16 and more agree. One row costs 2.8 times a one-row
product, 512 rows cost 1.8 times one full-height product."""

PANEL_ROWS = 512
"""Weight rows of one product: bounds the float32 copy of a weight that is stored in fewer bytes."""

_ALIGN = 16  # float32 elements in 64 bytes: MKL's small kernels branch on the alignment of each row

# (K, N): sizes that failed under a scheme that was tried and dropped, and usual ones
_PROBE_LENGTH = 257  # past several vectors of any width, with a remainder
_PROBE_SHAPES = (
    *((7, 5), (31, 3), (33, 2), (67, 33), (130, 8), (384, 1), (384, 16)),
    *((33, 31), (96, 17), (300, 67), (384, 515), (1024, 64)),
)


def matmul_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32, each row with the same bits in every company.

    x [T, K] and weight [N, K] of any floating dtype and stride; result [T, N] float32. Memory: a
    float32 copy of x, and of PANEL_ROWS rows of the weight at a time if it is not float32. Promised
    for one device, library and weight; another thread count or split of N may give other bits.
    """
    rows = aligned_rows(x)
    out = torch.empty(rows.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, weight.shape[0], PANEL_ROWS):
        panel = weight[start : start + PANEL_ROWS].float()
        if panel.stride(-1) != 1:  # a transposed panel takes another path, where the place matters
            panel = panel.contiguous()
        multiply_panel(rows, panel, out[:, start : start + PANEL_ROWS])
    return out[: x.shape[0]]


def aligned_rows(x: Tensor) -> Tensor:
    """Copy x [T, K] to float32 rows on 64-byte borders; T rounded up to ROW_TILE, zeros below."""
    num_rows, width = x.shape
    buffer = torch.zeros(
        _round_up(num_rows, ROW_TILE),
        _round_up(width, _ALIGN),
        dtype=torch.float32,
        device=x.device,
    )
    buffer[:num_rows, :width] = x
    return buffer[:, :width]


def multiply_panel(rows: Tensor, panel: Tensor, out: Tensor) -> None:
    """Write rows @ panel.T into `out` tile by tile.

    rows [T, K] from `aligned_rows`; panel [n, K] float32, unit inner stride; out [T, n] float32.
    A panel whose n is no multiple of 16 is copied with zero rows below: products of 2 columns
    depended on a row's place with MKL on a CPU with AMX.
    """
    num_out = panel.shape[0]
    wide = _round_up(num_out, _ALIGN)
    if wide != num_out:
        padded = panel.new_zeros(wide, _round_up(panel.shape[1], _ALIGN))[:, : panel.shape[1]]
        padded[:num_out] = panel
        panel = padded
    turned = panel.t()
    for start in range(0, rows.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        if wide == num_out:
            torch.mm(rows[tile], turned, out=out[tile])
        else:
            out[tile] = torch.mm(rows[tile], turned)[:, :num_out]


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), a fresh tensor, with the same bits at any place; 0 below -88.7."""
    return x.neg().exp_().add_(1).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), a fresh tensor, with the same bits at any place; no overflow."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))


def row_invariance(facts: Facts) -> Support:
    """Answer a kernel's `supports`: do products and elementwise forms keep their promise here?

    Compares the bits of small calls, once per device (about 10 ms on a CPU).
    """
    return _probe(facts.device)


@cache  # a device does not change while the process lives
def _probe(device: torch.device) -> Support:
    generator = torch.Generator().manual_seed(0)
    values = (3 * torch.randn(_PROBE_LENGTH, generator=generator)).to(device)
    for form in (sigmoid, softplus, torch.rsqrt):
        if not _place_free(form, values):
            return Support(
                ok=False, reason=f"an element's bits change with its place: {form.__name__}"
            )
    for width, num_out in _PROBE_SHAPES:
        weight = torch.randn(num_out, width, generator=generator).to(device)
        rows = torch.randn(ROW_TILE, width, generator=generator).to(device)
        fault = _first_fault(rows, weight)
        if fault:
            where = f"K={width}, N={num_out} on {device}"
            return Support(ok=False, reason=f"a row's bits change with {fault} ({where})")
    return Support(ok=True, reason=f"fixed row tiles, probed bit for bit on {device}")


def _place_free(form: Callable[[Tensor], Tensor], values: Tensor) -> bool:
    want = form(values.abs())
    cuts = [values.abs()[: values.numel() - cut].clone() for cut in range(0, 80, 7)]
    tails = [values.abs()[cut:].clone() for cut in range(0, 80, 7)]
    return all(torch.equal(form(v), want[: v.numel()]) for v in cuts) and all(
        torch.equal(form(v), want[-v.numel() :]) for v in tails
    )


def _first_fault(rows: Tensor, weight: Tensor) -> str:
    want = matmul_rows(rows, weight)
    for shift in (1, 3):
        moved = matmul_rows(rows.roll(shift, 0), weight).roll(-shift, 0)
        if not torch.equal(moved, want):
            return "its place in a tile"
    middle = ROW_TILE // 2
    poisoned = torch.full_like(rows, float("nan"))
    poisoned[middle] = rows[middle]
    if not torch.equal(matmul_rows(poisoned, weight)[middle], want[middle]):
        return "its neighbours"
    alone = matmul_rows(rows[:1], weight)
    many = matmul_rows(rows.repeat(3, 1)[:-1], weight)[ROW_TILE : 2 * ROW_TILE]
    if not torch.equal(alone, want[:1]) or not torch.equal(many, want):
        return "the number of rows"
    return ""


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
