"""Recipes and rules for paged, ragged inputs, shared by the MLA and index contracts.

Owns how a case lays sequences into blocks and how a constraint reads block tables. Knows no op.
Invariant: memory that holds no token is NaN, and unused entries of a block table are never a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.schema import Args

GARBAGE = (-1, 2**30)
"""What unused entries of a block table hold: never a block."""


def spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Return (first row, one past the last row) of every sequence."""
    ends = cu_seqlens.tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))


def paged_blocks(totals: Sequence[int], block_size: int, g: torch.Generator) -> tuple[Tensor, int]:
    """Lay `totals` tokens into shuffled blocks; return (block_table [N, MB] int64, blocks).

    Two blocks stay free, the table has one more column than the longest sequence needs, and its
    unused entries are garbage.
    """
    need = [-(-t // block_size) for t in totals]
    blocks = sum(need) + 2
    order = torch.randperm(blocks, generator=g).tolist()
    table = torch.tensor(GARBAGE).repeat(len(totals), (max(need, default=0) + 2) // 2)
    table = table[:, : max(need, default=0) + 1].contiguous()
    for i, n in enumerate(need):
        table[i, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int64)
    return table, blocks


def paged_rows(
    table: Tensor,
    totals: Sequence[int],
    blocks: int,
    block_size: int,
    width: int,
    g: torch.Generator,
) -> Tensor:
    """Return [blocks, block_size, width]: a normal row for every token, NaN elsewhere."""
    cache = torch.full((blocks, block_size, width), float("nan"))
    for i, total in enumerate(totals):
        for t in range(total):
            cache[table[i, t // block_size], t % block_size] = torch.randn(width, generator=g)
    return cache


def ragged(lengths: Sequence[int]) -> Tensor:
    """Return cu_seqlens [N+1] int32 of the lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def cu_seqlens_fit(args: Args, rows: str) -> bool:
    """Tell whether cu_seqlens rises from 0 to the number of rows of `rows`."""
    cu = args["cu_seqlens"].tolist()
    return (
        cu[0] == 0
        and cu[-1] == len(args[rows])
        and all(a <= b for a, b in zip(cu[:-1], cu[1:], strict=True))
    )


def table_reaches(args: Args, rows_per_block: int, tokens_per_row: int = 1) -> bool:
    """Tell whether the block tables name real, distinct blocks for every complete row of memory."""
    known = args["computed_tokens"].tolist()
    memory = args["cache"] if "cache" in args else args["pool_cache"]
    used: list[int] = []
    for (a, b), before, row in zip(
        spans(args["cu_seqlens"]), known, args["block_table"].tolist(), strict=True
    ):
        rows = (before + b - a) // tokens_per_row if b > a else 0
        need = -(-rows // rows_per_block)
        if need > len(row):
            return False
        used += row[:need]
    return len(set(used)) == len(used) and all(0 <= block < len(memory) for block in used)


def tensor_bytes(*values: Any) -> int:
    """Return the bytes of the tensors among `values`."""
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def widened(args: Mapping[str, Any]) -> Args:
    """Return the arguments with every floating tensor in float64."""
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in args.items()
    }
