"""Engines for tests: a tiny model, small pools full of NaN, and an independent greedy answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oxplow.cache.plan import exact_plan
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, Event, PromptDone, RequestEnd, TokenOut
from oxplow.engine.options import EngineOptions, MemoryOptions, SchedulerOptions
from oxplow.engine.request import Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.model.network import HybridModel
from oxplow.ops.table import OpTable
from oxplow.trace import EventRing
from tests.drive import Driver

BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

Make = Callable[..., EngineCore]

_ALONE: dict[tuple[int, tuple[int, ...]], list[int]] = {}


def make_core(
    model: HybridModel,
    ops: OpTable,
    *,
    blocks: int = 64,
    slots: int = 4,
    snapshots: int = 6,
    budget: int = 64,
    ring: EventRing | None = None,
    memory: MemoryOptions | None = None,
    revision: str = "revision",
    **settings: object,
) -> EngineCore:
    """Open a core whose pools are NaN everywhere: unused memory must never be read."""
    options = EngineOptions(
        scheduler=SchedulerOptions(
            step_target_s=None, max_prefill_tokens=budget, short_tokens=BLOCK
        ),
        memory=memory
        or MemoryOptions(snapshot_tokens=BLOCK, answer_snapshot_tokens=BLOCK, output_share=0.25),
    )
    if settings:
        options = replace(options, **settings)
    plan = exact_plan(
        trunk_components(model), BLOCK, num_blocks=blocks, num_slots=slots, num_snapshots=snapshots
    )
    core = EngineCore(model, ops, plan, options, revision=revision, ring=ring)
    poison(core)
    return core


def poison(core: EngineCore) -> None:
    """Fill every pool with NaN."""
    caches = core.runner.caches
    for layer in {c.layer for c in caches.components}:
        for pool in caches[layer].values():
            pool.fill_(float("nan"))


def text(seed: int, length: int) -> list[int]:
    """Return random ordinary tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


def alone(model: HybridModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy answer of the test driver, which knows no scheduler and no cache reuse.

    Answers are kept for the session: several tests ask for the same ones.
    """
    key = (id(model), tuple(prompt))
    if len(_ALONE.get(key, ())) < count:
        driver = Driver(model, num_blocks=128)
        _ALONE[key] = driver.greedy("a", driver.step({"a": prompt})["a"][-1], count)
    return _ALONE[key][:count]


def drain(core: EngineCore, limit: int = 3000, check: bool = True) -> list[Event]:
    """Step until nothing is left, checking conservation after every step."""
    events: list[Event] = []
    for _ in range(limit):
        if not core.has_work:
            break
        events += core.step()
        if check:
            core.cache.check()
    assert not core.has_work, "the engine does not come to an end"
    check_told(events)
    return events


def check_told(events: Sequence[Event]) -> None:
    """Check that each request and choice ended once, and nothing was told of it afterwards."""
    ended: set[object] = set()
    for event in events:
        assert event.request_id not in ended, f"{event} after the request's end"
        if isinstance(event, TokenOut | ChoiceEnd):
            assert (event.request_id, event.choice) not in ended, f"{event} after the choice's end"
        if isinstance(event, ChoiceEnd):
            ended.add((event.request_id, event.choice))
        if isinstance(event, RequestEnd):
            ended.add(event.request_id)


def answers(events: Sequence[Event]) -> dict[tuple[str, int], list[int]]:
    """Return each choice's tokens, checking that positions have neither gaps nor repeats."""
    out: dict[tuple[str, int], list[int]] = {}
    for event in events:
        if isinstance(event, TokenOut):
            tokens = out.setdefault((event.request_id, event.choice), [])
            assert event.position == len(tokens), "a gap or a repetition"
            tokens.append(event.token_id)
    return out


def answer(events: Sequence[Event], name: str, choice: int = 0) -> list[int]:
    """Return one choice's tokens."""
    return answers(events).get((name, choice), [])


def end_of(events: Sequence[Event], name: str) -> RequestEnd:
    """Return a request's terminal event."""
    (end,) = [e for e in events if isinstance(e, RequestEnd) and e.request_id == name]
    return end


def choice_end(events: Sequence[Event], name: str, choice: int = 0) -> ChoiceEnd:
    """Return a choice's end."""
    (end,) = [
        e for e in events if isinstance(e, ChoiceEnd) and (e.request_id, e.choice) == (name, choice)
    ]
    return end


def prompt_of(events: Sequence[Event], name: str) -> PromptDone:
    """Return what was told of a request's prompt."""
    (done,) = [e for e in events if isinstance(e, PromptDone) and e.request_id == name]
    return done


def ask(
    core: EngineCore, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: object
) -> list[Event]:
    """Run one request alone to its end; its id is "a" unless given."""
    core.add(Request(**{"request_id": "a", "prompt_ids": prompt, "params": params} | more))
    return drain(core)


def assert_all_free(core: EngineCore) -> None:
    """Check that nobody holds anything."""
    core.cache.check()
    stats = core.stats()
    assert stats.blocks_held == stats.slots_held == stats.swapped_bytes == 0
    assert stats.running == stats.waiting == 0
    assert len(core.book) == 0
