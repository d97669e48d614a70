"""Contract of the vision merger: four patches of a 2 x 2 block become one row of the text model.

Owns meaning only: a reference that adds one tap of the convolution at a time. Knows no kernel and
no model. Invariant: first-order error propagation gives the law, root-sum-square from stage to
stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxplow.contracts.laws import Close
from oxplow.contracts.paging import tensor_bytes, widened
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor


class _Merged(NamedTuple):
    h: Tensor  # [B, Do], after the convolution
    a: Tensor  # after proj
    n: Tensor  # after LayerNorm
    e: Tensor  # after GELU
    gate: Tensor  # [B, F]
    up: Tensor
    s: Tensor  # silu(min(gate, limit)) * clamp(up)
    y: Tensor  # [B, Do]


def _merge(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    proj: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    limit: float,
    norm_eps: float,
) -> _Merged:
    h = conv_bias.expand(x.shape[0] // 4, -1)
    for r in range(2):
        for c in range(2):
            h = h + x[2 * r + c :: 4] @ conv_weight[:, :, r, c].T
    a = h @ proj.T
    centred = a - a.mean(-1, keepdim=True)
    n = centred / (centred.square().mean(-1, keepdim=True) + norm_eps).sqrt()
    n = n * norm_weight + norm_bias
    e = n * (1 + torch.erf(n / math.sqrt(2))) / 2
    G, U = e @ gate.T, e @ up.T
    low = G.clamp(max=limit)
    s = low / (1 + torch.exp(-low)) * U.clamp(-limit, limit)
    return _Merged(h, a, n, e, G, U, s, s @ down.T)


def vision_merge_reference(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    proj: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    limit: float,
    norm_eps: float,
) -> dict[str, Tensor]:
    """Add the four taps of the convolution one by one, then every later stage as it is written."""
    merged = _merge(
        x, conv_weight, conv_bias, proj, norm_weight, norm_bias, gate, up, down,
        limit=limit, norm_eps=norm_eps,
    )  # fmt: skip
    return {"y": merged.y}


def _merge_error(args: Mapping[str, Any], stored: bool) -> Tensor:
    """Return the error scale [B, Do] of y, carried from stage to stage as root-sum-square.

    Every stage adds its own: with `stored` one relative error of what it hands on, else the dot
    bound |A||B| of its product.
    """
    a = widened(args)
    m = _merge(**a)
    limit = a["limit"]

    def product(spread: Tensor, inner: Tensor, weight: Tensor, outer: Tensor) -> Tensor:
        own = outer.abs() if stored else inner.abs() @ weight.abs().T
        return (spread.square() @ weight.square().T + own.square()).sqrt()

    taps = a["conv_weight"].permute(0, 2, 3, 1).flatten(1)
    rows = a["x"].reshape(-1, taps.shape[1])
    h = product(torch.zeros_like(rows), rows, taps, m.h)
    p = product(h, m.h, a["proj"], m.a)
    centred = m.a - m.a.mean(-1, keepdim=True)
    root = (centred.square().mean(-1, keepdim=True) + a["norm_eps"]).sqrt()
    shared = p.square().mean(-1, keepdim=True) / p.shape[1] * (1 + (centred / root).square())
    own = m.n.abs() if stored else m.n.abs() + a["norm_weight"].abs() * _mean_abs(m.a) / root
    n = torch.hypot((p.square() + shared).sqrt() / root * a["norm_weight"], own)
    e = torch.hypot(1.13 * n, m.e)  # GELU's slope is at most 1.13
    gate, up = product(e, m.e, a["gate"], m.gate), product(e, m.e, a["up"], m.up)
    low, capped = m.gate.clamp(max=limit), m.up.clamp(-limit, limit)
    silu = low * torch.sigmoid(low)
    of_factors = torch.hypot(1.1 * gate * capped, silu * up)  # SiLU's slope is at most 1.1
    s = torch.hypot(of_factors, 2 * m.s)  # the SiLU and the product
    return product(s, m.s, a["down"], torch.zeros_like(m.y))


def _mean_abs(x: Tensor) -> Tensor:
    return x.abs().mean(-1, keepdim=True)


def _merge_case(
    g: torch.Generator,
    merged: int,
    width: int = 16,
    out: int = 24,
    inner: int = 40,
    limit: float = 10.0,
    size: float = 1.0,
) -> Args:
    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) / columns**0.5

    return {
        "x": torch.randn(4 * merged, width, generator=g) * size,
        "conv_weight": weight(out, 4 * width).view(out, width, 2, 2),
        "conv_bias": 0.5 * torch.randn(out, generator=g) * size,
        "proj": weight(out, out),
        "norm_weight": 1 + 0.3 * torch.randn(out, generator=g),
        "norm_bias": 0.3 * torch.randn(out, generator=g),
        "gate": 2 * weight(inner, out),
        "up": 2 * weight(inner, out),
        "down": weight(out, inner),
        "limit": limit,
        "norm_eps": 1e-5,
    }


def _merge_cost(args: Args) -> Cost:
    T, D = args["x"].shape
    F, Do = args["gate"].shape
    moved = tensor_bytes(*args.values()) + T // 4 * Do * args["x"].element_size()
    flops = T // 4 * (2 * Do * (4 * D + Do + 3 * F) + 10 * Do + 6 * F)
    return Cost(bytes=moved, flops=flops)


VISION_MERGE = OpContract(
    name="vision_merge",
    summary="2 x 2 convolution over a block of patches, LayerNorm, GELU, clamped SwiGLU",
    source="model.md 10 and 7",
    axes={
        "T": "patches, four per block, blocks together (row in block before column in block)",
        "D": "width of the tower",
        "Do": "width of the text model",
        "F": "inner width of the SwiGLU",
    },
    inputs={
        "x": tensor(Role.ACT, "T D"),
        "conv_weight": tensor(Role.WEIGHT, "Do D 2 2"),
        "conv_bias": tensor(Role.WEIGHT, "Do"),
        "proj": tensor(Role.WEIGHT, "Do Do"),
        "norm_weight": tensor(Role.WEIGHT, "Do"),
        "norm_bias": tensor(Role.WEIGHT, "Do"),
        "gate": tensor(Role.WEIGHT, "F Do"),
        "up": tensor(Role.WEIGHT, "F Do"),
        "down": tensor(Role.WEIGHT, "Do F"),
    },
    scalars={
        "limit": "upper clamp of the gate, and both clamps of up",
        "norm_eps": "added to the variance, inside the root",
    },
    outputs={"y": tensor(Role.ACT, "T/4 Do")},
    reference=vision_merge_reference,
    constraints=(
        Constraint("T is a multiple of 4", lambda a: len(a["x"]) % 4 == 0),
        Constraint("conv_weight has 2 x 2 taps", lambda a: a["conv_weight"].shape[2:] == (2, 2)),
    ),
    cases=(
        Case("image", CaseKind.ORDINARY, lambda g: _merge_case(g, 6)),
        Case("one_block_odd_widths", CaseKind.EDGE, lambda g: _merge_case(g, 1, 7, 13, 19)),
        Case("no_blocks", CaseKind.EDGE, lambda g: _merge_case(g, 0)),
        Case(
            "clamps_bind",
            CaseKind.EXCITATION,
            lambda g: _merge_case(g, 5, limit=0.7),
            note="gate clamped below too, or up clamped on one side only",
        ),
        Case(
            "tiny_values",
            CaseKind.EXCITATION,
            lambda g: _merge_case(g, 4, size=3e-3),
            note="norm_eps decides: another eps, or eps outside the root",
        ),
    ),
    checks={
        "y": Close(
            length=lambda a: max(a["down"].shape[1], 4 * a["x"].shape[1]),
            magnitude=lambda a: _merge_error(a, stored=False),
            stored=lambda a: _merge_error(a, stored=True),
        )
    },
    cost=_merge_cost,
)
