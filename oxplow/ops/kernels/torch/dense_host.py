"""Norms of one row on a CPU, with few torch calls.

Owns the forms for one row; `dense` does the rest. Knows the contracts' names and shapes, no model.
Invariant: sums of squares in float32, the factor of a row in Python's doubles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.dense import gated_rms_norm, rms_norm
from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.table import Kernel


def rms_norm_host(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise one float32 row by a factor found on the host; `rms_norm` does more."""
    if x.shape[0] != 1 or x.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return rms_norm(x, weight, eps=eps)
    row = x[0]
    square = torch.dot(row, row).item() / x.shape[1] + eps
    if square <= 0:  # a row of zeros and no eps: what that gives is not decided here
        return rms_norm(x, weight, eps=eps)
    return torch.mul(x, weight).mul_(square**-0.5)


def gated_rms_norm_host(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise the float32 heads of one row with their factors in one small tensor."""
    if x.shape[0] != 1 or x.dtype is not torch.float32 or gate.dtype is not torch.float32:
        return gated_rms_norm(x, gate, weight, eps=eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.sigmoid(gate).mul_(x).mul_(weight).mul_(factor)


KERNELS = (
    Kernel(op="rms_norm", name="torch-host", run=rms_norm_host, supports=on_host, rank=1),
    Kernel(
        op="gated_rms_norm", name="torch-host", run=gated_rms_norm_host, supports=on_host, rank=1
    ),
)
