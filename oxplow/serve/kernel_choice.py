"""From decided settings to the kernels of this run.

Owns the step from `ResolvedConfig` to what kernels are asked, and the selection. Knows no model.
Invariant: the server, the examination and `oxplow explain` ask the same question, so what is
explained is what runs.
"""

from __future__ import annotations

import torch

from oxplow.config import ResolvedConfig, RuntimeConfig
from oxplow.contracts import CONTRACTS
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, OpTable, select

__all__ = ["chosen_kernels", "kernel_facts", "plain_kernels"]


def kernel_facts(decided: ResolvedConfig) -> Facts:
    """Return what kernels are asked; the model's sizes stay unknown."""
    return Facts(
        device=torch.device(decided.device),
        dtype=getattr(torch, decided.activation_dtype),
        invariant=decided.deterministic,
    )


def chosen_kernels(decided: ResolvedConfig, runtime: RuntimeConfig) -> OpTable:
    """Select one kernel per op, wishes first. Raises KernelUnavailable with every refusal."""
    wishes = runtime.preferred_kernels()
    return select(builtin_kernels(), CONTRACTS, kernel_facts(decided), wishes)


def plain_kernels(
    device: torch.device, *, dtype: torch.dtype = torch.float32, invariant: bool = False
) -> OpTable:
    """Select for an instrument: no settings, no wishes. Raises KernelUnavailable."""
    facts = Facts(device=device, dtype=dtype, invariant=invariant)
    return select(builtin_kernels(), CONTRACTS, facts)
