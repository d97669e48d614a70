"""Contracts of the dense ops: norms, linear layers and the clamped SwiGLU.

Owns meaning only: references in plain torch, written for reading. Knows no kernel and no model.
Invariant: every reference works in the dtype of its inputs, so float64 in gives the truth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.contracts.laws import Close
from oxplow.contracts.schema import Args, Case, CaseKind, Cost, OpContract, Role, tensor


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float) -> dict[str, Tensor]:
    """Divide each row by the root of its mean square plus eps, then scale by weight."""
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return {"y": x / (mean_square + eps).sqrt() * weight}


def _rms_case(num_tokens: int, width: int, scale: float, g: torch.Generator) -> Args:
    return {
        "x": torch.randn(num_tokens, width, generator=g) * scale,
        "weight": 1 + 0.1 * torch.randn(width, generator=g),
        "eps": 1e-5,
    }


RMS_NORM = OpContract(
    name="rms_norm",
    summary="RMSNorm over the last axis with statistics in float32",
    source="model.md 3; Zhang and Sennrich 2019",
    axes={"T": "tokens", "D": "width"},
    inputs={"x": tensor(Role.ACT, "T D"), "weight": tensor(Role.WEIGHT, "D")},
    scalars={"eps": "added to the mean square, inside the root"},
    outputs={"y": tensor(Role.ACT, "T D")},
    reference=rms_norm_reference,
    cases=(
        Case("decode", CaseKind.ORDINARY, lambda g: _rms_case(3, 128, 1.0, g)),
        Case("one_row_odd_width", CaseKind.EDGE, lambda g: _rms_case(1, 67, 1.0, g)),
        Case("no_rows", CaseKind.EDGE, lambda g: _rms_case(0, 64, 1.0, g)),
        Case(
            "tiny_values",
            CaseKind.EXCITATION,
            lambda g: _rms_case(4, 96, 1e-3, g),
            note="eps decides: catches eps outside the root, or another eps",
        ),
    ),
    # two casts: the normalised value and the product with the weight (the released model does the same)
    checks={"y": Close(length=lambda a: a["x"].shape[-1], roundings=2)},
    cost=lambda a: Cost(
        bytes=2 * a["x"].numel() * a["x"].element_size() + a["weight"].numel() * a["weight"].element_size(),
        flops=4 * a["x"].numel(),
    ),
)

CONTRACTS = (RMS_NORM,)
