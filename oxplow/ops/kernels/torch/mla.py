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

from oxplow.ops.kernels.torch.invariant import row_invariance
from oxplow.ops.kernels.torch.paged import (
    ALIGN,
    Lane,
    LaneGroup,
    counting_is_free,
    cut_lanes,
    fit,
    fixed_blocks,
    gather_blocks,
    group_lanes,
    lane_widths,
    put_rows,
    read_lengths,
    round_up,
    rows_to_sequences,
    survivors,
    tiling,
)
from oxplow.ops.table import Kernel

GATHER_ELEMENTS = 1 << 19
"""Elements of one temporary (2 MiB of float32) on a CPU, where larger ones fall out of the second
level cache and, several together, out of the allocator's heap; 32 times more on an accelerator."""

_LANE, _KEYS = 32, 128  # dense: most queries of a lane, fewest keys of a tile
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

    Peak memory over inputs and output: float32 copies of w_uk and w_uv where these are narrower,
    and about six times GATHER_ELEMENTS floats (or one query's S x R latents, if they are more).
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
    (T, H, _), R = query.shape, cache.shape[2]
    out = query.new_empty(T, H, w_uv.shape[1])
    if out.numel() == 0:
        return out
    pads = True
    if fixed:
        tile = chunk = _FIXED_ROWS
        width = round_up(selected.shape[1], ALIGN)
        selected = torch.nn.functional.pad(selected, (0, width - selected.shape[1]), value=-1)
    else:
        selected, pads = _trimmed(selected)
        S = max(1, selected.shape[1])
        tile = max(1, _budget(query) // (S * max(R, H)))
        chunk = max(tile, _budget(query) // max(H * R, 2 * S))  # rows that share one projection
    if selected.shape[1] == 0:
        return out.zero_()
    up_k, up_v = _up(w_uk, w_uv, R, fixed)
    for at in range(0, T, chunk):
        part = slice(at, at + chunk)
        q, picks = query[part], selected[part]
        owner: Tensor | None
        if fixed and len(q) < chunk:  # repeat the last row: its copies are dropped
            rows = torch.arange(at, at + chunk, device=q.device).clamp_max_(T - 1)
            q, picks = query[rows], selected[rows]
            owner = rows if sequences is None else sequences[rows]
        elif sequences is None:
            owner = None if chunk >= T else torch.arange(at, at + len(q), device=q.device)
        else:
            owner = sequences[part]
        slots, empty = _slots(picks, block_table, owner, cache.shape[1], pads)
        latent = fit(_absorbed(q, w_uk.shape[1:], up_k), up_k.shape[2])
        absent = (picks < 0).unsqueeze(1) if pads else None
        z = _attend_slots(latent, cache.view(-1, R), slots, absent, tile)
        o = torch.bmm(z.transpose(0, 1), up_v).transpose(0, 1)
        if empty is not None:
            o = o.masked_fill(empty.unsqueeze(2), 0.0)
        out[part] = o[: T - at, :, : out.shape[2]]
    return out


def _budget(x: Tensor) -> int:
    return GATHER_ELEMENTS if counting_is_free(x) else 32 * GATHER_ELEMENTS


def _up(w_uk: Tensor, w_uv: Tensor, width: int, fixed: bool) -> tuple[Tensor, Tensor]:
    """Return float32 w_uk [H, Dn, R] and w_uv turned to [H, R, Dv]; padded lines where `fixed`.

    The padded w_uv takes in all `width` cache columns, those past R with a factor of zero.
    """
    up_k, up_v = w_uk.float(), w_uv.float().transpose(1, 2)
    if not fixed:
        return up_k, up_v
    Dn, R, Dv = (round_up(size, ALIGN) for size in (*w_uk.shape[1:], w_uv.shape[1]))
    return fit(up_k, Dn, R), fit(up_v, round_up(width, ALIGN), Dv)


def _trimmed(selected: Tensor) -> tuple[Tensor, bool]:
    """Drop columns at the end without any pick and tell if pads are left, where looking is free."""
    if not counting_is_free(selected):
        return selected, True
    present = selected >= 0
    if present.all():
        return selected, False
    used = present.any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 0
    return selected[:, :width], not present[:, :width].all()


def _slots(
    picks: Tensor, block_table: Tensor, owner: Tensor | None, block_size: int, pads: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the cache row of every pick [t,S] int64 and, with `pads`, which rows have no pick.

    `owner` [t] is each row's block table, None if they go together one by one. A pad looks where a
    pick of its row already does, so that no memory is read that holds no token.
    """
    empty = None
    if pads:
        best = picks.amax(1, keepdim=True)
        empty = best < 0
        picks = torch.where(picks < 0, best, picks).clamp_min_(0)
    position = picks.long()
    block = position // block_size
    if owner is None:
        entry = block_table.gather(1, block)
    else:
        entry = block_table.reshape(-1)[(owner * block_table.shape[1]).unsqueeze(1) + block]
    slots = entry.long() * block_size + position % block_size
    return (slots if empty is None else slots.masked_fill_(empty, 0)), empty


def _attend_slots(
    latent: Tensor, cache: Tensor, slots: Tensor, absent: Tensor | None, tile: int
) -> Tensor:
    """Return z [T,H,R] float32: cache[slots[T,S]] averaged by softmax, without what is `absent`."""
    parts = []
    for at in range(0, len(slots), tile):
        q, where = latent[at : at + tile], slots[at : at + tile]
        c = cache.index_select(0, where.flatten()).view(*where.shape, cache.shape[1]).float()
        c = fit(c, q.shape[2])
        scores = torch.bmm(q, c.transpose(1, 2))
        if absent is not None:
            scores.masked_fill_(absent[at : at + tile], float("-inf"))
        parts.append(torch.bmm(scores.softmax(-1), c))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    w_uk and w_uv, and about six times GATHER_ELEMENTS floats, whatever the lengths are.
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
    (T, H, _), (block_size, width) = query.shape, cache.shape[1:]
    out = query.new_empty(T + 1, H, w_uv.shape[1])  # one spare row takes what padded lanes write
    begins, cached = read_lengths(cu_seqlens, computed_tokens)
    spans = [
        Lane(i, begins[i], known, begins[i + 1] - begins[i])
        for i, known in enumerate(cached)
        if begins[i + 1] > begins[i]
    ]
    up_k, up_v = _up(w_uk, w_uv, width, fixed)
    parts = [(_FIXED_ROWS, spans)] if fixed and spans else lane_widths(spans, _LANE)
    for lane_width, part in parts:
        lanes = cut_lanes(part, lane_width)
        if fixed:
            tile, per_group = fixed_blocks(block_size, _FIXED_KEYS) * block_size, 1
        else:
            per_key, keys = max(lane_width * H, width), min(_KEYS, lanes[0].reach)
            per_lane = lane_width * H * width
            tile, per_group = tiling(_budget(query), len(lanes), per_key, keys, per_lane)
            tile = max(block_size, tile // block_size * block_size)
        for group in group_lanes(lanes, lane_width, per_group, T, query.device):
            q = _absorbed(group.take(query), w_uk.shape[1:], up_k)
            z = _attend_all(q, up_v.shape[1], cache, block_table, group, tile, fixed)
            o = torch.bmm(z.transpose(0, 1), up_v).transpose(0, 1)[:, :, : out.shape[2]]
            out.index_copy_(0, group.rows.flatten(), o.to(out.dtype))
    return out[:T]


def _absorbed(query: Tensor, shape: torch.Size, up_k: Tensor) -> Tensor:
    """Return the scaled query in the latent's space and its shared key dims, [rows, H, R+P]."""
    Dn, R = shape
    q = query.float() * query.shape[2] ** -0.5
    own = fit(q[..., :Dn].contiguous(), up_k.shape[1])
    latent = torch.bmm(own.transpose(0, 1), up_k).transpose(0, 1)[..., :R]
    return torch.cat([latent, q[..., Dn:]], -1) if q.shape[2] > Dn else latent


def _attend_all(
    query: Tensor,
    taken: int,
    cache: Tensor,
    block_table: Tensor,
    group: LaneGroup,
    tile: int,
    fixed: bool,
) -> Tensor:
    """Return z [B*W, H, taken] float32: the first columns of the cache under causal attention."""
    (B, W), H, block_size = group.rows.shape, query.shape[1], cache.shape[1]
    width, reach = max(taken, cache.shape[2]), group.lanes[0].reach
    q = fit(query, width).reshape(B, W * H, width)
    tables = group.tables(block_table)
    needed = [round_up(lane.reach, block_size) // block_size for lane in group.lanes]
    z = total = peak = q.new_empty(0)
    for start in range(0, reach, tile):
        stop = start + tile if fixed else min(start + tile, reach)
        lanes = group.active(start)
        blocks = round_up(stop - start, block_size) // block_size
        c = gather_blocks(cache, tables[:lanes], start // block_size, blocks, needed[:lanes])
        c = fit(c[:, : stop - start], width)
        at = torch.arange(start, stop, device=q.device)
        if group.lanes[lanes - 1].reach < stop:
            # memory past a lane's last token may hold NaN, and 0 * NaN is NaN
            c.masked_fill_((at >= group.ends[:lanes]).unsqueeze(2), 0.0)
        scores = torch.bmm(q[:lanes], c.transpose(1, 2))
        if min(lane.position for lane in group.lanes[:lanes]) < stop - 1:
            hidden = (at > group.positions[:lanes].unsqueeze(2)).unsqueeze(2)
            scores.view(lanes, W, H, -1).masked_fill_(hidden, float("-inf"))
        if start == 0:
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            z = torch.bmm(weights, c[..., :taken])
            continue
        higher = torch.maximum(peak[:lanes], scores.amax(-1, keepdim=True))
        keep = torch.exp(peak[:lanes] - higher)
        weights = scores.sub_(higher).exp_()
        total[:lanes] = total[:lanes] * keep + weights.sum(-1, keepdim=True)
        z[:lanes] = z[:lanes] * keep + torch.bmm(weights, c[..., :taken])
        peak[:lanes] = higher
    return z.div_(total).view(B * W, H, taken)


KERNELS = (
    Kernel(op="latent_write", name="torch", run=latent_write, invariant=True),
    Kernel(op="sparse_mla_prefill", name="torch", run=sparse_mla_prefill),
    Kernel(
        op="sparse_mla_prefill",
        name="torch-invariant",
        run=sparse_mla_prefill_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="sparse_mla_decode", name="torch", run=sparse_mla_decode),
    Kernel(
        op="sparse_mla_decode",
        name="torch-invariant",
        run=sparse_mla_decode_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="dense_mla", name="torch", run=dense_mla),
    Kernel(
        op="dense_mla",
        name="torch-invariant",
        run=dense_mla_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
)
