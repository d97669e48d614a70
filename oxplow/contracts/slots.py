"""Recipes and rules for state pools, shared by the short convolution and the delta rule.

Owns how a case deals slots to sequences and how a constraint reads them. Knows no op.
Invariant: a pool entry that a call must not read (unused, or of a fresh row) is NaN, but for those
that padding rows might write by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oxplow.contracts.paging import cu_seqlens_fit
from oxplow.contracts.schema import Args, Constraint

PACKED = (1, 2, 3, 4, 64, 1, 65, 0)
"""Lengths around the convolution width and the chunk, with an empty sequence."""


def deal_slots(rows: int, g: torch.Generator, padding: Sequence[int] = ()) -> Tensor:
    """Return distinct slots [rows] int64 out of rows + 3, shuffled; rows in `padding` get -1."""
    slots = torch.randperm(rows + 3, generator=g)[:rows]
    slots[list(padding)] = -1
    return slots


def mark_states(rows: int, fresh: Sequence[int] = ()) -> Tensor:
    """Return has_state [rows]: False for the rows in `fresh`."""
    kept = torch.ones(rows, dtype=torch.bool)
    kept[list(fresh)] = False
    return kept


def fill_pool(
    sizes: tuple[int, ...], slots: Tensor, kept: Tensor, g: torch.Generator, scale: float = 1.0
) -> Tensor:
    """Return a NaN pool [rows + 3, *sizes] where only slots of rows with a state hold numbers.

    Beside padding rows the first and the last slot hold numbers too, as a request would that is not
    in this call: a NaN there would hide that a padding row wrote it.
    """
    pool = torch.full((len(slots) + 3, *sizes), float("nan"))
    if (slots < 0).any():
        pool[[0, -1]] = torch.randn(2, *sizes, generator=g) * scale
    for slot, has_state in zip(slots.tolist(), kept.tolist(), strict=True):
        if slot >= 0 and has_state:
            pool[slot] = torch.randn(sizes, generator=g) * scale
    return pool


def own_slots(pool: str) -> Constraint:
    """Return the rule that no two rows share a slot of `pool`."""

    def holds(args: Args) -> bool:
        owned = [s for s in args["state_slots"].tolist() if s >= 0]
        return len(set(owned)) == len(owned) and all(s < len(args[pool]) for s in owned)

    return Constraint("slots >= 0 are distinct and in the pool, slots < 0 mark padding", holds)


def ragged_rows(rows: str) -> Constraint:
    """Return the rule that cu_seqlens cuts the rows of `rows` into N sequences."""

    def holds(args: Args) -> bool:
        return len(args["cu_seqlens"]) == len(args["state_slots"]) + 1 and cu_seqlens_fit(
            args, rows
        )

    return Constraint("cu_seqlens rises from 0 to T in N + 1 entries", holds)


def single_tokens(rows: int) -> tuple[Tensor, Tensor]:
    """Return (has_state, cu_seqlens) that make `rows` decode rows sequences of one token."""
    return mark_states(rows), torch.arange(rows + 1)
