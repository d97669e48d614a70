"""Row invariance as one assertion: the same row, in any company, at any place, gives the same bits.

Owns the compositions that invariance tests go through. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from oxplow.ops.kernels.torch.invariant import row_invariance
from oxplow.ops.table import Facts

_HERE = row_invariance(Facts(device=torch.device("cpu"), dtype=torch.float32))

promised_here = pytest.mark.skipif(not _HERE.ok, reason=f"refused on this CPU: {_HERE.reason}")
"""Marks tests of products that the deterministic mode itself refuses on this machine."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run a block on `count` threads; the former number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit: -0.0 differs from 0.0, NaN equals itself."""
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def assert_rows_keep_bits(
    run: Callable[..., Any], rows: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Call `run` on rows [T, ...] together, alone, moved, in parts and beside NaN rows (T >= 9).

    `rows` are the arguments with one entry per row, `rest` the shared ones; every output of `run`
    must have one entry per row too.
    """
    num_rows = len(next(iter(rows.values())))
    want = _outputs(run(**rows, **rest))
    for picked in _compositions(num_rows):
        index = torch.tensor(picked)
        got = _outputs(run(**{name: value[index] for name, value in rows.items()}, **rest))
        for mine, full in zip(got, want, strict=True):
            assert same_bits(mine, full[index]), f"rows {picked} of {num_rows} give other bits"
    for middle, (mine, full) in _beside_nan(run, rows, rest, want):
        assert same_bits(mine, full), f"row {middle} changes beside NaN rows"


def _compositions(num_rows: int) -> Iterator[list[int]]:
    everything = list(range(num_rows))
    yield [0]
    yield [num_rows - 1]
    yield [4, 2]
    yield everything[3:]
    yield everything[:-1]
    yield everything[::-1]
    yield [*everything, *everything, 1]


def _beside_nan(
    run: Callable[..., Any],
    rows: Mapping[str, Tensor],
    rest: Mapping[str, Any],
    want: tuple[Tensor, ...],
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    middle = len(next(iter(rows.values()))) // 2
    poisoned = {
        name: value.clone() if not value.is_floating_point() else torch.full_like(value, torch.nan)
        for name, value in rows.items()
    }
    for name, value in rows.items():
        poisoned[name][middle] = value[middle]
    for mine, full in zip(_outputs(run(**poisoned, **rest)), want, strict=True):
        yield middle, (mine[middle], full[middle])


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
