"""Paged memory for the portable kernels: rows written, blocks gathered, queries cut into lanes.

Owns three mechanisms shared by the MLA and index kernels. Knows no op and no model.
Invariant: an entry of a block table past a sequence's last needed block is never used as an index,
and nothing here makes an accelerator wait for the host except `read_lengths`, once per call that
needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def counting_is_free(x: Tensor) -> bool:
    """Return whether values of `x` may be read by the host without stopping a device."""
    return x.device.type == "cpu"


def survivors(keep: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the indices of keep[K]'s true entries; where their number stays unknown, also "any".

    Where the host may not look, K indices come back: false entries name the first true one instead,
    so that writing them all writes some rows twice with the same bits. Pass both results to
    `put_rows`.
    """
    if counting_is_free(keep):
        return keep.nonzero().squeeze(1), None
    first = keep.int().argmax()
    return torch.where(keep, torch.arange(len(keep), device=keep.device), first), keep.any()


def put_rows(memory: Tensor, index: Tensor, rows: Tensor, some: Tensor | None) -> None:
    """Write rows[K,D] to memory[M,D] at index[K]; if `some` is false, change nothing."""
    if len(memory) == 0:
        return
    if some is not None:
        index = index.clamp(0, len(memory) - 1)  # of a block that holds no token: anything
        rows = torch.where(some, rows, memory.index_select(0, index))
    memory.index_copy_(0, index, rows)


def read_lengths(cu_seqlens: Tensor, computed_tokens: Tensor) -> tuple[list[int], list[int]]:
    """Bring both vectors to the host in one transfer: loops over tiles must know where to stop."""
    if counting_is_free(cu_seqlens):
        return cu_seqlens.tolist(), computed_tokens.tolist()
    both = torch.cat([cu_seqlens.long(), computed_tokens.long()]).tolist()
    return both[: len(cu_seqlens)], both[len(cu_seqlens) :]


def rows_to_sequences(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """Return the sequence of every row, [T] int64; sequences of length zero own none."""
    rows = torch.arange(num_rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], rows, right=True)


class Lane(NamedTuple):
    """Consecutive queries of one sequence: the first one's row and position, and how many."""

    sequence: int
    row: int
    position: int
    live: int

    @property
    def reach(self) -> int:
        """Tokens that the lane's last query may see."""
        return self.position + self.live


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Lanes of one width that run as one batch, longest reach first.

    `rows` [B,W] are rows of the call, `num_rows` (one past the last) where a lane has fewer queries
    than its width; `positions` [B,W] run on past the last query there, `ends` [B,1] do not: they
    are the lanes' reaches.
    """

    lanes: list[Lane]
    sequences: Tensor
    rows: Tensor
    positions: Tensor
    ends: Tensor
    num_rows: int

    def active(self, start: int) -> int:
        """Return how many lanes see anything at or past token `start`; they come first."""
        return sum(lane.reach > start for lane in self.lanes)

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of x[T, ...] in lane order; for a row that a lane lacks, the last one."""
        if self.num_rows == self.rows.numel() == 1:  # one request decodes: nothing to reorder
            return x
        return x.index_select(0, self.rows.clamp_max(self.num_rows - 1).flatten())

    def tables(self, block_table: Tensor) -> Tensor:
        """Return every lane's block table, [B, MB]."""
        if len(block_table) == 1 == len(self.lanes):
            return block_table
        return block_table.index_select(0, self.sequences)


def lane_widths(spans: list[Lane], longest: int) -> list[tuple[int, list[Lane]]]:
    """Split runs into single queries (decode: lanes of one) and longer ones (wider lanes)."""
    single = [span for span in spans if span.live == 1]
    longer = [span for span in spans if span.live > 1]
    parts = [(1, single)] if single else []
    if longer:
        parts.append((min(longest, max(span.live for span in longer)), longer))
    return parts


def cut_lanes(spans: Iterable[Lane], width: int) -> list[Lane]:
    """Cut each sequence's run of queries into lanes of `width`, longest reach first."""
    lanes = [
        Lane(span.sequence, span.row + at, span.position + at, min(width, span.live - at))
        for span in spans
        for at in range(0, span.live, width)
    ]
    return sorted(lanes, key=lambda lane: lane.reach, reverse=True)


def tiling(
    budget: int, lanes: int, per_row: int, fewest: int, per_lane: int = 0
) -> tuple[int, int]:
    """Return (rows of memory per tile, lanes per group) that keep temporaries within `budget`.

    A temporary has `per_row` elements per lane and row, or `per_lane` elements per lane. Tiles have
    `fewest` rows at least, even where that breaks the budget for a single lane.
    """
    group = min(lanes, max(1, budget // max(per_row * fewest, per_lane)))
    return max(fewest, budget // (per_row * group)), group


def group_lanes(
    lanes: list[Lane], width: int, per_group: int, num_rows: int, device: torch.device
) -> Iterator[LaneGroup]:
    """Upload lanes once and yield them `per_group` at a time."""
    table = torch.tensor(lanes, dtype=torch.int64).to(device)
    for at in range(0, len(lanes), per_group):
        part = table[at : at + per_group]
        sequences, rows, positions, live = part[:, 0], part[:, 1:2], part[:, 2:3], part[:, 3:4]
        ends = positions + live
        if width > 1:
            step = torch.arange(width, device=device)
            rows = torch.where(step < live, rows + step, num_rows)
            positions = positions + step
        yield LaneGroup(lanes[at : at + per_group], sequences, rows, positions, ends, num_rows)


ALIGN = 16
"""Float32 elements in 64 bytes: a product of one shape keeps its bits on rows that start there."""


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


def fit(x: Tensor, *sizes: int) -> Tensor:
    """Pad the last dimensions of `x` with zeros up to `sizes`; no copy if they fit."""
    if x.shape[x.ndim - len(sizes) :] == sizes:
        return x
    edges = [(0, size - have) for size, have in zip(sizes[::-1], x.shape[::-1], strict=False)]
    return torch.nn.functional.pad(x, [edge for pair in edges for edge in pair])


def fixed_blocks(rows_per_block: int, rows: int) -> int:
    """Return blocks per tile of about `rows` aligned rows, from the block's size alone."""
    least = math.lcm(rows_per_block, ALIGN)
    return max(1, rows // least) * least // rows_per_block


def gather_blocks(
    memory: Tensor, tables: Tensor, first: int, count: int, needed: list[int]
) -> Tensor:
    """Return blocks first .. first+count-1 of every table row as float32, [B, count*block, D].

    `needed` is how many blocks each row has, more than `first` everywhere. Blocks past it repeat
    block `first` and mean nothing; so may the end of the last needed one: the caller masks both.
    """
    if min(needed) >= first + count:
        ids = tables[:, first : first + count]
    else:
        columns = torch.arange(first, first + count, device=tables.device)
        limits = torch.tensor(needed, device=tables.device).unsqueeze(1)
        ids = tables[:, columns.clamp_max(tables.shape[1] - 1)]
        ids = torch.where(columns < limits, ids, ids[:, :1])
    blocks = memory.index_select(0, ids.reshape(-1))
    return blocks.view(len(tables), count * memory.shape[1], memory.shape[2]).float()
