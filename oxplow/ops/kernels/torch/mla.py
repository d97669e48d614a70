"""Portable MLA kernels: latents into paged blocks, absorbed attention over chosen tokens or over
all.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the
model. Invariant: keys and values are never expanded per token (q~ = w_uk^T q, z = sum a c, o = w_uv
z), everything between the inputs and the one output cast is float32, and memory that holds no token
never reaches a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.paged import (
    Lane,
    LaneGroup,
    counting_is_free,
    cut_lanes,
    gather_blocks,
    group_lanes,
    lane_widths,
    put_rows,
    read_lengths,
    rows_to_sequences,
    survivors,
)
from oxplow.ops.table import Kernel

GATHER_ELEMENTS = 1 << 22
"""Most elements of the latents gathered at once on a CPU (16 MiB of float32); eight times more
elsewhere.
"""

_LANE, _KEYS = 32, 512  # dense: queries of a lane, keys of a tile at least
_FIXED_ROWS, _FIXED_KEYS = 4, 128  # shapes of the invariant variants: never depend on the call


def latent_write(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Write each latent to its slot of the paged cache; skip negative slots, never wait."""
    if len(latent) == 0:
        return
    kept, some = survivors(slot_mapping >= 0)
    put_rows(
        cache.view(-1, cache.shape[2]),
        slot_mapping[kept].long(),
        latent.index_select(0, kept),
        some,
    )


def sparse_mla_prefill(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Attend every query to its selected positions, absorbed, in tiles of queries.

    Peak memory over inputs and output: float32 copies of w_uk and w_uv, and about twice
    GATHER_ELEMENTS floats per tile (one query's S x R latents at least).
    """
    return _sparse(
        query, w_uk, w_uv, cache, block_table, selected, rows_to_sequences(cu_seqlens, len(query))
    )


def sparse_mla_decode(
    query: Tensor, w_uk: Tensor, w_uv: Tensor, cache: Tensor, block_table: Tensor, selected: Tensor
) -> Tensor:
    """Attend one query per sequence to its selected positions; memory as `sparse_mla_prefill`."""
    return _sparse(query, w_uk, w_uv, cache, block_table, selected, None)


def sparse_mla_prefill_invariant(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Compute `sparse_mla_prefill` in tiles of one shape: a row keeps its bits anywhere."""
    rows = rows_to_sequences(cu_seqlens, len(query))
    return _sparse(query, w_uk, w_uv, cache, block_table, selected, rows, fixed=True)


def sparse_mla_decode_invariant(
    query: Tensor, w_uk: Tensor, w_uv: Tensor, cache: Tensor, block_table: Tensor, selected: Tensor
) -> Tensor:
    """Compute `sparse_mla_decode` with the bits of `sparse_mla_prefill_invariant`."""
    return _sparse(query, w_uk, w_uv, cache, block_table, selected, None, fixed=True)


def _sparse(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    selected: Tensor,
    sequences: Tensor | None,
    *,
    fixed: bool = False,
) -> Tensor:
    T, H, _ = query.shape
    R = cache.shape[2]
    out = query.new_empty(T, H, w_uv.shape[1])
    if out.numel() == 0:
        return out
    if sequences is None:
        sequences = torch.arange(T, device=query.device)
    if fixed:
        tile = _FIXED_ROWS
    else:
        selected = _trimmed(selected)
        budget = GATHER_ELEMENTS * (1 if counting_is_free(query) else 8)
        tile = max(1, budget // max(1, selected.shape[1] * max(R, H)))
    if selected.shape[1] == 0:
        return out.zero_()
    up_k, up_v = w_uk.float(), w_uv.float().transpose(1, 2)
    for at in range(0, T, tile):
        part = slice(at, min(at + tile, T))
        q, picks, owner = query[part], selected[part], sequences[part]
        if (
            fixed and len(q) < tile
        ):  # repeat the last row: any real row will do, its copies are dropped
            rows = torch.arange(at, at + tile, device=q.device).clamp_max_(T - 1)
            q, picks, owner = query[rows], selected[rows], sequences[rows]
        out[part] = _attend_picks(q, up_k, up_v, cache, block_table, picks, owner)[: part.stop - at]
    return out


def _trimmed(selected: Tensor) -> Tensor:
    """Drop the columns at the end that hold no pick, where looking is free."""
    if not counting_is_free(selected):
        return selected
    used = (selected >= 0).any(0).nonzero()
    return selected[:, : int(used[-1]) + 1 if len(used) else 0]


def _attend_picks(
    query: Tensor,
    up_k: Tensor,
    up_v: Tensor,
    cache: Tensor,
    block_table: Tensor,
    picks: Tensor,
    owner: Tensor,
) -> Tensor:
    """Attend query[t,H,Dn] to picks[t,S], float32 [t,H,Dv]; rows without a pick are zero."""
    block_size, R = cache.shape[1:]
    best = picks.amax(1, keepdim=True)
    absent, empty = picks < 0, best < 0
    position = (
        torch.where(absent, best, picks).clamp_min_(0).long()
    )  # a pad looks where a pick already does
    block = position // block_size
    entry = block_table.reshape(-1)[(owner * block_table.shape[1]).unsqueeze(1) + block].long()
    slots = (entry * block_size + position - block * block_size).masked_fill_(empty, 0)
    c = cache.view(-1, R).index_select(0, slots.flatten()).view(*picks.shape, R).float()
    q = query.float().mul(query.shape[2] ** -0.5).transpose(0, 1)
    scores = torch.bmm(torch.bmm(q, up_k).transpose(0, 1), c.transpose(1, 2))
    weights = scores.masked_fill_(absent.unsqueeze(1), float("-inf")).softmax(-1)
    z = torch.bmm(weights, c)
    out = torch.bmm(z.transpose(0, 1), up_v).transpose(0, 1)
    return out.masked_fill(empty.unsqueeze(2), 0.0)


def dense_mla(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Attend every query to all tokens up to its own, absorbed, online over tiles of keys.

    One token per sequence runs as one batch. Peak memory over inputs and output: float32 copies of
    w_uk and w_uv, and about four times GATHER_ELEMENTS floats, whatever the lengths are.
    """
    return _dense(query, w_uk, w_uv, cache, block_table, computed_tokens, cu_seqlens, fixed=False)


def dense_mla_invariant(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Compute `dense_mla` in tiles of one shape: a row keeps its bits anywhere."""
    return _dense(query, w_uk, w_uv, cache, block_table, computed_tokens, cu_seqlens, fixed=True)


def _dense(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    fixed: bool,
) -> Tensor:
    T, H, _ = query.shape
    block_size, width = cache.shape[1:]
    out = query.new_empty(T + 1, H, w_uv.shape[1])  # one spare row takes what padded lanes write
    begins, cached = read_lengths(cu_seqlens, computed_tokens)
    spans = [
        Lane(i, begins[i], known, begins[i + 1] - begins[i])
        for i, known in enumerate(cached)
        if begins[i + 1] > begins[i]
    ]
    up_k, up_v = w_uk.float(), w_uv.float().transpose(1, 2)
    parts = [(_FIXED_ROWS, spans)] if fixed and spans else lane_widths(spans, _LANE)
    for lane_width, part in parts:
        lanes = cut_lanes(part, lane_width)
        if fixed:
            tile, per_group = max(block_size, _FIXED_KEYS // block_size * block_size), 1
        else:
            budget = GATHER_ELEMENTS * (1 if counting_is_free(query) else 8)
            per_key = max(lane_width * H, width)
            tile = max(
                block_size, min(max(_KEYS, budget // per_key // 8), 4096) // block_size * block_size
            )
            per_group = max(1, budget // max(per_key * tile, lane_width * H * width))
        for group in group_lanes(lanes, lane_width, per_group, T, query.device):
            rows = group.rows.flatten()
            z = _attend_all(
                query[rows.clamp_max(T - 1)], up_k, cache, block_table, group, tile, fixed
            )
            o = torch.bmm(z.transpose(0, 1), up_v).transpose(0, 1)
            out.index_copy_(0, rows, o.to(out.dtype))
    return out[:T]


def _attend_all(
    query: Tensor,
    up_k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    group: LaneGroup,
    tile: int,
    fixed: bool,
) -> Tensor:
    """Return z [B*W,H,R] float32: the latents averaged by causal attention, online over tiles of
    keys.
    """
    (B, W), (_, H, _), (_, Dn, R) = group.rows.shape, query.shape, up_k.shape
    block_size, width = cache.shape[1:]
    q = query.float() * query.shape[2] ** -0.5
    latent = torch.bmm(q[..., :Dn].transpose(0, 1), up_k).transpose(0, 1)
    q = torch.cat([latent, q[..., Dn:]], -1).reshape(B, W * H, width)
    tables = block_table.index_select(0, group.sequences)
    needed = (group.ends + block_size - 1) // block_size
    z = q.new_zeros(B, W * H, R)
    total = q.new_zeros(B, W * H, 1)
    peak = q.new_full((B, W * H, 1), float("-inf"))
    for start in range(0, group.reach[0], tile):
        lanes = group.active(start)
        blocks = tile // block_size
        if not fixed:
            blocks = min(blocks, -(-(group.reach[0] - start) // block_size))
        c = gather_blocks(cache, tables[:lanes], start // block_size, blocks, needed[:lanes])
        at = torch.arange(start, start + c.shape[1], device=q.device)
        # memory past a lane's last token may hold NaN, and 0 * NaN is NaN
        c = c.masked_fill((at >= group.ends[:lanes]).unsqueeze(2), 0.0)
        scores = torch.bmm(q[:lanes], c.transpose(1, 2))
        hidden = at > group.positions[:lanes].unsqueeze(2)
        scores.view(lanes, W, H, -1).masked_fill_(hidden.unsqueeze(2), float("-inf"))
        higher = torch.maximum(peak[:lanes], scores.amax(-1, keepdim=True))
        keep = torch.exp(peak[:lanes] - higher)
        weights = scores.sub_(higher).exp_()
        total[:lanes] = total[:lanes] * keep + weights.sum(-1, keepdim=True)
        z[:lanes] = z[:lanes] * keep + torch.bmm(weights, c[..., :R])
        peak[:lanes] = higher
    return z.div_(total).view(B * W, H, R)


KERNELS = (
    Kernel(op="latent_write", name="torch", run=latent_write, invariant=True),
    Kernel(op="sparse_mla_prefill", name="torch", run=sparse_mla_prefill),
    Kernel(
        op="sparse_mla_prefill",
        name="torch-invariant",
        run=sparse_mla_prefill_invariant,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="sparse_mla_decode", name="torch", run=sparse_mla_decode),
    Kernel(
        op="sparse_mla_decode",
        name="torch-invariant",
        run=sparse_mla_decode_invariant,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="dense_mla", name="torch", run=dense_mla),
    Kernel(
        op="dense_mla", name="torch-invariant", run=dense_mla_invariant, invariant=True, rank=-1
    ),
)
