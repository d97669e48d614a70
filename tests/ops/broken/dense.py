"""Broken dense kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.feedback.gate import Reason
from tests.ops.broken import Broken


def _eps_outside(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


def _in_place(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    x.copy_(y)
    return y


BROKEN = (
    Broken(op="rms_norm", fault="eps outside the root", run=_eps_outside, case="tiny_values", tensor="y"),
    Broken(
        op="rms_norm", fault="normalises in place", run=_in_place, case="decode", reason=Reason.UNTOUCHED, tensor="x"
    ),
)
