"""Contracts of the dense ops: linear layers and the clamped SwiGLU, with the norms beside them.

Owns meaning only: references in plain torch, written for reading. Knows no kernel and no model.
Invariant: every reference works in the dtype of its inputs, so float64 in gives the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts import norms
from oxplow.contracts.laws import Close
from oxplow.contracts.schema import (
    Args,
    Case,
    CaseKind,
    Constraint,
    Cost,
    OpContract,
    Role,
    moved_bytes,
    tensor,
)

ORDINARY, EDGE, EXCITATION = CaseKind.ORDINARY, CaseKind.EDGE, CaseKind.EXCITATION


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Sum products over the inputs, one output column after the other; then add the bias."""
    y = torch.stack([(x * row).sum(-1) for row in weight], dim=-1)
    return {"y": y if bias is None else y + bias}


def _linear_magnitude(args: Mapping[str, Any]) -> Tensor:
    sizes = args["x"].double().abs() @ args["weight"].double().abs().t()
    bias = args["bias"]
    return sizes if bias is None else sizes + bias.double().abs()


def _linear_case(
    num_tokens: int, width: int, num_out: int, g: torch.Generator, *, bias: bool = False
) -> Args:
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        "weight": torch.randn(num_out, width, generator=g) * width**-0.5,
        "bias": torch.randn(num_out, generator=g) if bias else None,
    }


def _cancelling_case(g: torch.Generator) -> Args:
    """Return pairs of large, nearly opposite products: their sum is far smaller than they are.

    A part in 500 is left over: more than the law allows, so that zeros are no answer.
    """
    x = 1000 * torch.randn(4, 128, 1, generator=g)
    weight = torch.randn(24, 128, 1, generator=g)
    left = 1 + 2e-3 * torch.randn(24, 128, 1, generator=g)
    return {
        "x": torch.cat((x, 1.001 * x), -1).flatten(1),
        "weight": torch.cat((weight, -weight / 1.001 * left), -1).flatten(1),
        "bias": None,
    }


LINEAR = OpContract(
    name="linear",
    summary="y = x W^T + b; float32 activations with bfloat16 weights multiply in float32",
    source="architecture.md 6; Higham, chapter 3",
    axes={"T": "tokens", "K": "inputs", "N": "outputs"},
    inputs={
        "x": tensor(Role.ACT, "T K"),
        "weight": tensor(Role.WEIGHT, "N K"),
        "bias": tensor(Role.WEIGHT, "N", optional=True),
    },
    outputs={"y": tensor(Role.ACT, "T N")},
    reference=linear_reference,
    cases=(
        Case("decode", ORDINARY, lambda g: _linear_case(3, 128, 96, g)),
        Case("prefill_with_bias", ORDINARY, lambda g: _linear_case(37, 160, 72, g, bias=True)),
        Case("one_row_odd_sizes", EDGE, lambda g: _linear_case(1, 67, 33, g, bias=True)),
        Case("one_output", EDGE, lambda g: _linear_case(5, 40, 1, g)),
        Case("one_input", EDGE, lambda g: _linear_case(9, 1, 7, g)),
        Case("no_rows", EDGE, lambda g: _linear_case(0, 64, 24, g, bias=True)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _linear_case(4097, 8, 5, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "several_panels",
            EDGE,
            lambda g: _linear_case(2, 2100, 600, g, bias=True),
            note="over 2^20 weights: more than one panel where weights are widened",
        ),
        Case(
            "cancelling",
            EXCITATION,
            _cancelling_case,
            note="large products cancel: catches activations rounded to bfloat16 before the sum",
        ),
    ),
    checks={"y": Close(length=lambda a: a["x"].shape[-1], magnitude=_linear_magnitude)},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "weight", "bias")
        + a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size(),
        flops=2 * a["x"].numel() * a["weight"].shape[0],
    ),
)


def dequantise_blocks(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """Return code * scale of its block; codes [..., N, K], scales [..., NB, KB], ragged ends."""
    rows, columns = weight.shape[-2:]
    spread = scale.repeat_interleave(block, -2).repeat_interleave(block, -1)
    return weight * spread[..., :rows, :columns]


def linear_fp8_reference(
    x: Tensor, weight: Tensor, scale: Tensor, *, block: int
) -> dict[str, Tensor]:
    """Multiply every code by the scale of its block, then do a plain linear."""
    return linear_reference(x, dequantise_blocks(weight, scale, block), None)


def _linear_fp8_magnitude(args: Mapping[str, Any]) -> Tensor:
    wide = dequantise_blocks(args["weight"].double(), args["scale"].double(), int(args["block"]))
    return args["x"].double().abs() @ wide.abs().t()


def finite_codes(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Return e4m3 codes drawn evenly from all 254 finite ones, subnormals and -0 included."""
    signs = torch.randint(0, 2, shape, generator=g)
    codes = torch.randint(0, 127, shape, generator=g) + 128 * signs
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def normal_codes(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Return normal values as e4m3 codes in the range that stored weights use."""
    return (100 * torch.randn(shape, generator=g)).clamp(-448, 448).to(torch.float8_e4m3fn)


def block_scales(shape: tuple[int, ...], spread: float, g: torch.Generator) -> Tensor:
    """Return positive float32 scales near 1e-3, unlike each other by factors up to 2**spread."""
    return 1e-3 * 2.0 ** (spread * torch.rand(shape, generator=g))


def has_nan_code(weight: Tensor) -> bool:
    """Tell whether e4m3 codes hold the NaN pattern (0x7f or 0xff)."""
    return bool((weight.view(torch.uint8) & 0x7F == 0x7F).any())


def _fp8_case(
    num_tokens: int, width: int, num_out: int, g: torch.Generator, *, spread: float = 1.0
) -> Args:
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        "weight": normal_codes((num_out, width), g),
        "scale": block_scales((-(-num_out // 128), -(-width // 128)), spread, g),
        "block": 128,
    }


def _all_codes_case(g: torch.Generator) -> Args:
    return _fp8_case(5, 130, 260, g) | {"weight": finite_codes((260, 130), g)}


LINEAR_FP8 = OpContract(
    name="linear_fp8",
    summary="y = x (codes * block scales)^T with e4m3 codes that stay one byte in memory",
    source="model.md 11",
    axes={
        "T": "tokens",
        "K": "inputs",
        "N": "outputs",
        "NB": "blocks of outputs, ceil(N / block)",
        "KB": "blocks of inputs, ceil(K / block)",
    },
    inputs={
        "x": tensor(Role.ACT, "T K"),
        "weight": tensor(Role.E4M3, "N K"),
        "scale": tensor(Role.F32, "NB KB"),
    },
    scalars={"block": "rows and columns that share one scale; a multiplier, whatever its name"},
    outputs={"y": tensor(Role.ACT, "T N")},
    reference=linear_fp8_reference,
    constraints=(
        Constraint(
            "scale has ceil(N/block) x ceil(K/block) entries",
            lambda a: (
                tuple(a["scale"].shape)
                == tuple(-(-size // a["block"]) for size in a["weight"].shape)
            ),
        ),
        Constraint("weight holds no NaN code", lambda a: not has_nan_code(a["weight"])),
    ),
    cases=(
        Case("decode", ORDINARY, lambda g: _fp8_case(2, 256, 384, g)),
        Case("prefill", ORDINARY, lambda g: _fp8_case(33, 384, 256, g)),
        Case("ragged_blocks", EDGE, lambda g: _fp8_case(3, 300, 200, g)),
        Case("less_than_a_block", EDGE, lambda g: _fp8_case(1, 67, 33, g)),
        Case("no_rows", EDGE, lambda g: _fp8_case(0, 128, 128, g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _fp8_case(4097, 8, 5, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case("several_panels", EDGE, lambda g: _fp8_case(2, 2100, 700, g)),
        Case(
            "unlike_scales",
            EXCITATION,
            lambda g: _fp8_case(4, 400, 290, g, spread=12.0),
            note="scales differ by up to 4096: catches a transposed, shifted or inverted scale",
        ),
        Case(
            "every_code",
            EXCITATION,
            _all_codes_case,
            note="all finite codes: catches a decoder that flushes subnormals or loses the sign",
        ),
    ),
    checks={"y": Close(length=lambda a: a["x"].shape[-1] + 1, magnitude=_linear_fp8_magnitude)},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "weight", "scale")
        + a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size(),
        flops=2 * a["x"].numel() * a["weight"].shape[0] + a["weight"].numel(),
    ),
)


def swiglu_reference(gate: Tensor, up: Tensor, *, limit: float | None) -> dict[str, Tensor]:
    """Clamp the gate from above and the up branch on both sides; return silu(gate) * up."""
    if limit is not None:
        gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
        up = torch.where(up > limit, torch.full_like(up, limit), up)
        up = torch.where(up < -limit, torch.full_like(up, -limit), up)
    return {"y": gate / (1 + torch.exp(-gate)) * up}


def _swiglu_magnitude(args: Mapping[str, Any]) -> Tensor:
    """Return |y|: no sum is involved, so the error is relative to each element."""
    wide = (args["gate"].double(), args["up"].double())
    return swiglu_reference(*wide, limit=args["limit"])["y"].abs()


def _swiglu_case(
    num_tokens: int, width: int, scale: float, limit: float | None, g: torch.Generator
) -> Args:
    return {
        "gate": scale * torch.randn(num_tokens, width, generator=g),
        "up": scale * torch.randn(num_tokens, width, generator=g),
        "limit": limit,
    }


def _deep_gate_case(g: torch.Generator) -> Args:
    """Return gates down to -60, where silu is -6e-25 and still has all its digits."""
    args = _swiglu_case(4, 61, 2.0, 10.0, g)
    args["gate"] = torch.linspace(-60.0, 20.0, 61).repeat(4, 1)
    return args


SWIGLU = OpContract(
    name="swiglu",
    summary="silu(min(gate, limit)) * clamp(up, -limit, limit)",
    source="model.md 7",
    axes={"T": "tokens", "I": "inner width"},
    inputs={"gate": tensor(Role.ACT, "T I"), "up": tensor(Role.ACT, "T I")},
    scalars={"limit": "clamp; the gate has no lower one; None: no clamp"},
    outputs={"y": tensor(Role.ACT, "T I")},
    reference=swiglu_reference,
    constraints=(
        Constraint("limit is None or positive", lambda a: a["limit"] is None or a["limit"] > 0),
    ),
    cases=(
        Case("decode", ORDINARY, lambda g: _swiglu_case(3, 96, 1.0, 10.0, g)),
        Case("no_limit", ORDINARY, lambda g: _swiglu_case(7, 64, 8.0, None, g)),
        Case("one_row_odd_width", EDGE, lambda g: _swiglu_case(1, 67, 1.0, 10.0, g)),
        Case("no_rows", EDGE, lambda g: _swiglu_case(0, 64, 1.0, 10.0, g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _swiglu_case(4097, 5, 1.0, 10.0, g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "clamps_bind",
            EXCITATION,
            lambda g: _swiglu_case(5, 80, 3.0, 1.0, g),
            note="most values pass the limit: catches a missing clamp, or one after the silu",
        ),
        Case(
            "deep_gate",
            EXCITATION,
            _deep_gate_case,
            note="gates far below -limit: catches a lower clamp on the gate",
        ),
    ),
    # four operations of one rounding each: exp, sum, quotient, product
    checks={"y": Close(length=lambda a: 4, magnitude=_swiglu_magnitude)},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "gate", "up") + moved_bytes(a, "up"), flops=7 * a["gate"].numel()
    ),
)


CONTRACTS = (*norms.CONTRACTS, LINEAR, LINEAR_FP8, SWIGLU)
