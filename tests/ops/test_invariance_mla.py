"""Deterministic MLA and index kernels: a row's bits are its own, in any split and any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oxplow.contracts.mla import attention_weights
from oxplow.contracts.paging import paged_blocks, paged_rows, ragged
from oxplow.ops.kernels.torch import KERNELS, index, mla
from oxplow.ops.table import Facts, select
from tests.ops.rowwise import promised_here, same_bits, torch_threads

pytestmark = promised_here

TOTALS = (1, 40, 150, 17)
FEWER = (1, 37, 17)
RUNS = ((torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2))


@dataclass(frozen=True)
class Call:
    """One call over some sequences: which, how many tokens of each are known, how many are new."""

    order: list[int]
    known: list[int]
    new: list[int]

    def rows(self, per_sequence: list[Tensor]) -> Tensor:
        """Return the call's rows of per-sequence tensors, in call order."""
        steps = zip(self.order, self.known, self.new, strict=True)
        return torch.cat([per_sequence[i][k : k + n] for i, k, n in steps])

    def ragged(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return block_table, computed_tokens and cu_seqlens."""
        return table[self.order], torch.tensor(self.known), ragged(self.new)


def _random_calls(seed: int, totals: tuple[int, ...]) -> Iterator[Call]:
    """Cut all sequences into calls of random company and lengths, single tokens included."""
    rnd = random.Random(seed)
    known = [0] * len(totals)
    while any(k < t for k, t in zip(known, totals, strict=True)):
        order = rnd.sample(range(len(totals)), len(totals))
        new = [min(totals[i] - known[i], rnd.choice((0, 1, 1, 2, 3, 7, 30, 150))) for i in order]
        if sum(new):
            yield Call(order, [known[i] for i in order], new)
        for i, n in zip(order, new, strict=True):
            known[i] += n


def _assert_keeps_bits(
    run: Callable[[Call], Tensor], totals: tuple[int, ...], calls: Iterator[Call]
) -> None:
    whole = [run(Call([i], [0], [total])) for i, total in enumerate(totals)]
    for call in calls:
        want = call.rows(whole)
        assert same_bits(run(call), want), f"other bits in {call}"


# heads, query width, value width, rank, shared dims, block size: odd ones and real ratios
SIZES = (
    (3, 16, 12, 24, 0, 8),
    (2, 20, 5, 7, 4, 12),
    (6, 64, 64, 128, 0, 16),
    (1, 67, 31, 50, 7, 20),
)
# two busy cores make two-thread barriers dear, and bfloat16 hides most of what float32 shows
ATTENTION_RUNS = (
    *((sizes, dtype, 1, TOTALS) for sizes in SIZES for dtype in (torch.float32, torch.bfloat16)),
    *((sizes, torch.float32, 2, FEWER) for sizes in SIZES[::2]),
)


@pytest.mark.parametrize(("sizes", "dtype", "threads", "totals"), ATTENTION_RUNS)
def test_dense_attention_keeps_a_rows_bits(
    sizes: tuple[int, ...], dtype: torch.dtype, threads: int, totals: tuple[int, ...]
) -> None:
    g = torch.Generator().manual_seed(1)
    H, Dn, Dv, R, extra, block_size = sizes
    table, blocks = paged_blocks(totals, block_size, g)
    cache = paged_rows(table, totals, blocks, block_size, R + extra, g).to(dtype)
    query = [torch.randn(t, H, Dn + extra, generator=g).to(dtype) for t in totals]
    weights = {k: v.to(dtype) for k, v in attention_weights(H, Dn, Dv, R, g).items()}

    def run(call: Call) -> Tensor:
        return mla.dense_mla_invariant(
            call.rows(query), **weights, cache=cache,
            **dict(zip(_RAGGED, call.ragged(table), strict=True)),
        )  # fmt: skip

    with torch_threads(threads):
        _assert_keeps_bits(run, totals, _random_calls(R, totals))


_RAGGED = ("block_table", "computed_tokens", "cu_seqlens")


@pytest.mark.parametrize(("sizes", "dtype", "threads", "totals"), ATTENTION_RUNS)
def test_sparse_attention_keeps_a_rows_bits_in_prefill_and_decode(
    sizes: tuple[int, ...], dtype: torch.dtype, threads: int, totals: tuple[int, ...]
) -> None:
    g = torch.Generator().manual_seed(2)
    H, Dn, Dv, R, picks, block_size = sizes
    picks += 11
    table, blocks = paged_blocks(totals, block_size, g)
    cache = paged_rows(table, totals, blocks, block_size, R, g).to(dtype)
    query = [torch.randn(t, H, Dn, generator=g).to(dtype) for t in totals]
    selected = [torch.stack([_picked(p, picks, g) for p in range(t)]) for t in totals]
    # views of one tensor, as a model holds them
    both = attention_weights(H, Dn, Dv, R, g)
    w_uk, w_uv = torch.cat([both["w_uk"], both["w_uv"]], 1).to(dtype).split([Dn, Dv], 1)

    def run(call: Call) -> Tensor:
        rows, chosen = call.rows(query), call.rows(selected)
        tables, _, cu_seqlens = call.ragged(table)
        out = mla.sparse_mla_prefill_invariant(rows, w_uk, w_uv, cache, tables, chosen, cu_seqlens)
        if set(call.new) <= {0, 1}:
            owner = [i for i, n in enumerate(call.new) if n]
            step = mla.sparse_mla_decode_invariant(rows, w_uk, w_uv, cache, tables[owner], chosen)
            assert same_bits(step, out), "decode differs from prefill"
        return out

    with torch_threads(threads):
        _assert_keeps_bits(run, totals, _random_calls(R, totals))


def _picked(position: int, most: int, g: torch.Generator) -> Tensor:
    picks = torch.randperm(position + 1, generator=g)[:most].sort().values.int()
    return torch.nn.functional.pad(picks, (0, most - len(picks)), value=-1)


@pytest.mark.parametrize(
    ("sizes", "threads"),
    (
        ((4, 16, 4, 4, 8), 1),
        ((1, 7, 3, 5, 2), 1),
        ((16, 32, 4, 16, 4), 1),
        ((3, 67, 2, 1, 5), 1),
        ((3, 67, 2, 1, 5), 2),
    ),
)
def test_the_index_chooses_alike_where_rounding_decides(
    sizes: tuple[int, ...], threads: int
) -> None:
    """Scores of most pools lie within a few units of rounding: any other bit shows."""
    g = torch.Generator().manual_seed(3)
    totals = (60, 410, 97)
    Hi, Di, P, PB, top = sizes
    pools = [t // P for t in totals]
    table, blocks = paged_blocks(pools, PB, g)
    cache = paged_rows(table, pools, blocks, PB, Di, g)
    few = torch.randn(3, Di, generator=g)
    for i, count in enumerate(pools):
        for p in range(count):
            nudge = 1 + 1e-7 * torch.randint(-3, 4, (1,), generator=g)
            cache[table[i, p // PB], p % PB] = few[p % 3] * nudge
    query = [torch.randn(t, Hi, Di, generator=g) for t in totals]
    head_weights = [torch.randn(t, Hi, generator=g) for t in totals]

    def run(call: Call) -> Tensor:
        return index.index_select_invariant(
            call.rows(query), call.rows(head_weights), cache,
            *call.ragged(table), top_pools=top, pool_size=P,
        )  # fmt: skip

    with torch_threads(threads):
        _assert_keeps_bits(run, totals, _random_calls(Di, totals))


@pytest.mark.parametrize(("dtype", "threads"), RUNS)
@pytest.mark.parametrize("sizes", ((12, 4, 4), (67, 3, 5), (64, 4, 16), (5, 2, 3)))
def test_pool_keys_and_tails_keep_their_bits_under_any_split(
    sizes: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    g = torch.Generator().manual_seed(4)
    totals = (1, 40, 700, 17)  # enough pools for two threads to share
    Di, P, PB = sizes
    pools = [t // P for t in totals]
    table, blocks = paged_blocks(pools, PB, g)
    key = [torch.randn(t, Di, generator=g).to(dtype) for t in totals]
    gate = [(3 * torch.randn(t, Di, generator=g)).to(dtype) for t in totals]
    ape = torch.randn(P, Di, generator=g)
    slots = torch.randperm(len(totals) + 1, generator=g)[: len(totals)]

    def fill(calls: Iterator[Call]) -> tuple[Tensor, ...]:
        nan = float("nan")
        tails = [torch.full((len(totals) + 1, P - 1, Di), nan, dtype=dtype) for _ in range(2)]
        cache = torch.full((blocks, PB, Di), nan, dtype=dtype)
        for call in calls:
            tables, known, cu_seqlens = call.ragged(table)
            index.pool_keys_write(
                call.rows(key), call.rows(gate), ape, *tails, cache,
                tables, slots[call.order], known, cu_seqlens,
            )  # fmt: skip
        held = [x[slots[i], : t % P] for x in tails for i, t in enumerate(totals)]
        return cache, *held

    with torch_threads(threads):
        whole = fill(iter([Call(list(range(len(totals))), [0] * len(totals), list(totals))]))
        for got, want in zip(fill(_random_calls(Di, totals)), whole, strict=True):
            assert same_bits(got, want)


@pytest.mark.parametrize("op", ("dense_mla", "sparse_mla_decode", "index_select"))
def test_a_strange_neighbour_changes_nothing(op: str) -> None:
    """A sequence of NaN beside the rows, in the same call."""
    g = torch.Generator().manual_seed(5)
    totals = (21, 9)
    table, blocks = paged_blocks(totals, 4, g)
    cache = paged_rows(table, totals, blocks, 4, 16, g)
    cache[table[1, :3]] = float("nan")
    weights = attention_weights(2, 8, 8, 16, g)
    query = torch.randn(2, 2, 16 if op == "index_select" else 8, generator=g)
    query[1] = float("nan")
    known, one_each = torch.tensor([20, 8]), ragged([1, 1])
    selected = torch.arange(8).repeat(2, 1).int()
    run: dict[str, Callable[..., Any]] = {
        "dense_mla": lambda r: mla.dense_mla_invariant(
            query[r], **weights, cache=cache, block_table=table[r],
            computed_tokens=known[r], cu_seqlens=one_each[: len(r) + 1],
        ),
        "sparse_mla_decode": lambda r: mla.sparse_mla_decode_invariant(
            query[r], **weights, cache=cache, block_table=table[r], selected=selected[r]
        ),
        "index_select": lambda r: index.index_select_invariant(
            query[r], torch.ones(len(r), 2), cache, table[r], known[r], one_each[: len(r) + 1],
            top_pools=2, pool_size=1,
        ),
    }  # fmt: skip
    assert same_bits(run[op]([0, 1])[:1], run[op]([0]))


def test_deterministic_mode_finds_a_kernel_for_every_op() -> None:
    ops = {k.op for k in (*mla.KERNELS, *index.KERNELS)}
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32, invariant=True)
    table = select([k for k in KERNELS if k.op in ops], sorted(ops), facts)
    assert all(kernel.invariant for kernel in table.kernels.values())
