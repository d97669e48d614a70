"""Portable index kernels: pool keys frozen on completion, and the streaming choice of pools.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the
model. Invariant: scores, pool softmax and comparison are float32 whatever the activations are, and
a pool is chosen by (score, lowest index) exactly: both live in one integer, so no sort's tie rule
matters.
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

SCORE_ELEMENTS = 1 << 20
"""Most elements of one temporary of index_select (4 MiB of float32): per-head scores, keys or
picks.
"""

_LANE = 32  # queries of one sequence that share gathered pool keys
_POOLS = (
    1024  # pools of a tile at least; wide enough that the running top-k costs less than the scores
)
_FIXED_LANE, _FIXED_POOLS = 4, 256  # shapes of the invariant variant: never depend on the call
_LOWEST = torch.iinfo(torch.int64).min
_LAST_POOL = 2**31 - 1


def pool_keys_write(
    index_key: Tensor,
    gate: Tensor,
    ape: Tensor,
    tail_key: Tensor,
    tail_gate: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> None:
    """Write the key of every pool that these tokens complete, and keep the raw rest in the tail
    slots.

    All sequences at once, no loop and no wait for the host. Memory: four copies of the new keys and
    gates.
    """
    T, P, N = len(index_key), len(ape), len(state_slots)
    if T == 0:
        return
    begin = cu_seqlens[:-1].long()
    cached, slots = computed_tokens.long(), state_slots.long()
    total = cached + cu_seqlens[1:].long() - begin
    live = slots >= 0
    to_row = begin - cached  # a new token's row, less its position
    if P > 1:
        tails = torch.arange(P - 1, device=ape.device)
        # raw rows a pool may draw from: the new tokens, then every sequence's tail slot (copied
        # before it changes)
        held = slots.clamp_min(0)
        keys = torch.cat([index_key, tail_key.index_select(0, held).flatten(0, 1)])
        gates = torch.cat([gate, tail_gate.index_select(0, held).flatten(0, 1)])
    else:
        keys, gates = index_key, gate
    first = cached // P
    done = (total // P - first) * live
    ends = done.cumsum(0)
    # exact where the host may look, else the most that T tokens over N open pools can complete
    count = int(ends[-1]) if counting_is_free(ends) else (T + N * (P - 1)) // P
    if count:
        nth = torch.arange(count, device=ape.device)
        seq = torch.searchsorted(ends, nth, right=True).clamp_max(N - 1)
        pool = first[seq] + nth - (ends - done)[seq]
        member = torch.arange(P, device=ape.device)
        position = (pool * P).unsqueeze(1) + member
        new = position + to_row[seq].unsqueeze(1)
        old = (T + seq * (P - 1)).unsqueeze(1) + member
        rows = (
            torch.where(position >= cached[seq].unsqueeze(1), new, old)
            .clamp_(0, len(keys) - 1)
            .flatten()
        )
        value = _pooled(keys.index_select(0, rows), gates.index_select(0, rows), ape).to(
            pool_cache.dtype
        )
        PB, some = pool_cache.shape[1], None
        if not counting_is_free(ends):
            kept, some = survivors(nth < ends[-1])
            value, seq, pool = value.index_select(0, kept), seq[kept], pool[kept]
            # nothing completed at all: any column that exists will do, `some` turns the write into
            # a no-op
            pool = pool.clamp(0, block_table.shape[1] * PB - 1)
        block = block_table[seq, pool // PB].long()
        put_rows(pool_cache.view(-1, pool_cache.shape[2]), block * PB + pool % PB, value, some)
    if P > 1:
        position = (total - total % P).unsqueeze(1) + tails
        fresh = (
            (position < total.unsqueeze(1)) & (position >= cached.unsqueeze(1)) & live.unsqueeze(1)
        )
        kept, some = survivors(fresh.flatten())
        rows = (position + to_row.unsqueeze(1)).flatten()[kept].clamp_(0, T - 1)
        target = ((slots * (P - 1)).unsqueeze(1) + tails).flatten()[kept]
        put_rows(
            tail_key.view(-1, tail_key.shape[2]), target, index_key.index_select(0, rows), some
        )
        put_rows(tail_gate.view(-1, tail_gate.shape[2]), target, gate.index_select(0, rows), some)


def _pooled(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Return softmax over the members of (gates + ape), times keys: [pools*P, Di] -> [pools, Di],
    float32.
    """
    shape = (-1, *ape.shape)
    weights = torch.softmax(gates.float().view(shape) + ape.float(), dim=1)
    return weights.mul_(keys.float().view(shape)).sum(1)


def index_select(
    query: Tensor,
    head_weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    top_pools: int,
    pool_size: int,
) -> Tensor:
    """Choose the best pools of every query and the raw tail, as ascending positions padded with -1.

    Queries with at most `top_pools` complete pools are never scored. The others stream over tiles
    of pools with a running top-k: peak memory is the output [T, top_pools*P+P-1] int32, its mask,
    and about 14 times SCORE_ELEMENTS floats, whatever the lengths are.
    """
    return _select(
        query,
        head_weights,
        pool_cache,
        block_table,
        computed_tokens,
        cu_seqlens,
        top_pools,
        pool_size,
        fixed=False,
    )


def index_select_invariant(
    query: Tensor,
    head_weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    top_pools: int,
    pool_size: int,
) -> Tensor:
    """Choose as `index_select` does, with products of one fixed shape, so that a row's scores keep
    their bits.
    """
    return _select(
        query,
        head_weights,
        pool_cache,
        block_table,
        computed_tokens,
        cu_seqlens,
        top_pools,
        pool_size,
        fixed=True,
    )


def _select(
    query: Tensor,
    head_weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
    top_pools: int,
    P: int,
    *,
    fixed: bool,
) -> Tensor:
    T = len(query)
    begins, cached = read_lengths(cu_seqlens, computed_tokens)
    width = top_pools * P + P - 1
    slots = torch.arange(width, device=query.device, dtype=torch.int32)
    # every query as if it saw all its tokens; one spare row takes what padded lanes write
    chosen = torch.empty(T + 1, width, device=query.device, dtype=torch.int32)
    spans = _sparse_spans(begins, cached, P * (top_pools + 1))
    if sum(span.live for span in spans) < T:
        position = _positions(computed_tokens, cu_seqlens, T).int().unsqueeze(1)
        torch.where(slots <= position, slots, slots.new_full((), -1), out=chosen[:T])
    parts = [(_FIXED_LANE, spans)] if fixed and spans else lane_widths(spans, _LANE)
    for lane_width, part in parts:
        lanes = cut_lanes(part, lane_width)
        tile, per_group = _tiling(query, pool_cache.shape[1], lane_width, width, fixed)
        for group in group_lanes(lanes, lane_width, per_group, T, query.device):
            best = _best_pools(
                query, head_weights, pool_cache, block_table, group, top_pools, P, tile, fixed
            )
            chosen.index_copy_(
                0, group.rows.flatten(), _expand(best, group.positions, P).flatten(0, 1)
            )
    return chosen[:T]


def _sparse_spans(begins: list[int], cached: list[int], first_sparse: int) -> list[Lane]:
    """Return the runs of queries that see `first_sparse` tokens or more, one per sequence."""
    spans = []
    for i, known in enumerate(cached):
        skip = max(0, first_sparse - 1 - known)
        count = begins[i + 1] - begins[i] - skip
        if count > 0:
            spans.append(Lane(i, begins[i] + skip, known + skip, count))
    return spans


def _tiling(query: Tensor, PB: int, lane_width: int, width: int, fixed: bool) -> tuple[int, int]:
    """Return (pools per tile, lanes per group); a tile is whole blocks."""
    if fixed:
        return max(PB, _FIXED_POOLS // PB * PB), 1
    Hi, Di = query.shape[1:]
    per_pool = max(lane_width * Hi, Di)
    tile = max(_POOLS, SCORE_ELEMENTS // per_pool // 8)
    tile = max(PB, min(tile, 8 * _POOLS) // PB * PB)
    return tile, max(1, SCORE_ELEMENTS // max(per_pool * tile, lane_width * width))


def _positions(computed_tokens: Tensor, cu_seqlens: Tensor, T: int) -> Tensor:
    """Return every row's position in its sequence, [T] int64."""
    shift = computed_tokens.long() - cu_seqlens[:-1].long()
    rows = torch.arange(T, device=shift.device)
    return rows + shift[rows_to_sequences(cu_seqlens, T)]


def _best_pools(
    query: Tensor,
    head_weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    group: LaneGroup,
    top_pools: int,
    P: int,
    tile: int,
    fixed: bool,
) -> Tensor:
    """Return the chosen pools of every query in the group, ascending, [B, W, top_pools] int64."""
    (B, W), PB = group.rows.shape, pool_cache.shape[1]
    rows = group.rows.clamp_max(len(query) - 1).flatten()
    Hi, Di = query.shape[1:]
    q = query.index_select(0, rows).float().view(B, W * Hi, Di)
    weight = (head_weights.index_select(0, rows) * Di**-0.5).view(B * W, 1, Hi)
    tables = block_table.index_select(0, group.sequences)
    limit = (group.positions + 1) // P  # complete pools: candidates of each query
    most = [reach // P for reach in group.reach]
    needed = (group.ends // P + PB - 1) // PB  # blocks that hold candidates of a real query
    best = torch.full((B, W, top_pools), _LOWEST, device=q.device, dtype=torch.int64)
    for start in range(0, most[0], tile):
        lanes = group.active(start * P + P - 1)
        blocks = tile // PB if fixed else min(tile // PB, -(-(most[0] - start) // PB))
        keys = gather_blocks(pool_cache, tables[:lanes], start // PB, blocks, needed[:lanes])
        dots = torch.bmm(q[:lanes], keys.transpose(1, 2)).relu_().view(lanes * W, Hi, -1)
        scores = torch.bmm(weight[: lanes * W], dots).view(lanes, W, -1)
        pools = torch.arange(start, start + blocks * PB, device=q.device)
        ranked = _rank(scores, pools).masked_fill_(pools >= limit[:lanes].unsqueeze(2), _LOWEST)
        ranked = torch.cat([best[:lanes], ranked], -1).topk(top_pools, sorted=False).values
        best[:lanes] = ranked
    return (_LAST_POOL - (best & 0xFFFFFFFF)).sort().values


def _rank(scores: Tensor, pools: Tensor) -> Tensor:
    """Pack (score, lowest pool first) into int64 keys whose order is the order of the choice."""
    bits = scores.view(torch.int32)
    # sign and magnitude -> two's complement; both zeros become 0, as a tie between them is a tie
    ordered = torch.where(bits < 0, torch.iinfo(torch.int32).min - bits, bits)
    return (ordered.long() << 32) + (_LAST_POOL - pools)


def _expand(pools: Tensor, positions: Tensor, P: int) -> Tensor:
    """Return positions of the pools' tokens and then of the raw tail, [B, W, K*P+P-1] int32."""
    member = torch.arange(P, device=pools.device)
    tokens = (pools.unsqueeze(-1) * P + member).flatten(2)
    last = positions.unsqueeze(-1)
    tail = (last + 1) // P * P + member[: P - 1]
    return torch.cat([tokens, torch.where(tail <= last, tail, -1)], -1).int()


KERNELS = (
    Kernel(op="pool_keys_write", name="torch", run=pool_keys_write, invariant=True),
    Kernel(op="index_select", name="torch", run=index_select),
    Kernel(
        op="index_select",
        name="torch-invariant",
        run=index_select_invariant,
        invariant=True,
        rank=-1,
    ),
)
