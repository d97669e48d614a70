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

from oxplow.ops.kernels.torch.kda_chunk import L2_EPS, kda_prefill_chunked
from oxplow.ops.table import Kernel

_CONV_TILE = 1 << 15
"""Elements of a convolution tile: 128 KiB of float32, so that a tile's passes stay in cache."""

_STATE_TILE = {"cpu": 1 << 18, "other": 1 << 26}
"""State elements of a decode tile (one row at least): bounds the temporaries."""


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


def _silu_to(y: Tensor, total: Tensor, work: Tensor) -> None:
    """Write total / (1 + exp(-total)) to `y`; an infinite exponential gives 0, as it should."""
    torch.neg(total, out=work).exp_().add_(1)
    y.copy_(total.div_(work))


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
        _silu_to(y[a:b], total, product)


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
    old = window.index_select(0, state_slots.clamp_min(0))  # [N, C, W-1]
    taps = torch.cat((old, x[:, :, None]), 2)
    products = (
        taps * weight.float()
    )  # float32, rounded before they are added in the order of _slide
    total = products[:, :, 0]
    for j in range(1, weight.shape[1]):
        total = total + products[:, :, j]
    _silu_to(y, total, torch.empty_like(total))
    if _known_live(state_slots):
        window.index_copy_(0, state_slots.long(), taps[:, :, 1:])
        return y
    live = state_slots >= 0
    _Scatter.of(state_slots, live).write(window, taps[:, :, 1:])
    return y.masked_fill_(~live[:, None], 0)


# --- decay gate


def kda_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None) -> Tensor:
    """Return the log decay [T, H, K] float32.

    That is lower_bound * sigmoid(rate * raw) with rate = exp(a_log) and raw = f + dt_bias, or
    -rate * softplus(raw) without a bound.
    """
    raw = f.float() + dt_bias
    rate = a_log.exp()[:, None].neg_()  # [H, 1], negative
    if lower_bound is None:
        softplus = raw.abs().neg_().exp_().log1p_().add_(raw.clamp_min_(0))
        return softplus.mul_(rate)
    return raw.mul_(rate).exp_().add_(1).reciprocal_().mul_(lower_bound)


# --- one step of the delta rule


def _row_sum(x: Tensor) -> Tensor:
    """Sum the last axis so that a row's bits depend on the row alone; may overwrite `x`.

    On the CPU torch reduces every row of a contiguous tensor by itself, in an order that its
    length gives. Elsewhere the launch shape depends on the number of rows: there rows are folded
    in halves.
    """
    if x.device.type == "cpu":
        return x.sum(-1)
    n = x.shape[-1]
    while n > 1:
        half = n // 2
        x[..., :half].add_(x[..., n - half : n])
        n -= half
    return x[..., 0]


def _normalised(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q / |q| * K**-0.5 and k / |k| in float32, [T, H, K]."""
    both = torch.stack((q, k)).float()
    scale = _row_sum(both * both).add_(L2_EPS).rsqrt_()
    scale[0].mul_(q.shape[-1] ** -0.5)
    query, key = both.mul_(scale[..., None])
    return query, key


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance `state` [n, H, V, K] by one token in place; returns o [n, H, V] float32.

    Takes a temporary of the state's size, twice.
    """
    state.mul_(decay[:, :, None, :])
    correction = (v - _row_sum(state * k[:, :, None, :])).mul_(beta[:, :, None])
    state.addcmul_(correction[..., None], k[:, :, None, :])
    return _row_sum(state * q[:, :, None, :])


def _tile_rows(state: Tensor) -> int:
    """Return how many rows of states a tile holds."""
    limit = _STATE_TILE["cpu" if state.device.type == "cpu" else "other"]
    return max(1, limit // max(1, state[0].numel()))


def kda_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> Tensor:
    """Advance every row by one token, in place in its slot; returns o [N, H, V].

    Works through tiles of rows. On the CPU, where looking at the slots is no sync, a tile whose
    slots count up one by one is updated where it lies; another one is gathered and scattered.
    """
    query, key = _normalised(q, k)
    inputs = (query, key, v.float(), g.exp(), beta)
    known = state_slots.tolist() if state_slots.device.type == "cpu" else None
    step, rows = _tile_rows(state), q.shape[0]
    parts = []
    for a in range(0, rows, step):
        tile = inputs if rows <= step else tuple(x[a : a + step] for x in inputs)
        if known is None:
            parts.append(_advance_blind(state, state_slots[a : a + step], *tile))
        else:
            parts.append(_advance_known(state, known[a : a + step], *tile))
    if len(parts) == 1:
        return parts[0].to(v.dtype)
    return torch.cat(parts).to(v.dtype) if parts else torch.empty_like(v)


def _advance_known(state: Tensor, slots: list[int], *tile: Tensor) -> Tensor:
    """Advance rows whose slots are known on the host; o is zero for padding."""
    begin, n = slots[0], len(slots)
    if begin >= 0 and slots == list(range(begin, begin + n)):
        return _advance(state[begin : begin + n], *tile)
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
    # The length of the loop has to be known on the host: one sync a call.
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

    query, key = _normalised(q.index_select(0, token), k.index_select(0, token))
    decay = g.index_select(0, token).exp_()
    laid = (query, key, v.index_select(0, token).float(), decay, beta.index_select(0, token))
    at = state_slots.long().index_select(0, order)
    kept = has_state.index_select(0, order)[:, None, None, None]
    moved = torch.where(kept, state.index_select(0, at), 0)
    step, parts, begin = _tile_rows(state), [], 0
    for active in real.sum(1).tolist():
        for a in range(0, active, step):
            b = min(a + step, active)
            tile = (x[begin + a : begin + b] for x in laid)
            parts.append(_advance(moved[a:b], *tile).to(v.dtype))
        begin += active
    state.index_copy_(0, at, moved)
    return o.index_copy_(0, token, torch.cat(parts))


KERNELS = (
    Kernel(op="short_conv", name="torch", run=short_conv, invariant=True),
    Kernel(op="short_conv_decode", name="torch", run=short_conv_decode, invariant=True),
    Kernel(op="kda_gate", name="torch", run=kda_gate, invariant=True),
    Kernel(op="kda_prefill", name="torch", run=kda_prefill_chunked),
    Kernel(
        op="kda_prefill",
        name="torch-invariant",
        run=kda_prefill_stepwise,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="kda_decode", name="torch", run=kda_decode, invariant=True),
)
