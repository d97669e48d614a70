"""Deterministic mixture-of-experts kernels: products in row tiles of a fixed shape.

Owns the tiling of (token, slot) pairs by expert. Knows the contracts, no model.
Invariant: a tile holds pairs of one expert and is multiplied as [ROW_TILE, K] x [K, N] whatever it
holds, and a token adds its slots one after the other, so a row's bits are its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.dense import swiglu_invariant
from oxplow.ops.kernels.torch.fp8 import dequantise
from oxplow.ops.kernels.torch.invariant import ROW_TILE, aligned_rows, matmul_rows, sigmoid
from oxplow.ops.kernels.torch.routing import weigh


def router_invariant(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """Route as `router` does, with row-invariant products and sigmoids."""
    scores = sigmoid(matmul_rows(x, weight))
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True)[1][:, :top_k]
    return weigh(scores, ids.contiguous(), scaling, renormalise)


def experts_invariant(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float | None,
) -> Tensor:
    """Run the picked experts tile by tile in float32; one expert at a time is widened."""
    return _tiled(
        x,
        expert_ids,
        expert_weights,
        limit,
        lambda expert: gate_up[expert].flatten(0, 1).float(),
        lambda expert: down[expert].float(),
    )


def experts_fp8_invariant(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    limit: float | None,
    block: int,
) -> Tensor:
    """Run the picked experts tile by tile in float32; one expert at a time is widened."""
    return _tiled(
        x,
        expert_ids,
        expert_weights,
        limit,
        lambda expert: dequantise(gate_up[expert], gate_up_scale[expert], block).flatten(0, 1),
        lambda expert: dequantise(down[expert], down_scale[expert], block),
    )


def _tiled(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    limit: float | None,
    gate_up: Callable[[int], Tensor],
    down: Callable[[int], Tensor],
) -> Tensor:
    """Compute the experts; `gate_up` and `down` return one expert's float32 [2 I, D] and [D, I]."""
    absent = expert_ids < 0
    present = (~absent).flatten().nonzero().flatten()
    if len(present) == 0:
        return torch.zeros_like(x)
    place, tiles = _places(expert_ids.flatten()[present])
    rows = aligned_rows(x.new_zeros(len(tiles) * ROW_TILE, x.shape[1]))
    rows[place] = x[present // expert_ids.shape[1]].float()
    hidden = _multiply_tiles(rows, tiles, gate_up)
    inner = hidden.shape[1] // 2
    hidden = swiglu_invariant(hidden[:, :inner], hidden[:, inner:], limit=limit)
    out = _multiply_tiles(aligned_rows(hidden), tiles, down)
    pairs = out.new_zeros(expert_ids.numel(), x.shape[1])
    pairs[present] = out[place]
    shares = pairs.view(*expert_ids.shape, x.shape[1]) * expert_weights[..., None]
    shares.masked_fill_(absent[..., None], 0.0)
    y = shares[:, 0].clone()
    for slot in range(1, expert_ids.shape[1]):  # a fixed order of addition, for any T
        y += shares[:, slot]
    return y.to(x.dtype)


def _places(experts: Tensor) -> tuple[Tensor, list[int]]:
    """Return where each pair of `experts` [P] goes in tiles of one expert, and each tile's expert.

    The list waits for the device: a tile's weight is taken as a view, which needs its number.
    """
    ordered, order = experts.sort(stable=True)
    counts = experts.bincount()
    tiles = -(-counts // ROW_TILE)
    first_row = (tiles.cumsum(0) - tiles) * ROW_TILE
    first_pair = counts.cumsum(0) - counts
    rank = torch.arange(len(experts), device=experts.device) - first_pair[ordered]
    place = torch.empty_like(order)
    place[order] = first_row[ordered] + rank
    numbers = torch.arange(len(counts), device=experts.device)
    return place, numbers.repeat_interleave(tiles).tolist()


def _multiply_tiles(rows: Tensor, tiles: list[int], weight: Callable[[int], Tensor]) -> Tensor:
    """Multiply each tile of `rows` (from `aligned_rows`) with its expert's weight [N, K]."""
    out, loaded, turned = torch.empty(0), -1, torch.empty(0)
    for number, expert in enumerate(tiles):
        if expert != loaded:  # tiles are sorted, so every picked expert is widened once
            loaded, turned = expert, weight(expert).t()
        if number == 0:
            out = rows.new_empty(rows.shape[0], turned.shape[1])
        span = slice(number * ROW_TILE, (number + 1) * ROW_TILE)
        torch.mm(rows[span], turned, out=out[span])
    return out
