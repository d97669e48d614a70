"""The core: right tokens, one forward a step, one end for each request, nothing leaked."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oxplow.engine.events import PromptDone, RequestEnd, TokenOut
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import FinishReason, Request, RequestStatus, SamplingParams
from oxplow.errors import CapacityError, RequestError
from oxplow.model.network import HybridModel
from oxplow.trace import EventRing, EventType
from tests.engine.build import (
    BLOCK,
    GREEDY,
    Make,
    alone,
    answer,
    answers,
    ask,
    assert_all_free,
    choice_end,
    drain,
    end_of,
    prompt_of,
    text,
)

LENGTHS = (1, 2, 5, 15, 16, 17, 33, 70, 100)


@pytest.fixture(scope="module")
def expected(model: HybridModel) -> dict[int, list[int]]:
    """Return the driver's answer to `text(n, n)` for every length."""
    return {n: alone(model, text(n, n), 12) for n in LENGTHS}


@pytest.mark.parametrize("budget", [5, 16, 64, 512])
def test_greedy_equals_the_driver_whatever_the_steps(
    make: Make, expected: dict[int, list[int]], budget: int
) -> None:
    core = make(budget=budget)
    for n in LENGTHS:
        core.add(Request(request_id=f"{n}", prompt_ids=text(n, n), params=GREEDY))
    got = answers(drain(core))
    assert {n: got[f"{n}", 0] for n in LENGTHS} == expected
    assert_all_free(core)


def test_a_step_runs_one_forward_for_all_rows(
    make: Make, model: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(slots=8, budget=48)
    calls: list[int] = []
    forward = HybridModel.forward

    def counted(self: HybridModel, step: object, *rest: object) -> object:
        calls.append(step.token_ids.shape[0])
        return forward(self, step, *rest)

    monkeypatch.setattr(HybridModel, "forward", counted)
    for n in (5, 20, 40, 60, 33):
        core.add(Request(request_id=f"{n}", prompt_ids=text(n, n), params=GREEDY))
    for number in range(1, 500):
        if not core.has_work:
            break
        core.step()
        assert len(calls) <= number
    assert len(calls) == core.stats().steps
    assert max(calls) > 40, "several requests shared a step"


def test_events_come_in_order_and_end_once(make: Make) -> None:
    core = make()
    events = ask(core, text(1, 20))
    kinds = [type(e).__name__ for e in events]
    assert kinds == ["PromptDone", *["TokenOut"] * 12, "ChoiceEnd", "RequestEnd"]
    end = end_of(events, "a")
    assert (end.status, end.prompt_tokens, end.answer_tokens) == (RequestStatus.FINISHED, 20, 12)
    assert choice_end(events, "a").reason is FinishReason.LENGTH
    assert not core.step()


@settings(
    max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(before=st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_abort_at_any_point_frees_everything_and_harms_nobody(
    make: Make, expected: dict[int, list[int]], before: list[int]
) -> None:
    core = make(slots=3, budget=16)
    for n in (100, 33, 17, 70):
        core.add(Request(request_id=f"{n}", prompt_ids=text(n, n), params=GREEDY))
    events = []
    steps = dict(zip(("100", "33", "17"), before, strict=False))
    for now in range(13):
        for name, when in steps.items():
            if when == now:
                core.abort(name)
                core.cache.check()
        events += core.step()
        core.cache.check()
    events += drain(core)
    assert answer(events, "70") == expected[70]
    for n in (100, 33, 17):
        got = answer(events, f"{n}")
        assert got == expected[n][: len(got)]
        assert end_of(events, f"{n}").status in (RequestStatus.ABORTED, RequestStatus.FINISHED)
    assert_all_free(core)


def test_abort_of_the_unknown_and_the_ended_says_so(make: Make) -> None:
    core = make()
    assert not core.abort("nobody")
    ask(core, text(1, 3))
    assert not core.abort("a")


def test_cancelled_work_stops_within_one_step(make: Make) -> None:
    core = make(budget=16)
    core.add(Request(request_id="a", prompt_ids=text(1, 300), params=GREEDY))
    core.step()
    before = core.stats().prefill_tokens
    core.abort("a")
    assert core.stats().blocks_held == 0, "memory is free at once"
    events = core.step()
    assert [type(e).__name__ for e in events] == ["ChoiceEnd", "RequestEnd"]
    assert core.stats().prefill_tokens == before


def test_a_stop_text_seen_by_the_front_ends_a_choice_as_finished(make: Make) -> None:
    core = make()
    core.add(Request(request_id="a", prompt_ids=text(1, 5), params=GREEDY))
    for _ in range(3):
        core.step()
    assert core.stop("a", 0)
    assert not core.stop("a", 0)
    events = drain(core)
    assert choice_end(events, "a").reason is FinishReason.STOP
    assert end_of(events, "a").status is RequestStatus.FINISHED


# P12: cancelled while queued.


def test_requests_cancelled_in_the_queue_leak_no_slot(make: Make) -> None:
    core = make(slots=2)
    for i in range(30):
        core.add(Request(request_id=f"{i}", prompt_ids=text(i, 40), params=GREEDY))
    events = core.step()
    for i in range(30):
        if i % 3:
            core.abort(f"{i}")
            core.cache.check()
    events += drain(core)
    ends = [e for e in events if isinstance(e, RequestEnd)]
    assert len(ends) == 30
    assert_all_free(core)


def test_a_full_queue_refuses_and_a_long_wait_fails(make: Make) -> None:
    now = [0.0]
    core = make(slots=1, max_waiting=2, queue_timeout_s=5.0)
    core._clock = lambda: now[0]
    core.add(Request(request_id="0", prompt_ids=text(0, 10), params=GREEDY))
    core.step()
    for i in (1, 2):
        core.add(Request(request_id=f"{i}", prompt_ids=text(i, 10), params=GREEDY))
    with pytest.raises(CapacityError, match="queue is full") as refused:
        core.add(Request(request_id="3", prompt_ids=text(3, 10), params=GREEDY))
    assert refused.value.where == "queue"
    now[0] = 6.0
    events = core.step()
    assert {e.request_id for e in events if isinstance(e, RequestEnd)} == {"1", "2"}
    assert end_of(events, "1").status is RequestStatus.FAILED
    assert "5.0 s in the queue" in end_of(events, "1").message
    assert end_of(drain(core), "0").status is RequestStatus.FINISHED
    assert_all_free(core)


def test_too_many_queued_prompt_tokens_are_refused(make: Make) -> None:
    core = make(slots=1, max_waiting_tokens=100)
    core.add(Request(request_id="0", prompt_ids=text(0, 60), params=GREEDY))
    with pytest.raises(CapacityError, match="prompt tokens are queued"):
        core.add(Request(request_id="1", prompt_ids=text(1, 60), params=GREEDY))
    drain(core)


# P14: near the memory limit.


@pytest.mark.parametrize("swap_min_tokens", [1, 10**9], ids=["swapped", "recomputed"])
def test_preempted_requests_go_on_with_the_same_tokens(
    make: Make, model: HybridModel, swap_min_tokens: int
) -> None:
    core = make(
        blocks=8,
        slots=4,
        snapshots=2,
        memory=MemoryOptions(
            output_share=0.0,
            swap_min_tokens=swap_min_tokens,
            snapshot_tokens=BLOCK,
            answer_snapshot_tokens=BLOCK,
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    prompts = {f"{i}": text(50 + i, 30) for i in range(4)}
    for name, prompt in prompts.items():
        core.add(Request(request_id=name, prompt_ids=prompt, params=params))
    events = drain(core)
    assert core.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert answer(events, name) == alone(model, prompt, 36), name
    assert sum(end_of(events, n).num_preemptions for n in prompts) == core.stats().preemptions
    assert core.stats().prefill_tokens <= 3 * sum(len(p) + 36 for p in prompts.values())
    assert_all_free(core)


def test_swapping_computes_no_token_twice(make: Make) -> None:
    core = make(blocks=8, slots=4, memory=MemoryOptions(output_share=0.0, swap_min_tokens=1))
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    for i in range(4):
        core.add(Request(request_id=f"{i}", prompt_ids=text(50 + i, 30), params=params))
    drain(core)
    assert core.stats().preemptions > 0
    assert core.stats().prefill_tokens == 4 * 30


def test_without_host_memory_a_preempted_request_is_recomputed(
    make: Make, model: HybridModel
) -> None:
    memory = MemoryOptions(output_share=0.0, swap_min_tokens=1, swap_bytes=0)
    core = make(blocks=8, slots=4, snapshots=0, memory=memory)
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
    for i in range(3):
        core.add(Request(request_id=f"{i}", prompt_ids=text(50 + i, 30), params=params))
    events = drain(core)
    assert core.stats().preemptions > 0
    assert core.stats().prefill_tokens > 3 * 30
    assert answer(events, "2") == alone(model, text(52, 30), 36)


@pytest.mark.parametrize("length", [980, 991, 992])
def test_prompts_up_to_the_pool_finish(make: Make, length: int) -> None:
    core = make(blocks=62, snapshots=2, budget=256)  # 992 tokens
    params = SamplingParams(temperature=0, max_tokens=992 - length, ignore_eos=True)
    if length == 992:
        with pytest.raises(RequestError, match="maximum context length is 992"):
            ask(core, text(1, length), params)
        return
    events = ask(core, text(1, length), params)
    assert len(answer(events, "a")) == 992 - length
    assert core.stats().prefill_tokens == length
    assert choice_end(events, "a").reason is FinishReason.LENGTH


# P15: budgets.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "answered"),
    [
        (10, 0, 0),
        (10, 1, 1),
        (10, 54, 54),
        (10, 55, None),
        (10, 10**9, None),
        (63, 1, 1),
        (63, None, 1),
        (60, None, 4),
        (64, None, None),
        (64, 0, None),
        (65, 1, None),
    ],
)
def test_token_budgets(
    make: Make, prompt: int, max_tokens: int | None, answered: int | None
) -> None:
    core = make(blocks=4)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if answered is None:
        with pytest.raises(RequestError) as refused:
            ask(core, text(1, prompt), params)
        assert refused.value.code == "context_length_exceeded"
        assert "64" in str(refused.value)
        assert str(prompt) in str(refused.value)
        assert_all_free(core)
    else:
        events = ask(core, text(1, prompt), params)
        assert len(answer(events, "a")) == answered
        assert choice_end(events, "a").reason is FinishReason.LENGTH
        assert end_of(events, "a").answer_tokens == answered
    assert len(answer(ask(core, text(2, 5)), "a")) == 12, "a normal request works after it"


@pytest.mark.parametrize("max_tokens", [-1])
def test_negative_budgets_are_refused(max_tokens: int) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(max_tokens=max_tokens)
    assert refused.value.param == "max_tokens"


def test_impossible_requests_change_nothing(make: Make) -> None:
    core = make()
    bad = [
        {"prompt_ids": []},
        {"prompt_ids": [5, 320]},
        {"prompt_ids": [-1]},
        {"prompt_ids": [1], "params": SamplingParams(logit_bias={320: 1.0})},
        {"prompt_ids": [1], "params": SamplingParams(stop_token_ids=(999,))},
    ]
    for fields in bad:
        with pytest.raises(RequestError):
            core.add(Request(**{"request_id": "a"} | fields))
    assert not core.has_work
    core.add(Request(request_id="a", prompt_ids=[1], params=GREEDY))
    with pytest.raises(RequestError, match="in use"):
        core.add(Request(request_id="a", prompt_ids=[1], params=GREEDY))
    drain(core)


def test_a_long_prompt_does_not_stop_its_neighbours(make: Make) -> None:
    core = make(blocks=200, budget=64, snapshots=0)
    core.add(Request(request_id="long", prompt_ids=text(1, 3000), params=GREEDY))
    core.step()
    core.add(Request(request_id="short", prompt_ids=text(2, 10), params=GREEDY))
    steps = 0
    events = []
    while not any(isinstance(e, RequestEnd) and e.request_id == "short" for e in events):
        events += core.step()
        steps += 1
    assert steps <= 14, "the short request ran through while the long prompt was computed"
    assert not any(isinstance(e, PromptDone) and e.request_id == "long" for e in events)
    assert len(answer(drain(core), "long")) == 12


def test_trace_tells_the_life_of_a_request(make: Make) -> None:
    ring = EventRing(4096)
    core = make(ring=ring)
    ask(core, text(1, 40))
    ask(core, text(1, 40))
    kinds = [e.kind for e in ring.snapshot().events]
    for kind in (
        EventType.REQUEST_ACCEPTED,
        EventType.REQUEST_SCHEDULED,
        EventType.ENGINE_STEP,
        EventType.SLOT_ALLOC,
        EventType.BLOCK_ALLOC,
        EventType.STATE_SNAPSHOT,
        EventType.BLOCK_REUSE,
        EventType.STATE_RESTORE,
        EventType.BLOCK_FREE,
        EventType.SLOT_FREE,
        EventType.REQUEST_FINISHED,
    ):
        assert kind in kinds, kind
    assert kinds.count(EventType.SLOT_ALLOC) == kinds.count(EventType.SLOT_FREE) == 2
    assert kinds.count(EventType.ENGINE_STEP) == 2 * core.stats().steps


def test_usage_adds_up(make: Make) -> None:
    core = make()
    for n in (5, 40):
        core.add(Request(request_id=f"{n}", prompt_ids=text(n, n), params=GREEDY))
    events = drain(core)
    stats = core.stats()
    assert stats.accepted == 2
    assert stats.ended[RequestStatus.FINISHED] == 2
    assert stats.prompt_tokens == 45
    assert stats.answer_tokens == sum(isinstance(e, TokenOut) for e in events) == 24
    assert prompt_of(events, "40").prompt_tokens == 40


def test_planned_bytes_are_the_allocated_ones(make: Make) -> None:
    core = make(blocks=20, slots=3, snapshots=5)
    assert core.runner.caches.nbytes == core.plan.total_bytes


def test_an_answer_without_a_limit_does_not_reserve_the_whole_pool(make: Make) -> None:
    core = make(
        blocks=64, slots=4, memory=MemoryOptions(output_share=0.5, max_reserve_tokens=2 * BLOCK)
    )
    endless = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(4):
        core.add(Request(request_id=f"{i}", prompt_ids=text(i, 8), params=endless))
    core.step()
    assert core.stats().running == 4
    for i in range(4):
        core.abort(f"{i}")
    drain(core)
