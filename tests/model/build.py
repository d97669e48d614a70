"""Models for tests: our kernels, the references in float64 as truth, or the deterministic table."""

from __future__ import annotations

from pathlib import Path

import torch

from oxplow.contracts import CONTRACTS
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.reference import reference_kernels
from oxplow.ops.table import Facts, OpTable, select

CPU = torch.device("cpu")


def our_table(*, invariant: bool = False, device: torch.device = CPU) -> OpTable:
    """Select our kernels for float32."""
    facts = Facts(device=device, dtype=torch.float32, invariant=invariant)
    return select(builtin_kernels(), CONTRACTS, facts)


def our_model(
    directory: Path,
    *,
    invariant: bool = False,
    always_select: bool = False,
    device: torch.device = CPU,
) -> HybridModel:
    """Load a checkpoint on our kernels."""
    return load_model(
        directory,
        our_table(invariant=invariant, device=device),
        LoadOptions(always_select=always_select),
    )


def truth_model(directory: Path, width: torch.dtype = torch.float64) -> HybridModel:
    """Load a checkpoint on the contracts' references, computing in `width`."""
    facts = Facts(device=CPU, dtype=width)
    table = select(reference_kernels(CONTRACTS.values(), width), CONTRACTS, facts)
    return load_model(directory, table, LoadOptions(weight_dtype=None, always_select=True))
