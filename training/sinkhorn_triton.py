"""Sinkhorn normalisation as one Triton kernel each way.

Owns the kernel pair. 39 small normalisations through autograd would be dozens of launches.
Invariant: forward equals `kernels.torch_sinkhorn`; backward rebuilds every step from the stored
sums instead of storing the steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ITERATIONS = 20
STEPS = 2 * ITERATIONS - 1
TILE = 64


@triton.jit
def sinkhorn_forward(x_ptr, y_ptr, sums_ptr, n, steps: tl.constexpr, tile: tl.constexpr):
    """Even steps divide by column sums, odd steps by row sums; every sum vector is stored."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    i = tl.arange(0, 4)
    ok = row < n
    place = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    x = tl.load(x_ptr + place, mask=ok[:, None, None], other=1.0)
    for k in tl.static_range(steps):
        s = tl.sum(x, 1 if k % 2 == 0 else 2) + 1e-6
        tl.store(sums_ptr + (k * n + row[:, None]) * 4 + i[None, :], s, mask=ok[:, None])
        x = x / (s[:, None, :] if k % 2 == 0 else s[:, :, None])
    tl.store(y_ptr + place, x, mask=ok[:, None, None])


@triton.jit
def sinkhorn_backward(y_ptr, sums_ptr, dy_ptr, dx_ptr, n, steps: tl.constexpr, tile: tl.constexpr):
    """Walk the steps backwards, undoing each division to recover its input."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    i = tl.arange(0, 4)
    ok = row < n
    place = row[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    y = tl.load(y_ptr + place, mask=ok[:, None, None], other=1.0)
    d = tl.load(dy_ptr + place, mask=ok[:, None, None], other=0.0)
    for r in tl.static_range(steps):
        k = steps - 1 - r
        s = tl.load(sums_ptr + (k * n + row[:, None]) * 4 + i[None, :], mask=ok[:, None], other=1.0)
        if k % 2 == 0:
            d = (d - tl.sum(d * y, 1)[:, None, :]) / s[:, None, :]
            y = y * s[:, None, :]
        else:
            d = (d - tl.sum(d * y, 2)[:, :, None]) / s[:, :, None]
            y = y * s[:, :, None]
    tl.store(dx_ptr + place, d, mask=ok[:, None, None])


class Sinkhorn(torch.autograd.Function):
    """Differentiable Sinkhorn on [N, 4, 4] fp32, contiguous."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Return the normalised matrices; stores the 39 sum vectors for the way back."""
        n = x.shape[0]
        y, sums = torch.empty_like(x), torch.empty(STEPS, n, 4, device=x.device)
        sinkhorn_forward[(triton.cdiv(n, TILE),)](x, y, sums, n, STEPS, TILE, num_warps=2)
        ctx.save_for_backward(y, sums)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        """Return the gradient of the unnormalised matrices."""
        y, sums = ctx.saved_tensors
        dx, n = torch.empty_like(y), y.shape[0]
        sinkhorn_backward[(triton.cdiv(n, TILE),)](
            y, sums, grad.contiguous(), dx, n, STEPS, TILE, num_warps=2
        )
        return dx
