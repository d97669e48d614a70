"""Broken samplers: wrong cuts, wrong ties, wrong noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.sampling import Row, gumbel, rows_of
from tests.ops.broken import Broken

Draw = Callable[[Row, int], int]


def _run(draw: Draw) -> Callable[..., Tensor]:
    """Wrap a draw of (row, index in the batch) as a kernel."""

    def run(**args: Any) -> Tensor:
        rows = rows_of(args)
        return torch.tensor([draw(r, i) for i, r in enumerate(rows)], dtype=torch.int64)

    return run


def _winner(row: Row, kept: list[int]) -> int:
    return max(kept, key=lambda i: (row.score(i), -i))


def _guarded(draw: Callable[[Row], int]) -> Draw:
    """Leave greedy and unusable rows as they should be."""
    return lambda row, _: row.draw() if not row.usable or row.temperature <= 0 else draw(row)


def _last_of_equals(row: Row, _: int) -> int:
    if not row.usable or row.temperature > 0:
        return row.draw()
    best = max(row.logits)
    return max(i for i, x in enumerate(row.logits) if x == best)


def _noise_of_the_place(row: Row, index: int) -> int:
    return replace(row, seed=row.seed ^ index).draw()


def _noise_without_position(row: Row) -> int:
    return replace(row, position=0).draw()


def _nan_is_the_largest(row: Row, _: int) -> int:
    if any(map(math.isnan, row.logits)):
        return next(i for i, x in enumerate(row.logits) if math.isnan(x))
    return row.draw()


def _all_equals_at_the_cut(row: Row) -> int:
    if row.top_k == 0:
        return row.draw()
    floor = sorted(row.logits, reverse=True)[min(row.top_k, len(row.logits)) - 1]
    return replace(row, top_k=sum(x >= floor for x in row.logits)).draw()


def _crossing_token_dropped(row: Row) -> int:
    kept = row.kept()
    return _winner(row, kept[:-1] if row.top_p < 1 and len(kept) > 1 else kept)


def _top_p_before_top_k(row: Row) -> int:
    kept = replace(row, top_k=0).kept()
    return _winner(row, kept[: row.top_k] if row.top_k else kept)


def _min_p_as_a_probability(row: Row) -> int:
    kept = replace(row, min_p=0.0).kept()
    weights = {i: math.exp(row.logits[i] / row.temperature) for i in kept}
    total = sum(weights.values())
    return _winner(row, [i for i in kept if weights[i] / total >= row.min_p] or kept[:1])


def _cuts_before_temperature(row: Row) -> int:
    return _winner(row, replace(row, temperature=1.0).kept())


def _noise_not_scaled(row: Row) -> int:
    """Add Gumbel noise to logits that the temperature never divided."""
    return max(row.kept(), key=lambda i: row.logits[i] + gumbel(row.seed, row.position, i))


def _masked_at_a_finite_number(row: Row) -> int:
    return replace(row, logits=[max(x, -100.0) for x in row.logits]).draw()


def _broken(fault: str, draw: Draw, case: str) -> Broken:
    return Broken(op="sample", fault=fault, run=_run(draw), case=case, tensor="token_ids")


BROKEN = (
    _broken("greedy takes the last of equals", _last_of_equals, "equal_logits"),
    _broken("all equals at the top-k cut", _guarded(_all_equals_at_the_cut), "equal_logits"),
    _broken("noise depends on the place", _noise_of_the_place, "mixed_settings"),
    _broken("noise without position", _guarded(_noise_without_position), "no_filters"),
    _broken("NaN wins", _nan_is_the_largest, "unusable_rows"),
    _broken("crossing token dropped", _guarded(_crossing_token_dropped), "flat_top_p"),
    _broken("top-p before top-k", _guarded(_top_p_before_top_k), "flat_top_k_then_top_p"),
    _broken("min-p as a probability", _guarded(_min_p_as_a_probability), "hot_min_p"),
    _broken("cuts before temperature", _guarded(_cuts_before_temperature), "hot_min_p"),
    _broken("noise on unscaled logits", _guarded(_noise_not_scaled), "no_filters"),
    _broken("mask at a finite number", _guarded(_masked_at_a_finite_number), "masked"),
)
