"""Portable chunked prefill of the gated delta rule (WY form), for any torch device.

Owns the layout of ragged sequences in chunks, the work inside chunks and the walk of the states
over them. Knows the contract's names and shapes, not the model. Invariant: no exponent is positive
and no sum of log decays is a difference: every decay factor is a product of factors exp(g) <= 1
over exactly the tokens it spans. So nothing overflows for any gate, with or without a lower bound,
and a weak decay keeps its digits next to strong ones.

One chunk and head, C rows, S the state before the chunk (linear-attention.md 3):
    D[i,j] = product of exp(g) over rows j+1..i
    A[i,j] = beta_i sum_d k_i k_j D[i,j] for j < i,  P[i,j] = sum_d q_i k_j D[i,j] for j <= i
    T = (I + A)^-1,  u = T beta (v - (k o exp G) S),  o = (q o exp G) S + P u
    S+ = exp(G_C) S + (k o exp(G_C - G))^T u
Pair sums and inverse grow by halves. Two diagonal blocks of h rows merge into one of 2h, whose
new lower-left quarter of A and P factors at the border: rows take the decays from the border on,
columns those up to it. The inverse's new quarter is -T_low A T_up. This takes one exponential for
each token and channel; the rule of 16-row sub-blocks takes four and rounds sums near 80 and 320.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
"""Rows of a chunk (fewer when every sequence of the call is shorter)."""

L2_EPS = 1e-6
"""Added to the sum of squares of q and k, inside the root."""

_BUDGET = {"cpu": 4 << 20, "other": 512 << 20}
"""Bytes that the operands of a group of chunks may take: a share of the cache, or of a device."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tokens of ragged sequences lie in chunks of `size` rows.

    Sequences (`order`, the call's row numbers) come longest first, chunks position by position:
    all first chunks, all second chunks, and so on. So the sequences that have a chunk at a
    position are a prefix of the order, and a walk over positions touches slices only. `active`
    counts them at each position; `token` [chunks, size] names the call's token of each row,
    `rows` [chunks] counts the real rows (the rest is padding).
    """

    size: int
    order: tuple[int, ...]
    active: tuple[int, ...]
    token: Tensor
    rows: Tensor

    @classmethod
    def of(cls, cu_seqlens: list[int], state_slots: list[int]) -> _Layout:
        """Lay out the sequences that have tokens and a slot; the index tensors are on the CPU."""
        lengths = {
            i: cu_seqlens[i + 1] - cu_seqlens[i]
            for i, slot in enumerate(state_slots)
            if slot >= 0 and cu_seqlens[i + 1] > cu_seqlens[i]
        }
        order = sorted(lengths, key=lambda i: -lengths[i])
        longest = max(lengths.values(), default=1)
        size = min(CHUNK, 1 << (longest - 1).bit_length())
        length = torch.tensor([lengths[i] for i in order], dtype=torch.int64)
        start = torch.tensor([cu_seqlens[i] for i in order], dtype=torch.int64)
        position = torch.arange(0, longest, size)[
            :, None
        ]  # first row of each chunk in its sequence
        real = position < length
        token = (start + position)[real][:, None] + torch.arange(size)
        rows = (length - position)[real].clamp_max(size)
        return cls(size, tuple(order), tuple(real.sum(1).tolist()), token, rows)

    def pieces(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Yield (chunks counted from `first`, sequences) for the positions in first..last."""
        at = 0
        for count in self.active:
            a, b = max(first, at), min(last, at + count)
            if a < b:
                yield slice(a - first, b - first), slice(a - at, b - at)
            at += count


def kda_prefill_chunked(
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
    """Run all sequences of the call and leave their states in place; returns o [T, H, V].

    `lower_bound` is not needed: the evaluation is safe for every g <= 0. Memory: the states of the
    call's sequences, and `_BUDGET` bytes for a group of chunks (one chunk of all heads at least).
    """
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    # The number of chunks gives the shapes of everything below, so the host has to know it: this
    # is the one place where a device is waited for.
    layout = _Layout.of(cu_seqlens.tolist(), state_slots.tolist())
    if not layout.order:
        return o
    order = torch.tensor(layout.order, device=state.device)
    slots = state_slots.long().index_select(0, order)
    kept = has_state.index_select(0, order)[:, None, None, None]
    running = torch.where(kept, state.index_select(0, slots), 0)  # [sequences, H, V, K]

    heads, depth, width = q.shape[1], q.shape[2], v.shape[2]
    budget = _BUDGET["cpu" if q.device.type == "cpu" else "other"]
    # rows of keys and values of every operand below, and five C x C matrices
    chunk_bytes = 4 * heads * layout.size * (10 * depth + 5 * width + 5 * layout.size)
    group = max(1, budget // chunk_bytes)
    for first in range(0, layout.token.shape[0], group):
        last = min(first + group, layout.token.shape[0])
        chunks = _Chunks.gather(q, k, v, g, beta, layout, first, last)
        carried, reads = _walk(chunks, running, list(layout.pieces(first, last)))
        out = reads.baddbmm_(chunks.scores, carried).mul_(depth**-0.5)  # [chunks * H, C, V]
        out = out.view(-1, heads, layout.size, width).transpose(1, 2)
        chunks.scatter(o, out)
    state.index_copy_(0, slots, running)
    return o


def _walk(
    chunks: _Chunks, running: Tensor, pieces: list[tuple[slice, slice]]
) -> tuple[Tensor, Tensor]:
    """Carry the states over a group of chunks, position by position.

    Advances `running` in place; returns the corrected values u and the state's part of the output,
    both [chunks * H, C, V].
    """
    heads, width, depth = running.shape[1:]
    size = chunks.values.shape[1]
    carried = torch.empty_like(chunks.values)
    reads = torch.empty_like(chunks.values)
    for here, who in pieces:
        at = slice(here.start * heads, here.stop * heads)
        memory = running[who].view(-1, width, depth)
        seen = torch.bmm(chunks.readers[at], memory.transpose(1, 2))  # [., 2C, V]
        u = torch.sub(chunks.values[at], seen[:, :size], out=carried[at])
        reads[at] = seen[:, size:]
        memory.mul_(chunks.kept[at]).baddbmm_(u.transpose(1, 2), chunks.writers[at])
    return carried, reads


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Operands of a group of chunks, one matrix for each chunk and head.

    readers [., 2C, K]: T beta (k o exp G), then q o exp G; values [., C, V]: T beta v;
    scores [., C, C]: P; writers [., C, K]: k o exp(G_C - G); kept [., 1, K]: exp G_C.
    q is not scaled: the output is.
    """

    readers: Tensor
    values: Tensor
    scores: Tensor
    writers: Tensor
    kept: Tensor
    token: Tensor
    real: Tensor | None

    @classmethod
    def gather(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: _Layout,
        first: int,
        last: int,
    ) -> _Chunks:
        """Gather tokens and do all that needs no state; padding rows are identity steps."""
        size, heads, depth, width = layout.size, q.shape[1], q.shape[2], v.shape[2]
        counts = layout.rows[first:last]
        token, real = layout.token[first:last].to(q.device), None
        if int(counts.min()) < size:  # the layout is host memory
            real = (torch.arange(size) < counts[:, None]).to(q.device)
            token = torch.where(real, token, 0)
        batch = (last - first) * heads

        def take(x: Tensor) -> Tensor:
            """Return [chunks, H, C, ...] of the chunks' tokens, zero in padding rows."""
            rows = x.index_select(0, token.view(-1)).view(last - first, size, *x.shape[1:])
            if real is not None:
                rows = rows.masked_fill_(~real.view(*real.shape, *(1,) * (x.ndim - 1)), 0)
            return rows.transpose(1, 2)

        both = q.new_empty((last - first, heads, size, 2, depth), dtype=torch.float32)
        both[:, :, :, 0], both[:, :, :, 1] = take(q), take(k)
        both = both.view(batch, size, 2, depth)
        both.mul_((both * both).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_())
        rate = take(beta).reshape(batch, size, 1).float()
        pairs = _Pairs.of(both, take(g).reshape(batch, size, depth).float().exp_(), rate)

        both.mul_(pairs.since_start[:, :, None])  # q o exp G, k o exp G
        right = torch.empty(batch, size, depth + width, dtype=torch.float32, device=q.device)
        right[:, :, :depth] = both[:, :, 1]
        right[:, :, depth:].view(last - first, heads, size, width).copy_(take(v))
        solved = torch.bmm(pairs.inverse, right.mul_(rate))
        readers = torch.cat((solved[:, :, :depth], both[:, :, 0]), 1)
        return cls(
            readers=readers,
            values=solved[:, :, depth:].contiguous(),
            scores=pairs.scores,
            writers=pairs.until_end,
            kept=pairs.since_start[:, -1:],
            token=token,
            real=real,
        )

    def scatter(self, o: Tensor, out: Tensor) -> None:
        """Write rows `out` [chunks, C, H, V] to their tokens of `o` [T, H, V]."""
        if self.real is None:
            o.index_copy_(0, self.token.view(-1), out.reshape(-1, *o.shape[1:]).to(o.dtype))
        else:
            o[self.token[self.real]] = out[self.real].to(o.dtype)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What keys, queries and decays give without values: P, T, exp G and k o exp(G_C - G)."""

    scores: Tensor
    inverse: Tensor
    since_start: Tensor
    until_end: Tensor

    @classmethod
    def of(cls, both: Tensor, decay: Tensor, rate: Tensor) -> _Pairs:
        """Merge blocks of 1, 2, 4, ... rows: both [B, C, 2, K] is q and k, decay [B, C, K] exp g.

        Overwrites `decay` with exp G. `rate` [B, C, 1] is beta.
        """
        batch, size, _, depth = both.shape
        key = both[:, :, 1].contiguous()
        # before: decays from a block's first row to the row (inclusive);
        # after: key times the decays from the row (exclusive) to the block's end
        before, after = decay, key.clone()
        scores = both.new_zeros(batch, size, size)
        inverse = both.new_zeros(batch, size, size)
        scores.diagonal(dim1=1, dim2=2).copy_((both[:, :, 0] * key).sum(-1))
        inverse.diagonal(dim1=1, dim2=2).fill_(1)
        half = 1
        while half < size:
            blocks = size // (2 * half)
            low = before.view(batch, blocks, 2, half, depth)
            up = after.view(batch, blocks, 2, half, depth)[:, :, 0]
            left = both.view(batch, blocks, 2, half, 2, depth)[:, :, 1] * low[:, :, 1, :, None]
            product = torch.bmm(
                left.view(batch * blocks, 2 * half, depth),
                up.reshape(batch * blocks, half, depth).transpose(1, 2),
            ).view(batch, blocks, half, 2, half)
            _corner(scores, half).copy_(product[:, :, :, 0])
            link = product[:, :, :, 1] * rate.view(batch, blocks, 2, half, 1)[:, :, 1]
            _corner(inverse, half).copy_(_link(inverse, link, half))
            up.mul_(low[:, :, 1, -1:])
            low[:, :, 1].mul_(low[:, :, 0, -1:])
            half *= 2
        return cls(scores=scores, inverse=inverse, since_start=before, until_end=after)


def _block(x: Tensor, half: int, row: int, column: int) -> Tensor:
    """Return the (row, column) quarters of the 2h x 2h diagonal blocks, [B, C / 2h, h, h]."""
    batch, size = x.shape[:2]
    return x.as_strided(
        (batch, size // (2 * half), half, half),
        (size * size, 2 * half * (size + 1), size, 1),
        row * half * size + column * half,
    )


def _corner(x: Tensor, half: int) -> Tensor:
    return _block(x, half, 1, 0)


def _link(inverse: Tensor, link: Tensor, half: int) -> Tensor:
    """Return -T_low A T_up [B, blocks, h, h], the inverse's corner for the corner A = `link`."""
    if half == 1:
        return link.neg()
    upper, lower = _block(inverse, half, 0, 0), _block(inverse, half, 1, 1)
    return lower.neg() @ (link @ upper)
