"""Portable index kernels: pool keys frozen on completion, and the streaming choice of pools.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the
model. Invariant: scores, pool softmax and comparison are float32 whatever the activations are, and
a pool is chosen by (score, lowest index) exactly: both live in one integer, so no sort's tie rule
matters.
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

SCORE_ELEMENTS = 1 << 18
"""Elements of one temporary of index_select on a CPU (1 MiB of float32: several must share the
second level cache); 16 times more on an accelerator."""

_LANE = 32  # most queries of one sequence that share gathered pool keys
_POOLS = 256  # fewest pools of a tile
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
    total = cu_seqlens[1:] - begin + cached
    live = slots >= 0
    to_row = begin - cached  # a new token's row, less its position
    first = cached // P
    full = total // P
    ends = ((full - first) * live).cumsum(0)
    # exact where the host may look, else the most that T tokens over N open pools can complete
    count = int(ends[-1]) if counting_is_free(ends) else (T + N * (P - 1)) // P
    if count:
        rows, pool, seq = _members(first, cached, to_row, ends, count, T, P)
        keys, gates = index_key, gate
        if P > 1:  # the rows of the call, then every sequence's tail slot, copied before it changes
            held = slots.clamp_min(0)
            keys = torch.cat([index_key, tail_key.index_select(0, held).flatten(0, 1)])
            gates = torch.cat([gate, tail_gate.index_select(0, held).flatten(0, 1)])
        rows = rows.clamp_(0, len(keys) - 1)
        value = _pooled(keys.index_select(0, rows), gates.index_select(0, rows), ape)
        PB, some = pool_cache.shape[1], None
        if not counting_is_free(ends):
            kept, some = survivors(torch.arange(count, device=ape.device) < ends[-1])
            value, seq, pool = value.index_select(0, kept), seq[kept], pool[kept]
            # nothing completed: any column that exists will do, `some` turns the write into a no-op
            pool = pool.clamp(0, block_table.shape[1] * PB - 1)
        slot = block_table[seq, pool // PB].long() * PB + pool % PB
        memory = pool_cache.view(-1, pool_cache.shape[2])
        put_rows(memory, slot, value.to(pool_cache.dtype), some)
    if P > 1:
        place = torch.arange(P - 1, device=ape.device)
        position = (full * P).unsqueeze(1) + place
        fresh = (position < total.unsqueeze(1)) & (position >= cached.unsqueeze(1))
        kept, some = survivors((fresh & live.unsqueeze(1)).flatten())
        if len(kept) == 0:
            return
        rows = (position + to_row.unsqueeze(1)).flatten()[kept].clamp_(0, T - 1)
        target = ((slots * (P - 1)).unsqueeze(1) + place).flatten()[kept]
        put_rows(
            tail_key.view(-1, tail_key.shape[2]), target, index_key.index_select(0, rows), some
        )
        put_rows(tail_gate.view(-1, tail_gate.shape[2]), target, gate.index_select(0, rows), some)


def _members(
    first: Tensor, cached: Tensor, to_row: Tensor, ends: Tensor, count: int, T: int, P: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the member rows [count*P], the number and the sequence [count] of completed pools.

    `ends` [N] counts the pools that sequences complete, cumulated. A row below T is a row of the
    call; T + sequence * (P-1) + j is entry j of a sequence's tail.
    """
    nth = torch.arange(count, device=ends.device)
    seq = torch.searchsorted(ends, nth, right=True).clamp_max_(len(ends) - 1)
    before = torch.nn.functional.pad(ends[:-1], (1, 0))
    pool = (first - before)[seq] + nth
    member = torch.arange(P, device=ends.device)
    position = (pool * P).unsqueeze(1) + member
    new = position + to_row[seq].unsqueeze(1)
    old = (seq * (P - 1) + T).unsqueeze(1) + member
    return torch.where(position >= cached[seq].unsqueeze(1), new, old).flatten(), pool, seq


def _pooled(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Return softmax over the members of (gates + ape), times keys: [pools*P, Di] -> [pools, Di],
    float32.
    """
    shape = (-1, *ape.shape)
    scores = gates.float().view(shape) + ape.float()
    # not torch.softmax: over an inner axis its bits depend on how threads share the pools
    weights = scores.sub_(scores.amax(1, keepdim=True)).exp_()
    return (weights * keys.float().view(shape)).sum(1).div_(weights.sum(1))


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
    T, width, PB = len(query), top_pools * P + P - 1, pool_cache.shape[1]
    begins, cached = read_lengths(cu_seqlens, computed_tokens)
    # one spare row takes what padded lanes write
    chosen = torch.empty(T + 1, width, device=query.device, dtype=torch.int32)
    spans = _sparse_spans(begins, cached, P * (top_pools + 1))
    if sum(span.live for span in spans) < T:  # every query as if it saw all its tokens
        slots = torch.arange(width, device=query.device, dtype=torch.int32)
        position = _positions(computed_tokens, cu_seqlens, T).int().unsqueeze(1)
        torch.where(slots <= position, slots, slots.new_full((), -1), out=chosen[:T])
    parts = [(_FIXED_LANE, spans)] if fixed and spans else lane_widths(spans, _LANE)
    for lane_width, part in parts:
        lanes = cut_lanes(part, lane_width)
        if fixed:
            tile, per_group = fixed_blocks(PB, _FIXED_POOLS) * PB, 1
        else:
            budget = SCORE_ELEMENTS if counting_is_free(query) else 16 * SCORE_ELEMENTS
            per_pool = max(lane_width * query.shape[1], query.shape[2])
            pools = min(_POOLS, lanes[0].reach // P)
            tile, per_group = tiling(budget, len(lanes), per_pool, pools, lane_width * width)
            tile = max(PB, tile // PB * PB)
        for group in group_lanes(lanes, lane_width, per_group, T, query.device):
            best = _best_pools(
                query, head_weights, pool_cache, block_table, group, top_pools, P, tile, fixed
            )
            rows = _expand(best, group.positions, P).flatten(0, 1)
            chosen.index_copy_(0, group.rows.flatten(), rows)
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
    Hi, Di = query.shape[1:]
    lines = round_up(Di, ALIGN) if fixed else Di
    # the factor Di ** -0.5 is left out: it moves every score alike
    q = fit(group.take(query).float(), lines).view(B, W * Hi, lines)
    weight = group.take(head_weights).view(B * W, 1, Hi)
    tables = group.tables(block_table)
    most = [lane.reach // P for lane in group.lanes]
    least = min((lane.position + 1) // P for lane in group.lanes)  # candidates of a first query
    needed = [round_up(pools, PB) // PB for pools in most]
    best = torch.empty(0, device=q.device, dtype=torch.int64)
    for start in range(0, most[0], tile):
        stop = start + tile if fixed else min(start + tile, most[0])
        lanes = group.active(start * P + P - 1)
        blocks = round_up(stop - start, PB) // PB
        keys = gather_blocks(pool_cache, tables[:lanes], start // PB, blocks, needed[:lanes])
        keys = fit(keys[:, : stop - start], lines)
        dots = torch.bmm(q[:lanes], keys.transpose(1, 2)).relu_().view(lanes * W, Hi, -1)
        if fixed:  # a product with one row may take a path whose bits depend on the place
            scores = dots.mul_(weight[: lanes * W].transpose(1, 2)).sum(1)
        else:
            scores = torch.bmm(weight[: lanes * W], dots)
        ranked = _rank(scores.view(lanes, W, -1), start)
        if least < stop:
            pools = torch.arange(start, stop, device=q.device)
            limit = (group.positions[:lanes] + 1) // P  # complete pools of each query
            ranked.masked_fill_(pools >= limit.unsqueeze(2), _LOWEST)
        if start:
            ranked = torch.cat([best[:lanes], ranked], -1)
        if ranked.shape[-1] > top_pools:
            ranked = ranked.topk(top_pools, sorted=False).values
        best = ranked if lanes == len(best) or not start else torch.cat([ranked, best[lanes:]])
    return (_LAST_POOL - (best & 0xFFFFFFFF)).sort().values


def _rank(scores: Tensor, first_pool: int) -> Tensor:
    """Pack (score, lowest pool first) into int64 keys whose order is the order of the choice."""
    bits = scores.view(torch.int32)
    # sign and magnitude -> two's complement; both zeros become 0, as a tie between them is a tie
    ordered = torch.where(bits < 0, torch.iinfo(torch.int32).min - bits, bits)
    last = _LAST_POOL - first_pool
    pools = torch.arange(last, last - scores.shape[-1], -1, device=scores.device)
    return (ordered.long() << 32).add_(pools)


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
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
)
