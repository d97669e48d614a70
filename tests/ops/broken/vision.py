"""Broken vision kernels: rotary layouts, borders between images, and the merger's small print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from oxplow.feedback.gate import Reason
from tests.ops.broken import Broken


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coords: Tensor,
    cu_seqlens: Tensor,
    *,
    theta: float,
    axes: tuple[int, int] = (0, 1),
    span: float = 0.5,
    interleaved: bool = False,
    one_segment: bool = False,
    scale: float | None = None,
    tables: torch.dtype = torch.float32,
    turn_values: bool = False,
) -> Tensor:
    """Compute the op per image; every keyword after theta can plant one fault."""
    Dh = q.shape[2]
    inverse = theta ** (-2 * torch.arange(Dh // 4) / (Dh * span))
    angles = (coords[:, list(axes)].float().unsqueeze(-1) * inverse).flatten(1).to(tables)
    cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        low, high = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = (low * cos - high * sin, high * cos + low * sin)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    q, k, v = turn(q), turn(k), turn(v) if turn_values else v
    ends = [0, len(q)] if one_segment else cu_seqlens.tolist()
    out = torch.empty_like(v)
    for a, b in zip(ends[:-1], ends[1:], strict=True):
        scores = torch.einsum("thd,shd->hts", q[a:b], k[a:b]) * (scale or Dh**-0.5)
        out[a:b] = torch.einsum("hts,shd->thd", scores.softmax(-1), v[a:b])
    return out


def _attend_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_coords: Tensor,
    coords: Tensor,
    *,
    theta: float,
    from_first: bool = False,
    seen: slice = slice(None),
    tables: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the op; every keyword after theta can plant one fault."""
    Dh = q.shape[2]
    inverse = theta ** (-2 * torch.arange(Dh // 4) / (Dh * 0.5))

    def turn(x: Tensor, places: Tensor) -> Tensor:
        angles = (places.float().unsqueeze(-1) * inverse).flatten(1).to(tables)
        cos, sin = angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    queries = turn(q, coords[: len(q)] if from_first else q_coords)
    scores = torch.einsum("thd,shd->hts", queries, turn(k, coords)[seen]) * Dh**-0.5
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v[seen])


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
    order: tuple[int, ...] = (0, 1, 2, 3),
    bias: float = 1.0,
    centre: bool = True,
    approximate: str = "none",
    gate_floor: float | None = None,
    up_floor: bool = True,
) -> Tensor:
    """Compute the op; every keyword after norm_eps can plant one fault."""
    blocks = x.view(-1, 4, x.shape[1])[:, list(order)]
    h = blocks.transpose(1, 2).flatten(1) @ conv_weight.flatten(1).T + bias * conv_bias
    a = h @ proj.T
    a = a - a.mean(-1, keepdim=True) if centre else a
    a = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + norm_eps) * norm_weight + norm_bias
    a = gelu(a, approximate=approximate)
    g = (a @ gate.T).clamp(gate_floor, limit)
    u = (a @ up.T).clamp(-limit if up_floor else None, limit)
    return (silu(g) * u) @ down.T


def _planted(run: Callable[..., Tensor], **fault: Any) -> Callable[..., Tensor]:
    return lambda *args, **inputs: run(*args, **{**inputs, **fault})


def _small_eps(**inputs: Any) -> Tensor:
    return _merge(**{**inputs, "norm_eps": 1e-6})


def _turned_in_place(q: Tensor, **inputs: Any) -> Tensor:
    return _attend(q.mul_(1.0 + 2.0**-10), **inputs)


def _attention(fault: str, case: str, **planted: Any) -> Broken:
    run = _planted(_attend, **planted)
    return Broken(op="vision_attention", fault=fault, run=run, case=case, tensor="o")


def _part(fault: str, case: str, **planted: Any) -> Broken:
    run = _planted(_attend_part, **planted)
    return Broken(op="vision_attention_part", fault=fault, run=run, case=case, tensor="o")


def _merger(fault: str, case: str, run: Callable[..., Tensor]) -> Broken:
    return Broken(op="vision_merge", fault=fault, run=run, case=case, tensor="y")


BROKEN = (
    _attention("row and column swapped", "strip", axes=(1, 0)),
    _attention("one axis for both", "strip", axes=(0, 0)),
    _attention("neighbouring channels paired", "one_image", interleaved=True),
    _attention("wavelengths over the whole head", "one_image", span=1.0),
    _attention("images see each other", "loud_neighbour", one_segment=True),
    _attention("scale left out", "one_image", scale=1.0),
    _attention("tables in bfloat16", "far_corner", tables=torch.bfloat16),
    _attention("values turned too", "one_image", turn_values=True),
    Broken(
        op="vision_attention",
        fault="queries scaled in place",
        run=_turned_in_place,
        case="one_image",
        reason=Reason.UNTOUCHED,
        tensor="q",
    ),
    _part("queries turned as if they were first", "far_corner", from_first=True),
    _part("the last patch is not seen", "middle", seen=slice(-1)),
    _part("tables in bfloat16", "far_corner", tables=torch.bfloat16),
    _merger("columns before rows", "image", _planted(_merge, order=(0, 2, 1, 3))),
    _merger("convolution without bias", "image", _planted(_merge, bias=0.0)),
    _merger("RMSNorm for LayerNorm", "image", _planted(_merge, centre=False)),
    _merger("GELU by tanh", "image", _planted(_merge, approximate="tanh")),
    _merger("gate clamped below", "clamps_bind", _planted(_merge, gate_floor=-0.7)),
    _merger("up not clamped below", "clamps_bind", _planted(_merge, up_floor=False)),
    _merger("norm_eps of the tower's rival", "tiny_values", _small_eps),
)
