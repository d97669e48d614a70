"""Prefix reuse: a hit equals a miss, hits are near the ideal, tenants stay apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oxplow.engine.core import EngineCore
from oxplow.engine.events import TokenOut
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import Request, SamplingParams
from tests.engine.build import (
    BLOCK,
    GREEDY,
    Make,
    alone,
    answer,
    ask,
    drain,
    prompt_of,
    text,
)

SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
LOGPROB_GAP = 1e-4  # float32 over two chunk layouts; the field report allows 0.05


def run(
    core: EngineCore, prompt: Sequence[int], params: SamplingParams = SCORED, **more: object
) -> tuple[list[int], list[float], int]:
    """Return an answer, its log-probabilities and the prompt's cached tokens."""
    events = ask(core, prompt, params, **more)
    scores = [
        e.logprob.logprob for e in events if isinstance(e, TokenOut) and e.logprob is not None
    ]
    return answer(events, "a"), scores, prompt_of(events, "a").cached_tokens


def assert_hit_equals_miss(core: EngineCore, make: Make, prompt: Sequence[int]) -> int:
    """Ask with and without a cache; return the hit tokens."""
    tokens, scores, cached = run(core, prompt)
    other, others, none = run(make(), prompt)
    assert none == 0
    assert tokens == other
    assert scores == pytest.approx(others, abs=LOGPROB_GAP)
    return cached


def test_a_repeated_prompt_hits_to_its_last_whole_block(make: Make) -> None:
    core = make()
    prompt = text(1, 100)
    assert run(core, prompt)[2] == 0
    assert assert_hit_equals_miss(core, make, prompt) == 96
    assert core.stats().prefix_hit_tokens == 96


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(make: Make) -> None:
    core = make()
    prompt = text(1, 96)
    run(core, prompt)
    assert assert_hit_equals_miss(core, make, prompt) == 80


def test_a_rewound_chat_hits_up_to_the_edit(make: Make) -> None:
    core = make()
    prompt = text(1, 100)
    run(core, prompt)
    assert assert_hit_equals_miss(core, make, [*prompt[:-1], (prompt[-1] + 1) % 250]) == 96


def ideal(prompt: Sequence[int], before: Sequence[Sequence[int]]) -> int:
    """Tokens that a cache with a state at every block could reuse."""
    best = 0
    for other in before:
        common = 0
        while common < min(len(prompt), len(other)) and prompt[common] == other[common]:
            common += 1
        best = max(best, min(common, len(prompt) - 1) // BLOCK * BLOCK)
    return best


def hit_share(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Ask one after the other; return hit tokens over ideal ones."""
    known: list[list[int]] = []
    hits = wanted = 0
    for prompt in prompts:
        tokens, _, cached = run(core, prompt, params)
        wanted += ideal(prompt, known)
        hits += cached
        known.append([*prompt, *tokens[:-1]])
    return hits / wanted


def test_five_branches_off_one_prompt(make: Make) -> None:
    stem = text(1, 200)
    branches = [[*stem, *text(10 + i, 30)] for i in range(5)]
    core = make(blocks=128, snapshots=8)
    assert hit_share(core, branches, SCORED) >= 0.8
    core = make(blocks=128, snapshots=8)
    run(core, stem)
    for branch in branches:
        assert assert_hit_equals_miss(core, make, branch) >= 0.8 * 200


def test_where_a_second_text_left_the_first_a_third_starts(make: Make) -> None:
    memory = MemoryOptions(snapshot_tokens=10**6)  # no regular snapshots: only the branch point
    core = make(memory=memory, budget=256)
    stem = text(1, 100)
    branches = [[*stem, *text(10 + i, 30)] for i in range(3)]
    assert run(core, branches[0])[2] == 0
    events = ask(core, branches[1], SCORED)
    assert prompt_of(events, "a").miss == "no_snapshot"
    assert assert_hit_equals_miss(core, make, branches[2]) == 96


@pytest.mark.parametrize("edit", [0.3, 0.5, 0.9])
def test_an_edited_middle(make: Make, edit: float) -> None:
    base = text(1, 400)
    at = int(400 * edit)
    edited = [[*base[:at], *text(30 + i, 20), *base[at + 20 :]] for i in range(4)]
    core = make(blocks=256, snapshots=16)
    assert hit_share(core, [base, *edited], SCORED) >= 0.8


def test_twenty_turns(make: Make) -> None:
    core = make(blocks=256, snapshots=8, budget=256)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    chat: list[int] = text(1, 50)
    known: list[list[int]] = []
    hits = wanted = 0
    for turn in range(20):
        tokens, _, cached = run(core, chat, params)
        wanted += ideal(chat, known)
        hits += cached
        known.append([*chat, *tokens[:-1]])
        chat = [*chat, *tokens, *text(100 + turn, 29)]
    assert hits >= 0.8 * wanted


def test_a_long_answer_can_be_continued_without_its_prefill(make: Make) -> None:
    core = make()
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    prompt = text(1, 20)
    tokens, _, _ = run(core, prompt, params)
    chat = [*prompt, *tokens, *text(5, 10)]
    assert assert_hit_equals_miss(core, make, chat) == 80


def test_tenants_share_only_under_their_own_salt(make: Make) -> None:
    core = make()
    prompt = text(1, 60)
    run(core, prompt, salt="left")
    assert run(core, prompt, salt="right")[2] == 0
    assert run(core, prompt)[2] == 0
    assert run(core, prompt, salt="left")[2] == 48


def test_a_request_can_refuse_reuse_and_the_reason_is_told(make: Make) -> None:
    core = make()
    prompt = text(1, 60)
    events = ask(core, prompt)
    assert prompt_of(events, "a").miss == "cold"
    events = ask(core, prompt, reuse_prefix=False)
    assert (prompt_of(events, "a").cached_tokens, prompt_of(events, "a").miss) == (
        0,
        "switched_off",
    )
    events = ask(core, prompt)
    assert prompt_of(events, "a").miss == "none"


def test_without_snapshots_nothing_is_reused_and_all_is_right(make: Make) -> None:
    core = make(snapshots=0)
    prompt = text(1, 60)
    first = run(core, prompt)
    assert run(core, prompt) == first
    assert core.stats().blocks_idle == 0


def test_a_lost_snapshot_is_a_miss_and_never_a_wrong_state(make: Make) -> None:
    core = make()
    prompt = text(1, 100)
    run(core, prompt)
    for key in core.cache.snapshots.keys():  # noqa: SIM118 - a method of the pool
        core.cache.snapshots.drop(key)
    events = ask(core, prompt, SCORED)
    assert prompt_of(events, "a").cached_tokens == 0
    assert prompt_of(events, "a").miss == "no_snapshot"
    assert core.stats().prefix_lost_tokens == 96
    assert assert_hit_equals_miss(core, make, prompt) == 96, "the branch point was kept"


def test_many_prompts_through_a_small_pool_stay_right(make: Make, model: object) -> None:
    memory = MemoryOptions(output_share=0.25, snapshot_tokens=BLOCK, answer_snapshot_tokens=BLOCK)
    core = make(blocks=16, slots=3, snapshots=6, memory=memory)
    prompts = [[*text(i % 3, 40), *text(i % 5, 30)] for i in range(9)]
    for i, prompt in enumerate(prompts):
        core.add(Request(request_id=f"{i}", prompt_ids=prompt, params=GREEDY))
    events = drain(core)
    known = {tuple(p): alone(model, p, 12) for p in prompts}
    for i, prompt in enumerate(prompts):
        assert answer(events, f"{i}") == known[tuple(prompt)]
    assert core.stats().prefix_hit_tokens > 0
