"""Broken hyper-connection kernels: the faults that model.md 14 lists, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ops.broken import Broken

Outputs = tuple[Tensor, Tensor, Tensor]


def _collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
    softmax_dim: int = -1,
    sums: tuple[int, int] = (-2, -1),
    sum_eps: float | None = None,
    post_factor: float = 2.0,
    coefficients: torch.dtype = torch.float32,
) -> Outputs:
    """Compute the op step by step; every keyword after `iterations` can plant one fault."""
    T, n, D = streams.shape
    z = streams.reshape(T, n * D)
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, C = (z @ fn.T).split([n, n, n * n], dim=-1)
    base, scale = base.to(coefficients).float(), scale.to(coefficients).float()
    bias = base.split([n, n, n * n])
    pre = torch.sigmoid(pre * scale[0] + bias[0]) + mix_eps
    post = post_factor * torch.sigmoid(post * scale[1] + bias[1])
    C = (C * scale[2] + bias[2]).view(T, n, n).softmax(softmax_dim) + mix_eps
    eps = mix_eps if sum_eps is None else sum_eps
    C = C / (C.sum(sums[0], keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(sums[1], keepdim=True) + eps)
        C = C / (C.sum(sums[0], keepdim=True) + eps)
    return (pre.unsqueeze(-1) * streams).sum(1), post, C


def _planted(**fault: Any) -> Callable[..., Outputs]:
    return lambda *args, **scalars: _collapse(*args, **{**scalars, **fault})


def _norm_with_mix_eps(*args: Tensor, **scalars: Any) -> Outputs:
    return _collapse(*args, **{**scalars, "norm_eps": scalars["mix_eps"]})


def _one_step_too_few(*args: Tensor, **scalars: Any) -> Outputs:
    return _collapse(*args, **{**scalars, "iterations": scalars["iterations"] - 1})


def _pre_without_eps(streams: Tensor, *args: Tensor, **scalars: Any) -> Outputs:
    x, post, mix = _collapse(streams, *args, **scalars)
    return x - scalars["mix_eps"] * streams.sum(1), post, mix


def _mix_transposed(streams: Tensor, *args: Tensor, **scalars: Any) -> Outputs:
    x, post, mix = _collapse(streams, *args, **scalars)
    return x, post, mix.mT.contiguous()


def _mix_not_transposed(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(1) + mix @ streams


def _mix_in_bfloat16(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(1) + mix.bfloat16().float().mT @ streams


def _residual_collapsed(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(1) + streams.mean(1, keepdim=True)


def _fault(fault: str, run: Callable[..., Any], case: str, tensor: str) -> Broken:
    return Broken(op="mhc_collapse", fault=fault, run=run, case=case, tensor=tensor)


BROKEN = (
    _fault("norm uses mix_eps", _norm_with_mix_eps, "tiny_streams", "x"),
    _fault("pre without mix_eps", _pre_without_eps, "coarse_mix_eps", "x"),
    _fault("base and scale in bfloat16", _planted(coefficients=torch.bfloat16), "decode", "x"),
    _fault("post without the factor 2", _planted(post_factor=1.0), "decode", "post"),
    _fault("softmax over columns", _planted(softmax_dim=-2), "two_iterations", "mix"),
    _fault("rows before columns", _planted(sums=(-1, -2)), "two_iterations", "mix"),
    _fault("sums without mix_eps", _planted(sum_eps=0.0), "unwanted_columns", "mix"),
    _fault("one Sinkhorn step too few", _one_step_too_few, "triangle", "mix"),
    _fault("mix returned transposed", _mix_transposed, "decode", "mix"),
    Broken(
        op="mhc_expand",
        fault="mix not transposed",
        run=_mix_not_transposed,
        case="decode",
        tensor="out",
    ),
    Broken(
        op="mhc_expand",
        fault="mix in bfloat16",
        run=_mix_in_bfloat16,
        case="large_residual",
        tensor="out",
    ),
    Broken(
        op="mhc_expand",
        fault="residual is the collapsed stream",
        run=_residual_collapsed,
        case="decode",
        tensor="out",
    ),
)
