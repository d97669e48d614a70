"""The batch builder lays a step out exactly as the model's own builder does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oxplow.cache.blocks import BlockId, SlotId
from oxplow.cache.manager import Holding
from oxplow.cache.plan import CachePlan
from oxplow.cache.prefix import KeyChain, PictureSpan, root_key
from oxplow.engine.batch import BatchBuilder
from oxplow.engine.request import Choice, Picture, Request, SamplingParams
from oxplow.engine.steps import Scheduled, StepPlan
from oxplow.errors import ContractError
from oxplow.model.step import Rows, SequenceRows, StepInput, build_step

BLOCK = 4
CPU = torch.device("cpu")
PLAN = CachePlan(
    block_size=BLOCK,
    num_blocks=64,
    num_slots=6,
    num_snapshots=0,
    block_bytes=1,
    slot_bytes=1,
    max_model_len=40,
)


def builder() -> BatchBuilder:
    return BatchBuilder(PLAN, CPU, lambda picture: picture.rows)


def choice_of(name: str, tokens: list[int], **more: object) -> Choice:
    chain = KeyChain(root_key(revision="r", layout="l"), BLOCK)
    request = Request(**{"request_id": name, "prompt_ids": tokens} | more)
    return Choice(request, 0, seed=0, max_len=40, chain=chain)


def same_rows(got: Rows | None, wanted: Rows | None) -> None:
    assert (got is None) == (wanted is None)
    if got is None or wanted is None:
        return
    assert (got.start, got.stop, got.max_context) == (wanted.start, wanted.stop, wanted.max_context)
    for name in ("cu_seqlens", "computed_tokens", "state_slots", "has_state"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    # Only blocks that the rows can see are compared: the table is cut at the longest context.
    for i, context in enumerate((got.computed_tokens + got.cu_seqlens.diff()).tolist()):
        used = -(-context // BLOCK)
        assert torch.equal(got.block_table[i, :used], wanted.block_table[i, :used])


def same(got: StepInput, wanted: StepInput) -> None:
    for name in ("token_ids", "slot_mapping", "logit_rows"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    for name in ("all_rows", "decode", "prefill"):
        same_rows(getattr(got, name), getattr(wanted, name))


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=6),
    again=st.lists(st.integers(1, 5), min_size=6, max_size=6),
)
def test_equals_the_models_builder_over_steps(
    rows: list[tuple[int, int]], again: list[int]
) -> None:
    build = builder()
    free = [BlockId(b) for b in np.random.default_rng(0).permutation(64).tolist()]
    entries, holdings, described = [], {}, []
    rows = sorted(rows, key=lambda r: not (r[0] > 0 and r[1] == 1))
    starts = [start for start, _ in rows]
    for turn in range(2):
        entries.clear()
        described.clear()
        for i, (_, first) in enumerate(rows):
            start, stop = starts[i], starts[i] + (again[i] if turn else first)
            owner = f"{i}"
            if not turn:
                holdings[f"{owner}#0"] = Holding(SlotId(5 - i), [], 0)
            holding = holdings[f"{owner}#0"]
            while len(holding.block_ids) * BLOCK < stop:
                holding.block_ids.append(free.pop())
            choice = choice_of(owner, list(range(100 * i, 100 * i + stop)))
            entries.append(Scheduled(choice, start, stop))
            described.append(
                SequenceRows(
                    token_ids=choice.token_ids[start:stop],
                    computed_tokens=start,
                    slot=int(holding.slot),
                    block_ids=list(holding.block_ids),
                )
            )
            starts[i] = stop
        order = sorted(range(len(entries)), key=lambda i: not entries[i].is_decode)
        plan = StepPlan(rows=[entries[i] for i in order])
        got = build.build(plan, holdings).step
        wanted = build_step([described[i] for i in order], block_size=BLOCK, device=CPU)
        same(got, wanted)


def test_a_slot_with_a_new_holder_gets_a_new_table() -> None:
    build = builder()
    choice = choice_of("a", [1, 2, 3, 4, 5])
    for blocks in ([7, 9], [3, 1]):
        holding = Holding(SlotId(0), [BlockId(b) for b in blocks], 0)
        batch = build.build(StepPlan(rows=[Scheduled(choice, 0, 5)]), {"a#0": holding})
        assert batch.step.all_rows.block_table[0].tolist() == blocks


def test_encoder_rows_land_on_their_positions_whatever_the_split() -> None:
    rows = torch.arange(12.0).view(6, 2)
    picture = Picture(span=PictureSpan(3, 6, "x"), rows=rows)
    choice = choice_of("b", [0] * 12, pictures=(picture,))
    other = choice_of("a", [0] * 4)
    holdings = {
        "a#0": Holding(SlotId(1), [BlockId(9)], 0),
        "b#0": Holding(SlotId(0), [BlockId(0), BlockId(1), BlockId(2)], 0),
    }
    for cut in range(1, 12):
        seen: dict[int, Tensor] = {}
        for start, stop in ((0, cut), (cut, 12)):
            entries = [Scheduled(other, 0, 4), Scheduled(choice, start, stop)]
            entries.sort(key=lambda e: not e.is_decode)
            step = builder().build(StepPlan(rows=entries), holdings).step
            first = 0 if entries[0].choice is choice else 4
            if step.embeds is None:
                assert stop <= 3 or start >= 9
                continue
            for row, value in zip(step.embeds.rows.tolist(), step.embeds.values, strict=True):
                seen[row - first + start] = value
        assert sorted(seen) == [3, 4, 5, 6, 7, 8]
        assert torch.equal(torch.stack([seen[p] for p in sorted(seen)]), rows)


def test_wrong_plans_are_refused() -> None:
    choice, other = choice_of("a", [1] * 9), choice_of("b", [1] * 3)
    holdings = {
        "a#0": Holding(SlotId(0), [BlockId(0), BlockId(1)], 0),
        "b#0": Holding(SlotId(0), [BlockId(2)], 0),
    }
    with pytest.raises(ContractError, match="too few cache blocks"):
        builder().build(StepPlan(rows=[Scheduled(choice, 0, 9)]), holdings)
    with pytest.raises(ContractError, match="twice"):
        builder().build(StepPlan(rows=[Scheduled(choice, 0, 4), Scheduled(other, 0, 3)]), holdings)
    with pytest.raises(ContractError, match="before prefill"):
        builder().build(StepPlan(rows=[Scheduled(other, 0, 3), Scheduled(choice, 7, 8)]), holdings)


def test_rows_of_logits_say_what_they_are_for() -> None:
    wants = SamplingParams(prompt_logprobs=2)
    choice = choice_of("a", [5, 6, 7, 8, 9], params=wants)
    plain = choice_of("b", [5, 6, 7, 8, 9])
    holdings = {
        "a#0": Holding(SlotId(0), [BlockId(0), BlockId(1)], 0),
        "b#0": Holding(SlotId(1), [BlockId(2), BlockId(3)], 0),
    }
    entries = [Scheduled(choice, 1, 5), Scheduled(plain, 0, 3)]
    first, second = builder().build(StepPlan(rows=entries), holdings).logit_rows
    assert [(r.position, r.target, r.draws) for r in first] == [
        (2, 7, False),
        (3, 8, False),
        (4, 9, False),
        (5, None, True),
    ]
    assert [(r.position, r.draws) for r in second] == [(3, False)]
