"""Hyper-connections of a few tokens on a CPU: the small matrices in plain numbers.

Owns the forms for few tokens; `hyper` does the rest. Knows the contracts' names and shapes, no
model. Invariant: the long sums are torch's, in float32; between them and the results stand only
Python's doubles. Twenty Sinkhorn rounds of a 4 x 4 matrix are 39 steps of 4 sums: a torch call
costs more than a whole step in plain numbers (18 us against 105 us a matrix).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.kernels.torch.hyper import mhc_collapse, mhc_expand
from oxplow.ops.table import Kernel

_STREAMS = 4  # the unrolled loop is written for this number of streams
_FEW_TOKENS = 4  # the torch calls of `mhc_collapse` cost as much as about five tokens here


def mhc_collapse_host(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (x [T, D], post [T, n], mix [T, n, n]) of a few tokens; `mhc_collapse` does more.

    So it does where the streams are not four, and where Python refuses a number that torch takes
    (a division by zero, an exponential past the largest double).
    """
    T, n, D = streams.shape
    general = partial(
        mhc_collapse, streams, fn, base, scale,
        norm_eps=norm_eps, mix_eps=mix_eps, iterations=iterations,
    )  # fmt: skip
    if n != _STREAMS or not 0 < T <= _FEW_TOKENS:
        return general()
    wide = streams.float()
    flat = wide.view(T, n * D) if wide.is_contiguous() else wide.reshape(T, n * D)
    raw = linear(flat, fn.float()).tolist()
    norms = torch.linalg.vector_norm(flat, dim=-1).tolist()
    offsets, steep = base.tolist(), scale.tolist()
    try:
        rows = [
            _coefficients(
                products, norm * norm / (n * D) + norm_eps, offsets, steep, mix_eps, iterations
            )
            for products, norm in zip(raw, norms, strict=True)
        ]
    except (OverflowError, ZeroDivisionError):
        return general()
    told = torch.from_numpy(np.array(rows, dtype=np.float32))  # [T, n (2 + n)]
    pre, post, mix = told.split_with_sizes((n, n, n * n), 1)
    x = torch.mm(pre, wide[0]) if T == 1 else torch.bmm(pre.unsqueeze(1), wide).squeeze(1)
    if x.dtype is not streams.dtype:
        x = x.to(streams.dtype)
    return x, post, mix.view(T, n, n)


def _coefficients(
    raw: Sequence[float],
    square: float,
    base: Sequence[float],
    scale: Sequence[float],
    eps: float,
    iterations: int,
) -> list[float]:
    """Return pre, post and mix of one token in a row; `square` is the mean square plus its eps."""
    slope = square**-0.5
    first, second, third = (slope * s for s in scale)
    pre = [1 / (1 + exp(-(first * r + b))) + eps for r, b in zip(raw[:4], base[:4], strict=True)]
    post = [2 / (1 + exp(-(second * r + b))) for r, b in zip(raw[4:8], base[4:8], strict=True)]
    logits = [third * r + b for r, b in zip(raw[8:], base[8:], strict=True)]
    matrix: list[float] = []
    for i in (0, 4, 8, 12):
        s, t, u, v = logits[i : i + 4]
        peak = max(s, t, u, v)
        s, t, u, v = exp(s - peak), exp(t - peak), exp(u - peak), exp(v - peak)
        share = 1 / (s + t + u + v)
        matrix += (s * share + eps, t * share + eps, u * share + eps, v * share + eps)
    return pre + post + balance_four(matrix, eps, iterations)


def balance_four(matrix: Sequence[float], eps: float, iterations: int) -> list[float]:
    """Scale a 4 x 4 matrix, given row by row, as `hyper` says: x and y are 1 / scaling."""
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = matrix
    x0, x1, x2, x3 = (
        a + e + i + n + eps,
        b + f + j + o + eps,
        c + g + k + p + eps,
        d + h + m + q + eps,
    )
    y0 = y1 = y2 = y3 = 1.0
    for _ in range(iterations - 1):
        s, t, u, v = 1 / x0, 1 / x1, 1 / x2, 1 / x3
        y0 = eps * y0 + a * s + b * t + c * u + d * v
        y1 = eps * y1 + e * s + f * t + g * u + h * v
        y2 = eps * y2 + i * s + j * t + k * u + m * v
        y3 = eps * y3 + n * s + o * t + p * u + q * v
        s, t, u, v = 1 / y0, 1 / y1, 1 / y2, 1 / y3
        x0 = eps * x0 + a * s + e * t + i * u + n * v
        x1 = eps * x1 + b * s + f * t + j * u + o * v
        x2 = eps * x2 + c * s + g * t + k * u + p * v
        x3 = eps * x3 + d * s + h * t + m * u + q * v
    s, t, u, v = 1 / x0, 1 / x1, 1 / x2, 1 / x3
    w, x, y, z = 1 / y0, 1 / y1, 1 / y2, 1 / y3
    return [
        a * s * w, b * t * w, c * u * w, d * v * w,
        e * s * x, f * t * x, g * u * x, h * v * x,
        i * s * y, j * t * y, k * u * y, m * v * y,
        n * s * z, o * t * z, p * u * z, q * v * z,
    ]  # fmt: skip


def mhc_expand_host(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Return the new streams [1, n, D] of one token; `mhc_expand` does more."""
    if streams.shape[0] != 1 or streams.dtype is not torch.float32:
        return mhc_expand(streams, y, post, mix)
    out = torch.mm(mix[0].t(), streams[0])
    return out.addcmul_(post.view(-1, 1), y).unsqueeze(0)


KERNELS = (
    Kernel(op="mhc_collapse", name="torch-host", run=mhc_collapse_host, supports=on_host, rank=1),
    Kernel(op="mhc_expand", name="torch-host", run=mhc_expand_host, supports=on_host, rank=1),
)
