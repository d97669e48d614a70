"""Portable hyper-connection kernels.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the
model. Invariant: coefficients are float32 whatever the activations are. Sinkhorn keeps row and
column scalings of one fixed matrix A: with y = 1 / row scaling and x = 1 / column scaling, the step
that divides by (sum + eps) is exactly y <- eps * y + A (1 / x), or x <- eps * x + A' (1 / y).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from oxplow.ops.kernels.torch.invariant import matmul_rows, row_invariance, sigmoid
from oxplow.ops.table import Kernel


def mhc_collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (x [T, D], post [T, n], mix [T, n, n]) of one site from its streams [T, n, D].

    Memory: one float32 copy of the streams where they are not float32, and [T, n, n] temporaries.
    """
    T, n, D = streams.shape
    wide = streams.float()
    flat = wide.reshape(T, n * D)
    raw = linear(flat, fn.float())  # [T, M]; the norm's factor is applied to the products
    norm = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    slope = norm.square().div_(n * D).add_(norm_eps).rsqrt_() * scale  # [T, 3]
    gates = torch.addcmul(
        base[: 2 * n].view(2, n), raw[:, : 2 * n].view(T, 2, n), slope[:, :2, None]
    ).sigmoid_()
    pre, post = gates[:, 0] + mix_eps, gates[:, 1] * 2
    logits = torch.addcmul(
        base[2 * n :].view(n, n), raw[:, 2 * n :].view(T, n, n), slope[:, 2:, None]
    )
    mix = _balance(torch.softmax(logits, dim=-1).add_(mix_eps), mix_eps, iterations)
    x = torch.bmm(pre.unsqueeze(1), wide).squeeze(1)
    return x.to(streams.dtype), post, mix


def _balance(A: Tensor, eps: float, iterations: int) -> Tensor:
    """Scale [T, n, n] by Sinkhorn: `iterations` column steps with one row step between two of them.

    Two torch calls a step instead of three, and the matrix itself is read, never rewritten.
    """
    At = A.transpose(1, 2).contiguous()
    x = At.sum(-1, keepdim=True).add_(eps)  # [T, n, 1], 1 / column scaling
    y = torch.ones_like(x)  # 1 / row scaling
    column, row = x.reciprocal(), torch.empty_like(y)
    for _ in range(iterations - 1):
        torch.reciprocal(y.baddbmm_(A, column, beta=eps), out=row)
        torch.reciprocal(x.baddbmm_(At, row, beta=eps), out=column)
    return A.div_(y).div_(x.transpose(1, 2))


def mhc_expand(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Return the new streams [T, n, D]; mix is applied transposed, one cast at the end.

    Memory: one float32 copy of streams and output where the activations are not float32.
    """
    out = torch.bmm(mix.transpose(1, 2), streams.float())
    return out.addcmul_(post.unsqueeze(-1), y.float().unsqueeze(1)).to(streams.dtype)


def mhc_collapse_invariant(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `mhc_collapse` does with bits that depend on the token's own streams only.

    Long sums go through `matmul_rows`; all else is elementwise or a sum over n in memory order.
    """
    T, n, D = streams.shape
    wide = streams.float()
    flat = wide.reshape(T, n * D)
    raw = matmul_rows(flat, fn)
    square = matmul_rows(flat.square(), flat.new_ones(1, n * D))
    slope = square.div_(n * D).add_(norm_eps).rsqrt_() * scale
    gates = raw[:, : 2 * n].view(T, 2, n) * slope[:, :2, None] + base[: 2 * n].view(2, n)
    gates = sigmoid(gates)  # torch's own gives other bits in the tail of a vector loop
    pre, post = gates[:, 0] + mix_eps, gates[:, 1] * 2
    logits = raw[:, 2 * n :].view(T, n, n) * slope[:, 2:, None] + base[2 * n :].view(n, n)
    mix = _balance_invariant(torch.softmax(logits, dim=-1).add_(mix_eps), mix_eps, iterations)
    x = pre[:, 0, None] * wide[:, 0]
    for stream in range(1, n):
        x.addcmul_(pre[:, stream, None], wide[:, stream])
    return x.to(streams.dtype), post, mix


def _balance_invariant(A: Tensor, eps: float, iterations: int) -> Tensor:
    """Do the steps of `_balance` with sums over n neighbours in memory, no small products."""
    At = A.transpose(1, 2).contiguous()
    x = At.sum(-1, keepdim=True).add_(eps)
    y = torch.ones_like(x)
    for _ in range(iterations - 1):
        y = torch.add((A / x.transpose(1, 2)).sum(-1, keepdim=True), y, alpha=eps)
        x = torch.add((At / y.transpose(1, 2)).sum(-1, keepdim=True), x, alpha=eps)
    return A.div_(y).div_(x.transpose(1, 2))


def mhc_expand_invariant(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Compute what `mhc_expand` does, adding stream after stream elementwise."""
    wide = streams.float()
    out = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for origin in range(streams.shape[1]):
        out.addcmul_(mix[:, origin, :, None], wide[:, origin, None])
    return out.to(streams.dtype)


KERNELS = (
    Kernel(op="mhc_collapse", name="torch", run=mhc_collapse),
    Kernel(
        op="mhc_collapse",
        name="torch-invariant",
        run=mhc_collapse_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="mhc_expand", name="torch", run=mhc_expand),
    Kernel(
        op="mhc_expand", name="torch-invariant", run=mhc_expand_invariant, invariant=True, rank=-1
    ),
)
