"""Portable dense kernels: norms, linear layers and the clamped SwiGLU.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the model.
Invariant: statistics and accumulation in float32, one cast to the input dtype where the contract allows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.ops.table import Kernel


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise rows; statistics in float32, then cast, then multiply by the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


KERNELS = (Kernel(op="rms_norm", name="torch", run=rms_norm, invariant=True),)
