"""MLA and index kernels as a family: borders, permutations, splits, memory, calls per step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from oxplow.contracts import CONTRACTS
from oxplow.contracts.mla import attention_weights
from oxplow.contracts.paging import GARBAGE, paged_blocks, paged_rows, ragged
from oxplow.contracts.schema import Args
from oxplow.feedback.gate import examine
from oxplow.ops.kernels.torch import KERNELS, index, mla, paged

P, TOP, BLOCK = 4, 8, 16
SELECT = {"top_pools": TOP, "pool_size": P}


class Seen(TorchDispatchMode):
    """Record every op and the largest tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass the call through and look at its results."""
        out = func(*args, **(kwargs or {}))
        self.ops.append(func.overloadpacket.__name__)
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return out


class World:
    """Sequences with everything that index and attention need, and calls over any of them."""

    def __init__(self, totals: list[int], seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.totals = totals
        self.table, blocks = paged_blocks(totals, BLOCK, g)
        pools = [t // P for t in totals]
        self.keys = paged_rows(self.table, pools, blocks, BLOCK // P, 16, g)
        self.latents = paged_rows(self.table, totals, blocks, BLOCK, 24, g)
        self.weights = attention_weights(3, 16, 12, 24, g)
        self.index_query = [torch.randn(t, 4, 16, generator=g) for t in totals]
        self.head_weights = [torch.randn(t, 4, generator=g) for t in totals]
        self.query = [torch.randn(t, 3, 16, generator=g) for t in totals]

    def _rows(self, x: list[Tensor], order: list[int], known: list[int], new: list[int]) -> Tensor:
        return torch.cat([x[i][k : k + n] for i, k, n in zip(order, known, new, strict=True)])

    def select(self, order: list[int], known: list[int], new: list[int]) -> Tensor:
        """Choose for the tokens known .. known+new-1 of the sequences in `order`."""
        return index.index_select(
            self._rows(self.index_query, order, known, new),
            self._rows(self.head_weights, order, known, new),
            self.keys, self.table[order], torch.tensor(known), ragged(new), **SELECT,
        )  # fmt: skip

    def sparse(self, order: list[int], known: list[int], new: list[int]) -> Tensor:
        """Select and attend."""
        query = self._rows(self.query, order, known, new)
        selected = self.select(order, known, new)
        return mla.sparse_mla_prefill(
            query, **self.weights, cache=self.latents, block_table=self.table[order],
            selected=selected, cu_seqlens=ragged(new),
        )  # fmt: skip

    def dense(self, order: list[int], known: list[int], new: list[int]) -> Tensor:
        """Attend to everything."""
        return mla.dense_mla(
            self._rows(self.query, order, known, new), **self.weights, cache=self.latents,
            block_table=self.table[order], computed_tokens=torch.tensor(known),
            cu_seqlens=ragged(new),
        )  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=3e-6)  # 50 float32 roundings of values of size one


# what is chosen


def test_every_order_of_sequences_chooses_and_attends_as_each_alone() -> None:
    known, new = (0, 7, 128, 1), (5, 3, 1, 130)
    world = World([k + n for k, n in zip(known, new, strict=True)])
    for run, same in ((world.select, torch.equal), (world.sparse, _close), (world.dense, _close)):
        alone = [run([i], [known[i]], [new[i]]) for i in range(4)]
        for order in itertools.permutations(range(4)):
            got = run(list(order), [known[i] for i in order], [new[i] for i in order])
            assert same(got, torch.cat([alone[i] for i in order])), f"{run.__name__} in {order}"


def test_the_choice_is_dense_exactly_up_to_the_last_dense_length() -> None:
    limit = P * TOP + P - 1
    world = World([limit + 12])
    selected = world.select([0], [0], [limit + 12])
    for t, row in enumerate(selected.tolist()):
        chosen, visible = [p for p in row if p >= 0], t + 1
        if visible <= limit:
            assert chosen == list(range(visible))
        else:
            assert len(chosen) == P * TOP + visible % P < visible
    sparse, dense = (f([0], [0], [limit]) for f in (world.sparse, world.dense))
    assert _close(sparse, dense)
    assert not _close(world.sparse([0], [limit], [4]), world.dense([0], [limit], [4]))


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 96), max_size=12), seed=st.integers(0, 5))
def test_any_split_of_a_sequence_chooses_alike(cuts: list[int], seed: int) -> None:
    world = World([97, 41], seed)
    whole = world.select([0], [0], [97])
    borders = sorted({0, *cuts, 97})
    for a, b in itertools.pairwise(borders):  # the other sequence decodes meanwhile
        got = world.select([1, 0], [40, a], [1, b - a])
        assert torch.equal(got[1:], whole[a:b])


def test_moving_blocks_changes_nothing() -> None:
    world, moved = World([90, 70]), World([90, 70])
    order = torch.randperm(len(world.keys))
    moved.keys[order], moved.latents[order] = world.keys.clone(), world.latents.clone()
    real = (world.table >= 0) & (world.table < len(order))
    moved.table = torch.where(real, order[world.table.clamp(0, len(order) - 1)], GARBAGE[0])
    for name in ("select", "sparse", "dense"):
        call = ([0, 1], [40, 69], [50, 1])
        assert torch.equal(getattr(world, name)(*call), getattr(moved, name)(*call)), name


def test_a_longer_past_shifts_the_choice_and_nothing_else() -> None:
    """Positions enter nowhere: pools that score zero, put in front, move every choice along."""
    g = torch.Generator().manual_seed(3)
    shift, total = 3 * P, 80
    query, weights = torch.randn(10, 4, 16, generator=g).abs(), torch.ones(10, 4)
    keys = torch.rand(total // P, 16, generator=g)
    late = torch.cat([-torch.rand(shift // P, 16, generator=g), keys])

    def choose(rows: Tensor, known: int) -> Tensor:
        cache = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 4)).view(-1, 4, 16)
        table, cu = torch.arange(len(cache)).unsqueeze(0), ragged([10])
        return index.index_select(query, weights, cache, table, torch.tensor([known]), cu, **SELECT)

    early, later = choose(keys, total - 10), choose(late, total - 10 + shift)
    assert torch.equal(torch.where(early >= 0, early + shift, -1), later)


# pool keys


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 22), max_size=6),
)
def test_pool_keys_of_any_split_equal_one_call(lengths: list[int], cuts: list[int]) -> None:
    g = torch.Generator().manual_seed(len(cuts))
    table, blocks = paged_blocks([n // P for n in lengths], 2, g)
    key, gate = (torch.randn(len(lengths), 23, 5, generator=g) for _ in range(2))
    ape, slots = torch.randn(P, 5, generator=g), torch.randperm(len(lengths) + 1, generator=g)

    def fill(borders: list[int]) -> tuple[Tensor, Tensor]:
        tails = torch.full((2, len(slots), P - 1, 5), float("nan"))
        cache = torch.full((blocks, 2, 5), float("nan"))
        for a, b in itertools.pairwise(borders):
            new = [max(0, min(n, b) - a) for n in lengths]
            rows = [torch.cat([x[i, a : a + n] for i, n in enumerate(new)]) for x in (key, gate)]
            known = torch.tensor([min(n, a) for n in lengths])
            index.pool_keys_write(
                *rows, ape, tails[0], tails[1], cache, table, slots[:-1], known, ragged(new)
            )
        assert tails[:, slots[-1]].isnan().all(), "a slot that nobody owns was written"
        held = [tails[:, slots[i], : n % P] for i, n in enumerate(lengths)]
        return cache, torch.cat(held, 1)

    for got, want in zip(fill(sorted({0, *cuts, 23})), fill([0, 23]), strict=True):
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_a_long_generation_equals_one_prefill() -> None:
    """Keys written step by step, and chosen from at once: what a request does, token by token."""
    g = torch.Generator().manual_seed(1)
    total, width = 150, 16
    table, blocks = paged_blocks([total], BLOCK, g)
    key, gate = (torch.randn(total, width, generator=g) for _ in range(2))
    query, weights = torch.randn(total, 4, width, generator=g), torch.randn(total, 4, generator=g)
    ape = torch.randn(P, width, generator=g)

    def run(borders: list[int]) -> Tensor:
        tails = torch.full((2, 1, P - 1, width), float("nan"))
        cache = torch.full((blocks, BLOCK // P, width), float("nan"))
        chosen = []
        for a, b in itertools.pairwise(borders):
            call = (table, torch.tensor([a]), ragged([b - a]))
            index.pool_keys_write(
                key[a:b], gate[a:b], ape, tails[0], tails[1], cache,
                table, torch.tensor([0]), *call[1:],
            )  # fmt: skip
            chosen.append(index.index_select(query[a:b], weights[a:b], cache, *call, **SELECT))
        return torch.cat(chosen)

    assert torch.equal(run([0, 20, *range(21, total + 1)]), run([0, total]))


# accelerators: the paths that never look at a device from the host


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every kernel believe that reading a tensor would stop a device."""
    for module in (paged, mla, index):
        monkeypatch.setattr(module, "counting_is_free", lambda x: False)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("kernel", (*mla.KERNELS, *index.KERNELS), ids=lambda k: f"{k.op}-{k.name}")
def test_kernels_conform_without_looking(kernel: Any) -> None:
    contract = CONTRACTS[kernel.op]
    for case in contract.cases:
        finding = examine(contract, kernel.name, kernel.run, case)
        assert finding.ok, str(finding)


@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("op", ("latent_write", "pool_keys_write", "sparse_mla_decode"))
def test_a_step_on_a_device_never_waits_for_the_host(op: str) -> None:
    run = next(k.run for k in KERNELS if k.op == op)
    for case in CONTRACTS[op].cases:
        args = case.build(torch.Generator().manual_seed(0))
        with Seen() as seen:
            run(**args)
        waits = {"_local_scalar_dense", "nonzero", "item", "masked_select"} & set(seen.ops)
        assert not waits, f"{op} on {case.name}"


# memory


def _long_call(num_tokens: int) -> Args:
    g = torch.Generator().manual_seed(0)
    pools = num_tokens // P
    keys = torch.randn(pools // 16, 16, 2, generator=g)
    return {
        "query": torch.randn(num_tokens, 1, 2, generator=g),
        "head_weights": torch.randn(num_tokens, 1, generator=g),
        "pool_cache": keys,
        "block_table": torch.randperm(len(keys), generator=g).unsqueeze(0),
        "computed_tokens": torch.tensor([0]),
        "cu_seqlens": ragged([num_tokens]),
        "top_pools": TOP,
        "pool_size": P,
    }


def _peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most memory that `run` holds at once beyond its inputs, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [e for e in prof.events() if e.name == "[memory]"]
    held = itertools.accumulate(e.cpu_memory_usage for e in events)
    return max(held, default=0)


@pytest.mark.slow
def test_a_long_prefill_never_holds_all_scores() -> None:
    num_tokens = 32 * 1024
    args = _long_call(num_tokens)
    with Seen() as seen:
        selected = index.index_select(**args)
    assert selected.shape == (num_tokens, TOP * P + P - 1)
    assert seen.largest < num_tokens * num_tokens // P // 100, "a hundredth of [T, T/4]"
    assert seen.largest <= max(selected.numel() + selected.shape[1], 2 * index.SCORE_ELEMENTS)


def test_peak_memory_of_the_choice_is_bounded_and_does_not_grow() -> None:
    over = []
    for num_tokens in (2048, 8192):
        args = _long_call(num_tokens)
        output = num_tokens * (TOP * P + P - 1) * 5  # int32 and its mask
        over.append(_peak_bytes(lambda args=args: index.index_select(**args)) - output)
    assert max(over) <= 14 * index.SCORE_ELEMENTS * 4
    assert over[1] <= 1.1 * max(over[0], index.SCORE_ELEMENTS)


@pytest.mark.parametrize("run", ("sparse", "dense"))
def test_peak_memory_of_attention_is_bounded(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "GATHER_ELEMENTS", 1 << 15)
    world = World([1200])
    world.select = lambda *call: chosen  # type: ignore[method-assign]
    chosen = torch.arange(800, 1200).repeat(300, 1).int()
    got = _peak_bytes(lambda: getattr(world, run)([0], [900], [300]))
    output = 300 * 3 * 12 * 4 * 2 + sum(w.numel() * 4 for w in world.weights.values())
    rows = 300 * 3 * 16 * 4 * 2 + chosen.numel() * 8  # the test's own copies and int64 positions
    assert got <= output + rows + 6 * 4 * mla.GATHER_ELEMENTS


# a decode step


def test_few_pools_are_never_scored_or_read() -> None:
    n = TOP * P + P - 1
    with Seen() as seen:
        selected = index.index_select(
            torch.full((2, 4, 16), float("nan")), torch.ones(2, 4), torch.empty(0, 4, 16),
            torch.full((2, 3), GARBAGE[1]), torch.tensor([n - 1, 5]), ragged([1, 1]), **SELECT,
        )  # fmt: skip
    assert "bmm" not in seen.ops
    assert selected[0].tolist() == list(range(n))
    assert selected[1].tolist() == [*range(6), *[-1] * (n - 6)]


def _decode_calls(batch: int) -> dict[str, Args]:
    """Return the arguments of every op for one step of `batch` requests."""
    world = World([60 + i for i in range(batch)])
    everyone, known, one = list(range(batch)), [59 + i for i in range(batch)], [1] * batch
    now = [torch.cat([x[-1:] for x in rows]) for rows in (world.query, world.index_query)]
    where = {"block_table": world.table, "computed_tokens": torch.tensor(known)}
    where["cu_seqlens"] = ragged(one)
    attention = {"query": now[0], **world.weights, "cache": world.latents}
    key, tails, slots = torch.zeros(batch, 16), torch.zeros(2, batch, 3, 16), torch.arange(batch)
    return {
        "latent_write": {
            "latent": torch.zeros(batch, 24), "slot_mapping": slots, "cache": world.latents.clone()
        },
        "pool_keys_write": {
            "index_key": key, "gate": key, "ape": torch.zeros(P, 16), "tail_key": tails[0],
            "tail_gate": tails[1], "pool_cache": world.keys.clone(), "state_slots": slots, **where,
        },
        "index_select": {
            "query": now[1], "head_weights": torch.ones(batch, 4), "pool_cache": world.keys,
            **where, **SELECT,
        },
        "sparse_mla_decode": {
            **attention, "block_table": world.table, "selected": world.select(everyone, known, one)
        },
        "dense_mla": {**attention, **where},
    }  # fmt: skip


def test_a_decode_step_takes_as_many_calls_for_many_as_for_a_few() -> None:
    fast = {kernel.op: kernel.run for kernel in KERNELS if kernel.name == "torch"}
    many = _decode_calls(33)
    for op, args in _decode_calls(5).items():
        counts = []
        for batch in (args, many[op]):
            with Seen() as seen:
                fast[op](**batch)
            counts.append(len(seen.ops))
        # a mask more or less, but nothing per row: 28 rows are added
        assert abs(counts[0] - counts[1]) < 14, f"{op}: {counts} calls for 5 and for 33 rows"
