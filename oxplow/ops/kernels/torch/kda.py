"""Portable KDA kernels: short convolution, decay gate, a step of the delta rule, stepwise prefill.

Owns plain torch implementations for any device; the chunked prefill stands in `kda_chunk`. Knows
the contracts' names and shapes, not the model. Invariant: float32 inside, one cast to the
activation dtype at the end, states updated in place and V-first. Every kernel here gives a row the
same bits alone, in any batch and under any split: a row is made of elementwise operations that do
not depend on the place in a tensor (torch's sigmoid, silu and softplus do: their vector and scalar
loops differ) and of sums over its own last axis (`_row_sum`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oxplow.ops.kernels.torch.invariant import sigmoid, softplus
from oxplow.ops.kernels.torch.kda_chunk import L2_EPS, kda_prefill_chunked
from oxplow.ops.table import Kernel

_CONV_TILE = 1 << 15
"""Elements of a convolution tile: 128 KiB of float32, so that a tile's passes stay in cache."""

_STATE_TILE = {"cpu": 1 << 17, "other": 1 << 26}
"""State elements of a tile: bounds the temporaries, and keeps the CPU's passes in cache."""


_FEW_STEPS = 16
"""Length up to which steps beat chunks: a chunk costs some 150 calls however short it is."""


@dataclass(frozen=True, slots=True)
class _Scatter:
    """Writes the live rows of a call to a pool without reading anything on the host.

    Torch has no scatter that drops indices, so a dead row writes what the first live row writes, to
    the same place; when no row lives, one entry is rewritten with its own bits.
    """

    source: Tensor  # [N], the row that each row stands for
    at: Tensor  # [N], where that row goes
    any_live: Tensor

    @classmethod
    def of(cls, at: Tensor, live: Tensor) -> _Scatter:
        first = live.to(torch.uint8).argmax()
        source = torch.where(live, torch.arange(live.shape[0], device=live.device), first)
        return cls(source, at.long().index_select(0, source).clamp_min(0), live.any())

    def write(self, pool: Tensor, values: Tensor) -> None:
        """Write `values` [N, ...], one entry for each row."""
        values = values.index_select(0, self.source)
        kept = torch.where(self.any_live, values, pool.index_select(0, self.at))
        pool.index_copy_(0, self.at, kept)


def _known_live(state_slots: Tensor) -> bool:
    """Tell whether no row is padding, as far as that can be seen without a device sync."""
    return state_slots.device.type == "cpu" and min(state_slots.tolist(), default=0) >= 0


# --- short convolution


def _silu_to(y: Tensor, total: Tensor) -> None:
    torch.mul(total, sigmoid(total), out=y)


def _slide(x: Tensor, weight: Tensor, y: Tensor) -> None:
    """Write silu(sum_j weight[j] x[t + j]) to the rows t of `y`, in tiles.

    Products are rounded before they are added in order, so that no fused loop can differ.
    """
    channels, rows = x.shape[1], y.shape[0]
    tile = max(1, _CONV_TILE // channels)
    sums = torch.empty(2, min(tile, rows), channels, dtype=torch.float32, device=x.device)
    for a in range(0, rows, tile):
        b = min(a + tile, rows)
        total, product = sums[:, : b - a]
        torch.mul(x[a:b], weight[0], out=total)
        for j in range(1, weight.shape[0]):
            total.add_(torch.mul(x[a + j : b + j], weight[j], out=product))
        _silu_to(y[a:b], total)


def short_conv(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Convolve ragged sequences and keep their last W - 1 raw inputs in `window`; returns y [T, C].

    The taps slide over all tokens as if they were one sequence; then the first W - 1 rows of every
    sequence are done again behind its window. Memory: y, two tiles, and O(N W) rows of borders.
    """
    (tokens, channels), history, rows = x.shape, weight.shape[1] - 1, state_slots.shape[0]
    y = x.new_empty(tokens, channels)
    if tokens == 0:
        return y
    device, taps = x.device, weight.t().float().contiguous()
    if tokens > history:
        _slide(x, taps, y[history:])

    cu = cu_seqlens.long()
    start, lengths = cu[:-1, None], cu.diff()[:, None]  # [N, 1]
    offset = torch.arange(history, device=device)
    old = window.index_select(0, state_slots.clamp_min(0)).transpose(1, 2)  # [N, W-1, C]
    old = torch.where(has_state[:, None, None], old, 0)
    first = (start + offset).clamp_max(tokens - 1)  # [N, W-1]; past a short sequence: not used
    heads = torch.cat((old, x[first]), 1)  # [N, 2 (W-1), C]
    again = x.new_empty(rows, 2 * history, channels)
    _slide(heads.view(-1, channels), taps, again.view(-1, channels)[:-history])
    borders = again[:, :history].reshape(-1, channels)
    _Scatter.of(first.view(-1), (offset < lengths).view(-1)).write(y, borders)

    tail = heads.gather(1, (lengths.clamp_max(history) + offset)[..., None].expand_as(old))
    late = x[(start + lengths - history + offset).clamp_min(0)]
    new = torch.where((lengths >= history)[..., None], late, tail).transpose(1, 2)
    live = state_slots >= 0
    _Scatter.of(state_slots, live & (lengths[:, 0] > 0)).write(window, new)
    if not _known_live(state_slots):
        live = live.repeat_interleave(lengths[:, 0], output_size=tokens)
        y.masked_fill_(~live[:, None], 0)
    return y


def short_conv_decode(x: Tensor, weight: Tensor, window: Tensor, state_slots: Tensor) -> Tensor:
    """Take one step for every row and shift its window in place; returns y [N, C]."""
    y = torch.empty_like(x)
    if x.shape[0] == 0:
        return y
    all_live = _known_live(state_slots)
    slots = state_slots if all_live else state_slots.clamp_min(0)
    old = window.index_select(0, slots)  # [N, C, W-1]
    taps = weight.float()
    past = old * taps[:, :-1]  # products are rounded, then added in the order of _slide
    total = past[:, :, 0]
    for j in range(1, past.shape[2]):
        total = total + past[:, :, j]
    _silu_to(y, total + x * taps[:, -1])
    # over channels and taps in one run, the window moves by one place; then the last tap is filled
    new = torch.empty_like(old)
    new.view(len(x), -1)[:, :-1] = old.view(len(x), -1)[:, 1:]
    new[:, :, -1] = x
    if all_live:
        window.index_copy_(0, slots.long(), new)
        return y
    live = state_slots >= 0
    _Scatter.of(state_slots, live).write(window, new)
    return y.masked_fill_(~live[:, None], 0)


# --- decay gate


def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    """Return the log decay [T, H, K] float32.

    That is lower_bound * sigmoid(rate * raw) with rate = exp(a_log) and raw = f + dt_bias, or
    -rate * softplus(raw) without a bound.
    """
    raw, rate = f.float() + dt_bias, a_log.exp()[:, None]  # [T, H, K], [H, 1]
    if lower_bound is None:
        return softplus(raw).mul_(-rate)
    return sigmoid(raw.mul_(rate)).mul_(lower_bound)


# --- one step of the delta rule


def _row_sum(x: Tensor) -> Tensor:
    """Sum the last axis so that a row's bits depend on the row alone; may overwrite `x`.

    On the CPU torch reduces every row of a contiguous tensor by itself, in an order that its
    length gives. Elsewhere the launch shape depends on the number of rows: there rows are folded
    in halves.
    """
    return x.sum(-1) if x.device.type == "cpu" else _folded(x)


def _folded(x: Tensor) -> Tensor:
    """Sum the last axis by adding halves, in place: elementwise additions only."""
    n = x.shape[-1]
    while n > 1:
        half = n // 2
        x[..., :half].add_(x[..., n - half : n])
        n -= half
    return x[..., 0]


def _unit(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q / |q| and k / |k| in float32, [T, H, K]; the output takes the factor K**-0.5."""
    both = torch.stack((q, k)).float()
    query, key = both.mul_(_row_sum(both * both).add_(L2_EPS).rsqrt_()[..., None])
    return query, key


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance `state` [..., V, K] by one token in place; returns o [..., V] float32, not scaled."""
    key = k.unsqueeze(-2)
    state.mul_(decay.unsqueeze(-2))
    correction = (v - _row_sum(state * key)).mul_(beta.unsqueeze(-1))
    state.addcmul_(correction.unsqueeze(-1), key)
    return _row_sum(state * q.unsqueeze(-2))


def _advance(state: Tensor, *token: Tensor) -> Tensor:
    """Take a `_step` for `state` [n, H, V, K] (contiguous) in tiles; returns o [n, H, V]."""
    tile = max(1, _tile_elements(state) // (state.shape[2] * state.shape[3]))
    if state.shape[0] * state.shape[1] <= tile:
        return _step(state, *token)
    lanes, flat = state.flatten(0, 1), [x.flatten(0, 1) for x in token]
    parts = [
        _step(lanes[a : a + tile], *(x[a : a + tile] for x in flat))
        for a in range(0, lanes.shape[0], tile)
    ]
    return torch.cat(parts).view(*state.shape[:2], -1)


def _tile_elements(state: Tensor) -> int:
    return _STATE_TILE["cpu" if state.device.type == "cpu" else "other"]


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> Tensor:
    """Advance every row by one token, in place in its slot; returns o [N, H, V].

    Works through tiles of rows. On the CPU, where looking at the slots is no sync, a tile whose
    slots count up one by one is updated where it lies; another one is gathered and scattered.
    """
    query, key = _unit(q, k)
    inputs = (query, key, v.float(), g.exp(), beta)
    known = state_slots.tolist() if state_slots.device.type == "cpu" else None
    step, rows = max(1, _tile_elements(state) // max(1, state[0].numel())), q.shape[0]
    parts = []
    for a in range(0, rows, step):
        tile = inputs if rows <= step else tuple(x[a : a + step] for x in inputs)
        if known is None:
            parts.append(_advance_blind(state, state_slots[a : a + step], *tile))
        else:
            parts.append(_advance_known(state, known[a : a + step], *tile))
    if not parts:
        return torch.empty_like(v)
    o = parts[0] if len(parts) == 1 else torch.cat(parts)
    return o.mul_(q.shape[-1] ** -0.5).to(v.dtype)


def _advance_known(state: Tensor, slots: list[int], *tile: Tensor) -> Tensor:
    """Advance rows whose slots are known on the host; o is zero for padding."""
    begin, n = slots[0], len(slots)
    here = state[begin : begin + n]
    if begin >= 0 and slots == list(range(begin, begin + n)) and here.is_contiguous():
        return _advance(here, *tile)
    at = torch.tensor([slot for slot in slots if slot >= 0], dtype=torch.int64)
    moved = state.index_select(0, at)
    if len(at) == n:
        o = _advance(moved, *tile)
    else:
        rows = torch.tensor([i for i, slot in enumerate(slots) if slot >= 0], dtype=torch.int64)
        live = _advance(moved, *(x.index_select(0, rows) for x in tile))
        o = torch.zeros_like(tile[2]).index_copy_(0, rows, live)
    state.index_copy_(0, at, moved)
    return o


def _advance_blind(state: Tensor, slots: Tensor, *tile: Tensor) -> Tensor:
    """Advance rows whose slots the host does not look at; o is zero for padding."""
    live = slots >= 0
    moved = state.index_select(0, slots.clamp_min(0))
    o = _advance(moved, *tile)
    _Scatter.of(slots, live).write(state, moved)
    return o.masked_fill_(~live[:, None, None], 0)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None,
) -> Tensor:
    """Take the chunked form, or steps where every sequence is shorter than the chunks pay for."""
    args = (q, k, v, g, beta, state, state_slots, has_state, cu_seqlens)
    if q.shape[0] == 0 or int(cu_seqlens.diff().max()) <= _FEW_STEPS:
        return kda_prefill_stepwise(*args, lower_bound=lower_bound)
    return kda_prefill_chunked(*args, lower_bound=lower_bound)


def kda_prefill_stepwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None,
) -> Tensor:
    """Advance all sequences together, position by position: the bits of `kda_decode`; returns o.

    The time loop is the price of `--deterministic`: the chunked form rounds by chunk, so its bits
    depend on where a call begins. Memory: the states of the call's sequences, and a float32 copy of
    its tokens laid position by position, so that every step works on slices.
    """
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    # The host has to know the length of the loop: the one place where a device is waited for.
    cu, slots = cu_seqlens.cpu(), state_slots.cpu()
    lengths = torch.where(slots >= 0, cu.diff(), 0)
    lengths, order = lengths.sort(descending=True, stable=True)
    order = order[lengths > 0]
    if not len(order):
        return o
    positions = torch.arange(int(lengths[0]))[:, None]
    real = positions < lengths[: len(order)]  # [longest, sequences]
    token = (cu[:-1][order] + positions)[real].to(q.device)  # position by position
    order = order.to(state.device)

    query, key = _unit(q.index_select(0, token), k.index_select(0, token))
    decay = g.index_select(0, token).exp_()
    laid = (query, key, v.index_select(0, token).float(), decay, beta.index_select(0, token))
    at = state_slots.long().index_select(0, order)
    kept = has_state.index_select(0, order)[:, None, None, None]
    moved = torch.where(kept, state.index_select(0, at), 0)
    parts, begin = [], 0
    for active in real.sum(1).tolist():
        tile = (x[begin : begin + active] for x in laid)
        parts.append(_advance(moved[:active], *tile))
        begin += active
    state.index_copy_(0, at, moved)
    out = torch.cat(parts).mul_(q.shape[-1] ** -0.5)
    return o.index_copy_(0, token, out.to(v.dtype))


KERNELS = (
    Kernel(op="short_conv", name="torch", run=short_conv, invariant=True),
    Kernel(op="short_conv_decode", name="torch", run=short_conv_decode, invariant=True),
    Kernel(op="kda_gate", name="torch", run=kda_gate, invariant=True),
    Kernel(op="kda_prefill", name="torch", run=kda_prefill),
    Kernel(
        op="kda_prefill",
        name="torch-invariant",
        run=kda_prefill_stepwise,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="kda_decode", name="torch", run=kda_decode, invariant=True),
)
