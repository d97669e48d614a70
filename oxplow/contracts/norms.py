"""Contracts of the norms: RMSNorm, LayerNorm and the gated RMSNorm of each head.

Owns meaning only: references in plain torch, written for reading. Knows no kernel and no model.
Invariant: every reference works in the dtype of its inputs, so float64 in gives the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Close
from oxplow.contracts.schema import (
    Args,
    Case,
    CaseKind,
    Cost,
    OpContract,
    Role,
    moved_bytes,
    tensor,
)

ORDINARY, EDGE, EXCITATION = CaseKind.ORDINARY, CaseKind.EDGE, CaseKind.EXCITATION


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
        Case("decode", ORDINARY, lambda g: _rms_case(3, 128, 1.0, g)),
        Case("one_row_odd_width", EDGE, lambda g: _rms_case(1, 67, 1.0, g)),
        Case("no_rows", EDGE, lambda g: _rms_case(0, 64, 1.0, g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _rms_case(4097, 8, 1.0, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "tiny_values",
            EXCITATION,
            lambda g: _rms_case(4, 96, 1e-3, g),
            note="eps decides: catches eps outside the root, or another eps",
        ),
    ),
    # two casts: the normalised value and its product with the weight (the released model: same)
    checks={"y": Close(length=lambda a: a["x"].shape[-1], roundings=2)},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "weight") + moved_bytes(a, "x"), flops=4 * a["x"].numel()
    ),
)


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float
) -> dict[str, Tensor]:
    """Centre each row, divide by the root of its biased variance plus eps; scale, shift."""
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
    return {"y": centred / (variance + eps).sqrt() * weight + bias}


def _layer_norm_magnitude(args: Mapping[str, Any]) -> Tensor:
    """Return what cancels in one element: value and mean over the deviation, scaled, plus bias.

    The mean is a dot product with ones, so its error goes by the mean of |x|, not by |mean|.
    """
    x = args["x"].double()
    root = (x.var(-1, keepdim=True, correction=0) + args["eps"]).sqrt()
    sizes = (x.abs() + x.abs().mean(-1, keepdim=True)) / root
    return sizes * args["weight"].double().abs() + args["bias"].double().abs()


def _layer_norm_case(
    num_tokens: int, width: int, offset: float, scale: float, g: torch.Generator
) -> Args:
    return {
        "x": offset + scale * torch.randn(num_tokens, width, generator=g),
        "weight": 1 + 0.1 * torch.randn(width, generator=g),
        "bias": torch.randn(width, generator=g),
        "eps": 1e-6,
    }


LAYER_NORM = OpContract(
    name="layer_norm",
    summary="LayerNorm over the last axis with statistics in float32",
    source="model.md 3 and 6; Ba, Kiros and Hinton 2016",
    axes={"T": "tokens", "D": "width"},
    inputs={
        "x": tensor(Role.ACT, "T D"),
        "weight": tensor(Role.WEIGHT, "D"),
        "bias": tensor(Role.WEIGHT, "D"),
    },
    scalars={"eps": "added to the biased variance, inside the root"},
    outputs={"y": tensor(Role.ACT, "T D")},
    reference=layer_norm_reference,
    cases=(
        Case("index_key", ORDINARY, lambda g: _layer_norm_case(5, 128, 0.2, 1.0, g)),
        Case("one_row_odd_width", EDGE, lambda g: _layer_norm_case(1, 67, 0.0, 1.0, g)),
        Case("no_rows", EDGE, lambda g: _layer_norm_case(0, 64, 0.0, 1.0, g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _layer_norm_case(4097, 8, 0.0, 1.0, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "far_mean",
            EXCITATION,
            lambda g: _layer_norm_case(4, 64, 3000.0, 1.0, g),
            note="the mean is 3000 deviations: catches E[x^2] - E[x]^2 and RMSNorm in its place",
        ),
        Case(
            "tiny_values",
            EXCITATION,
            lambda g: _layer_norm_case(4, 5, 0.0, 1e-3, g),
            note="eps decides, five columns: catches eps outside the root and the n-1 variance",
        ),
    ),
    checks={"y": Close(length=lambda a: a["x"].shape[-1], magnitude=_layer_norm_magnitude)},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "weight", "bias") + moved_bytes(a, "x"), flops=7 * a["x"].numel()
    ),
)


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float
) -> dict[str, Tensor]:
    """RMSNorm each head over its own channels, scale by weight and by the sigmoid of the gate."""
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return {"y": x / (mean_square + eps).sqrt() * weight * torch.sigmoid(gate)}


def _gated_case(shape: tuple[int, int, int], scale: float, g: torch.Generator) -> Args:
    num_tokens, num_heads, width = shape
    heads = 10.0 ** torch.arange(num_heads).remainder(3)[:, None]  # heads of unlike size
    return {
        "x": torch.randn(num_tokens, num_heads, width, generator=g) * heads * scale,
        "gate": 3 * torch.randn(num_tokens, num_heads, width, generator=g),
        "weight": 1 + 0.1 * torch.randn(width, generator=g),
        "eps": 1e-5,
    }


GATED_RMS_NORM = OpContract(
    name="gated_rms_norm",
    summary="RMSNorm of every head, times weight, times sigmoid(gate): the output norm of KDA",
    source="model.md 4",
    axes={"T": "tokens", "H": "heads", "V": "channels of a head's value"},
    inputs={
        "x": tensor(Role.ACT, "T H V"),
        "gate": tensor(Role.ACT, "T H V"),
        "weight": tensor(Role.WEIGHT, "V"),
    },
    scalars={"eps": "added to the mean square, inside the root"},
    outputs={"y": tensor(Role.ACT, "T H V")},
    reference=gated_rms_norm_reference,
    cases=(
        Case("decode", ORDINARY, lambda g: _gated_case((3, 6, 64), 1.0, g)),
        Case("one_row_odd_width", EDGE, lambda g: _gated_case((1, 2, 33), 1.0, g)),
        Case("no_rows", EDGE, lambda g: _gated_case((0, 2, 32), 1.0, g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _gated_case((4097, 2, 8), 1.0, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "unlike_heads",
            EXCITATION,
            lambda g: _gated_case((4, 5, 48), 1e-3, g),
            note="heads of size 1e-3 to 1e-1: catches one norm over all heads, and another eps",
        ),
    ),
    checks={"y": Close(length=lambda a: a["x"].shape[-1])},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "gate", "weight") + moved_bytes(a, "x"), flops=8 * a["x"].numel()
    ),
)


CONTRACTS = (RMS_NORM, LAYER_NORM, GATED_RMS_NORM)
