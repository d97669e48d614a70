"""Contracts of the vision ops; attention inside each image is written here.

Owns meaning only: a reference that turns one pair of channels at a time. Knows no kernel and no
model. Invariant: a patch sees the patches of its own image, all of them and no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Close
from oxplow.contracts.paging import cu_seqlens_fit, ragged, spans, tensor_bytes, widened
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor
from oxplow.contracts.vision_merge import VISION_MERGE


def _angles(coords: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Return [S, head_dim / 2]: rows' angles, then columns', one per pair of channels."""
    inverse = [theta ** (-2 * i / (head_dim // 2)) for i in range(head_dim // 4)]
    by_axis = [coords[:, axis].to(dtype) * f for axis in (0, 1) for f in inverse]
    return torch.stack(by_axis, dim=1)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channels (i, i + half) of x [S, Dh] by angle i, pair by pair."""
    half = x.shape[1] // 2
    out = torch.empty_like(x)
    for i in range(half):
        cos, sin = torch.cos(angles[:, i]), torch.sin(angles[:, i])
        out[:, i] = x[:, i] * cos - x[:, i + half] * sin
        out[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
    return out


def vision_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, coords: Tensor, cu_seqlens: Tensor, *, theta: float
) -> dict[str, Tensor]:
    """Attend image by image and head by head with every score written out."""
    out = torch.zeros_like(v)
    Dh = q.shape[2]
    for a, b in spans(cu_seqlens):
        angles = _angles(coords[a:b], Dh, theta, q.dtype)
        for h in range(q.shape[1]):
            scores = _turned(q[a:b, h], angles) @ _turned(k[a:b, h], angles).T / math.sqrt(Dh)
            out[a:b, h] = torch.softmax(scores, dim=-1) @ v[a:b, h]
    return {"o": out}


def _error_of_head(
    q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor], stored: bool
) -> Tensor:
    """Return the error scale [S, Dh] of one image and head; q and k are not yet turned, and
    `angles` are theirs.

    An error d of score (t, j) moves the output by p_tj * d * (v_j - o_t). With `stored`: one
    relative error each in the turned q, the turned k and p, added as root-sum-square. Else: the dot
    bound of the scores, where an angle's own rounding counts too, and of the sum over j.
    """
    scale = q.shape[1] ** -0.5
    tq, tk = _turned(q, angles[0]), _turned(k, angles[1])
    p = torch.softmax(tq @ tk.T * scale, dim=-1)
    o = p @ v
    if stored:
        swing = torch.einsum("tj,jd,jv->tdv", p, tk, v) - (p @ tk).unsqueeze(2) * o.unsqueeze(1)
        of_q = (tq.square().unsqueeze(2) * swing.square()).sum(1)
        reach = (v.unsqueeze(0) - o.unsqueeze(1)).square()  # [t, j, v]
        of_k = torch.einsum("tj,tjv->tv", p.square() * (tq.square() @ tk.square().T), reach)
        return (scale**2 * (of_q + of_k) + p.square() @ v.square()).sqrt()
    half = q.shape[1] // 2
    long_q, long_k = (torch.hypot(x[:, :half], x[:, half:]) for x in (q, k))
    turn_q, turn_k = (1 + a.abs() for a in angles)
    size = 2 * scale * ((long_q * turn_q) @ long_k.T + long_q @ (long_k * turn_k).T)
    size = p * (1 + size)
    return size @ v.abs() + size.sum(1, keepdim=True) * o.abs()


def _attention_error(args: Mapping[str, Any], stored: bool) -> Tensor:
    a = widened(args)
    out = torch.zeros_like(a["v"])
    for first, end in spans(a["cu_seqlens"]):
        angles = _angles(a["coords"][first:end], out.shape[2], a["theta"], torch.float64)
        for h in range(out.shape[1]):
            q, k, v = (a[name][first:end, h] for name in ("q", "k", "v"))
            out[first:end, h] = _error_of_head(q, k, v, (angles, angles), stored)
    return out


def merge_order_coords(height: int, width: int) -> Tensor:
    """Return (row, column) of every patch, [height * width, 2] int64, 2 x 2 blocks together."""
    return torch.tensor(
        [
            (2 * block_row + r, 2 * block_column + c)
            for block_row in range(height // 2)
            for block_column in range(width // 2)
            for r in range(2)
            for c in range(2)
        ],
        dtype=torch.int64,
    ).reshape(height * width, 2)


def _attention_case(
    g: torch.Generator,
    grids: Sequence[tuple[int, int]],
    heads: int = 2,
    head_dim: int = 8,
    size: float = 1.0,
    corner: int = 0,
) -> Args:
    """Images of `grids` (height, width) patches; a grid (1, n) is n loose patches."""
    coords = [
        merge_order_coords(h, w)
        if h % 2 == 0
        else torch.tensor([[3, c] for c in range(w)]).view(-1, 2)
        for h, w in grids
    ]
    T = sum(len(c) for c in coords)
    q, k, v = (torch.randn(T, heads, head_dim, generator=g) for _ in range(3))
    return {
        "q": q * size,
        "k": k * size,
        "v": v,
        "coords": torch.cat([torch.empty(0, 2, dtype=torch.int64), *coords]) + corner,
        "cu_seqlens": ragged([len(c) for c in coords]),
        "theta": 10000.0,
    }


def _loud_neighbour_case(g: torch.Generator) -> Args:
    args = _attention_case(g, ((4, 4), (2, 6), (4, 2)))
    args["v"][16:28] *= 1e4
    args["k"][16:28] *= 30
    return args


def _longest(args: Mapping[str, Any]) -> int:
    return max((b - a for a, b in spans(args["cu_seqlens"])), default=0)


def _attention_cost(args: Args) -> Cost:
    T, H, Dh = args["q"].shape
    pairs = sum((b - a) ** 2 for a, b in spans(args["cu_seqlens"]))
    moved = tensor_bytes(*args.values()) + args["v"].numel() * args["v"].element_size()
    return Cost(bytes=moved, flops=4 * pairs * H * Dh + 12 * T * H * Dh)


def vision_attention_part_reference(
    q: Tensor, k: Tensor, v: Tensor, q_coords: Tensor, coords: Tensor, *, theta: float
) -> dict[str, Tensor]:
    """Let the queries see every patch of the one image, head by head, every score written out."""
    out = torch.zeros_like(q)
    Dh = q.shape[2]
    of_q, of_k = (_angles(c, Dh, theta, q.dtype) for c in (q_coords, coords))
    for h in range(q.shape[1]):
        scores = _turned(q[:, h], of_q) @ _turned(k[:, h], of_k).T / math.sqrt(Dh)
        out[:, h] = torch.softmax(scores, dim=-1) @ v[:, h]
    return {"o": out}


def _part_error(args: Mapping[str, Any], stored: bool) -> Tensor:
    a = widened(args)
    out = torch.zeros_like(a["q"])
    angles = tuple(
        _angles(a[name], out.shape[2], a["theta"], torch.float64) for name in ("q_coords", "coords")
    )
    for h in range(out.shape[1]):
        q, k, v = (a[name][:, h] for name in ("q", "k", "v"))
        out[:, h] = _error_of_head(q, k, v, (angles[0], angles[1]), stored)
    return out


def _part_case(
    g: torch.Generator,
    grid: tuple[int, int],
    rows: slice,
    heads: int = 2,
    head_dim: int = 8,
    size: float = 1.0,
    corner: int = 0,
) -> Args:
    """Queries `rows` of one image of `grid` (height, width) patches."""
    args = _attention_case(g, (grid,), heads, head_dim, size, corner)
    del args["cu_seqlens"]
    theta = args.pop("theta")
    coords = args.pop("coords")
    q = args.pop("q")[rows].clone()
    return {"q": q, **args, "q_coords": coords[rows].clone(), "coords": coords, "theta": theta}


def _part_cost(args: Args) -> Cost:
    (Q, H, Dh), T = args["q"].shape, args["k"].shape[0]
    moved = tensor_bytes(*args.values()) + args["q"].numel() * args["q"].element_size()
    return Cost(bytes=moved, flops=4 * Q * T * H * Dh + 6 * (Q + T) * H * Dh)


VISION_ATTENTION = OpContract(
    name="vision_attention",
    summary="2-D rotary, then full attention inside each image",
    source="model.md 10",
    axes={
        "T": "patches of all images",
        "H": "heads",
        "Dh": "width of a head, a multiple of 4",
        "N": "images, or temporal patches of a video",
    },
    inputs={
        "q": tensor(Role.ACT, "T H Dh"),
        "k": tensor(Role.ACT, "T H Dh"),
        "v": tensor(Role.ACT, "T H Dh"),
        "coords": tensor(Role.INT, "T 2"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    scalars={"theta": "base of the rotary wavelengths"},
    outputs={"o": tensor(Role.ACT, "T H Dh")},
    reference=vision_attention_reference,
    constraints=(
        Constraint("Dh is a multiple of 4", lambda a: a["q"].shape[2] % 4 == 0),
        Constraint("coords are (row, column)", lambda a: a["coords"].shape[1] == 2),
        Constraint("cu_seqlens rises from 0 to T", lambda a: cu_seqlens_fit(a, "q")),
    ),
    cases=(
        Case("one_image", CaseKind.ORDINARY, lambda g: _attention_case(g, ((6, 4),))),
        Case(
            "images_of_three_sizes",
            CaseKind.ORDINARY,
            lambda g: _attention_case(g, ((4, 6), (2, 2), (8, 4)), head_dim=16),
        ),
        Case("video", CaseKind.ORDINARY, lambda g: _attention_case(g, ((4, 4),) * 3, heads=3)),
        Case("no_patches", CaseKind.EDGE, lambda g: _attention_case(g, ((1, 0),))),
        Case(
            "empty_and_single",
            CaseKind.EDGE,
            lambda g: _attention_case(g, ((1, 0), (1, 1), (1, 0), (1, 3), (1, 1)), heads=1),
        ),
        Case("odd_heads", CaseKind.EDGE, lambda g: _attention_case(g, ((4, 10),), 3, head_dim=12)),
        Case(
            "strip",
            CaseKind.EXCITATION,
            lambda g: _attention_case(g, ((2, 40), (40, 2)), size=2.0),
            note="far from square: row and column swapped, or one wavelength for both",
        ),
        Case(
            "far_corner",
            CaseKind.EXCITATION,
            lambda g: _attention_case(g, ((2, 24),), head_dim=16, size=2.0, corner=900),
            note="large coordinates: tables in fewer bits than float32 lose the angle",
        ),
        Case(
            "steep",
            CaseKind.EXCITATION,
            lambda g: _attention_case(g, ((4, 8),), head_dim=16, size=5.0),
            note="scores of +-100: an exponential without its maximum, a wrong or missing scale",
        ),
        Case(
            "loud_neighbour",
            CaseKind.EXCITATION,
            _loud_neighbour_case,
            note="one image 10,000 times louder: a leak over the border drowns the others",
        ),
    ),
    checks={
        "o": Close(
            length=lambda a: a["q"].shape[2] + _longest(a),
            magnitude=lambda a: _attention_error(a, stored=False),
            stored=lambda a: _attention_error(a, stored=True),
        )
    },
    cost=_attention_cost,
)

VISION_ATTENTION_PART = OpContract(
    name="vision_attention_part",
    summary="2-D rotary, then attention of some patches of one image over all of them",
    source="model.md 10",
    axes={
        "Q": "patches that ask",
        "T": "patches of the image, at least 1",
        "H": "heads",
        "Dh": "width of a head, a multiple of 4",
    },
    inputs={
        "q": tensor(Role.ACT, "Q H Dh"),
        "k": tensor(Role.ACT, "T H Dh"),
        "v": tensor(Role.ACT, "T H Dh"),
        "q_coords": tensor(Role.INT, "Q 2"),
        "coords": tensor(Role.INT, "T 2"),
    },
    scalars={"theta": "base of the rotary wavelengths"},
    outputs={"o": tensor(Role.ACT, "Q H Dh")},
    reference=vision_attention_part_reference,
    constraints=(
        Constraint("Dh is a multiple of 4", lambda a: a["q"].shape[2] % 4 == 0),
        Constraint("coords are (row, column)", lambda a: a["coords"].shape[1] == 2),
        Constraint("q_coords are (row, column)", lambda a: a["q_coords"].shape[1] == 2),
        Constraint("the image has patches", lambda a: a["k"].shape[0] > 0),
    ),
    cases=(
        Case("all", CaseKind.ORDINARY, lambda g: _part_case(g, (6, 4), slice(None))),
        Case(
            "middle",
            CaseKind.ORDINARY,
            lambda g: _part_case(g, (8, 6), slice(10, 31), head_dim=16),
        ),
        Case("none", CaseKind.EDGE, lambda g: _part_case(g, (2, 2), slice(0, 0))),
        Case("last", CaseKind.EDGE, lambda g: _part_case(g, (4, 10), slice(39, 40), 3)),
        Case("one_head", CaseKind.EDGE, lambda g: _part_case(g, (2, 8), slice(3, 9), 1)),
        Case(
            "far_corner",
            CaseKind.EXCITATION,
            lambda g: _part_case(g, (2, 24), slice(20, 48), head_dim=16, size=2.0, corner=900),
            note="queries turned by the first rows' angles; tables in fewer bits than float32",
        ),
        Case(
            "steep",
            CaseKind.EXCITATION,
            lambda g: _part_case(g, (4, 8), slice(5, 17), head_dim=16, size=5.0),
            note="scores of +-100: an exponential without its maximum, a wrong or missing scale",
        ),
    ),
    checks={
        "o": Close(
            length=lambda a: a["q"].shape[2] + a["k"].shape[0],
            magnitude=lambda a: _part_error(a, stored=False),
            stored=lambda a: _part_error(a, stored=True),
        )
    },
    cost=_part_cost,
)

CONTRACTS = (VISION_ATTENTION, VISION_ATTENTION_PART, VISION_MERGE)
