"""One checkpoint as arms of a comparison: kernels, settings and hooks that differ, all else equal.

Owns the opening, the switch between kernels and the timing of an engine's phases. Knows the engine
as a library; `oxplow.feedback.attribute` and `load` judge. Invariant: all arms share one set of
weights; each run has a fresh core and empty caches; what is not told as a part is left as residual.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oxplow.cache.plan import exact_plan
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, PromptDone, TokenOut
from oxplow.engine.options import EngineOptions, MemoryOptions, SchedulerOptions
from oxplow.engine.request import FinishReason, Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.feedback.attribute import Breakdown, Measured, clocked_table
from oxplow.feedback.live import observed_table
from oxplow.feedback.load import Arrival, Felt, Trace
from oxplow.model.load import LoadOptions, load_model
from oxplow.serve.kernel_choice import plain_kernels

__all__ = ["WORK", "ArmSpec", "SpeedArms"]

_BLOCK = 16
WORK: Mapping[str, Trace] = {
    "ttft": tuple(Arrival(at_s=0.0, prompt_tokens=96, new_tokens=1) for _ in range(4)),
    "throughput": tuple(Arrival(at_s=0.0, prompt_tokens=16, new_tokens=12) for _ in range(6)),
    "itl": (Arrival(at_s=0.0, prompt_tokens=16, new_tokens=24),),
}
"""The work that shows each symptom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """How an arm differs: `kernels` by op (name and callable), settings, and what is done to it."""

    kernels: Mapping[str, tuple[str, Callable[..., Any]]] = field(default_factory=dict)
    scheduler: SchedulerOptions | None = None
    tamper: Callable[[EngineCore], None] = lambda core: None
    reuse_prefix: bool = True


class _Timed:
    """A method in whose place calls are timed."""

    def __init__(
        self, call: Callable[..., Any], inner: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._call, self._inner, self._now = call, inner, now
        self.seconds = self.inside = 0.0

    def __call__(self, *positional: Any) -> Any:
        before, began = self._inner(), self._now()
        result = self._call(*positional)
        self.seconds += self._now() - began
        self.inside += self._inner() - before
        return result


class _Model:
    """The model with another `forward`."""

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        self._model, self.forward = model, forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class SpeedArms:
    """A checkpoint, opened once, whose kernels can be exchanged from run to run."""

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Open the checkpoint. `clock` times `measured`: on one CPU thread `time.thread_time` sees
        nothing of other processes, and nothing of waiting either.
        """
        self._now = clock
        chosen = plain_kernels(device, dtype=dtype)
        self._plain = {op: kernel.run for op, kernel in chosen.kernels.items()}
        self._names = {op: kernel.name for op, kernel in chosen.kernels.items()}
        self._current = dict(self._plain)
        switched = observed_table(chosen, lambda op, _: self._switch(op))
        self.table, self.clock = clocked_table(switched, clock)
        load = LoadOptions(block_size=_BLOCK, with_vision=False, with_draft=False)
        self.model = load_model(directory, self.table, load)
        self._vocab = min(256, self.model.spec.text.vocab_size)

    def measured(self, spec: ArmSpec, work: Trace) -> Measured:
        """Return the arm as a callable that does `work` and breaks its time down."""

        def once(seed: int) -> Breakdown:
            self._take(spec)
            core = self._core(spec, work)
            return self._broken_down(core, spec, work, seed)

        return once

    def ablated(self, spec: ArmSpec, work: Trace, part: str) -> Measured | None:
        """Return the arm with one op as it is in the plain arm; None for any other part."""
        kind, _, op = part.partition(":")
        if kind != "op" or op not in spec.kernels:
            return None
        rest = {name: kernel for name, kernel in spec.kernels.items() if name != op}
        return self.measured(replace(spec, kernels=rest), work)

    def serve(self, spec: ArmSpec, trace: Trace, seed: int) -> list[Felt]:
        """Serve a trace as it arrives, by the clock; requests come to a fresh core."""
        self._take(spec)
        core = self._core(spec, trace)
        requests = self._requests(trace, seed, spec.reuse_prefix)
        seen = [_Seen(a) for a in trace]
        began = time.perf_counter()
        waiting = sorted(range(len(trace)), key=lambda i: trace[i].at_s)
        while waiting or core.has_work:
            now = time.perf_counter() - began
            while waiting and trace[waiting[0]].at_s <= now:
                core.add(requests[waiting.pop(0)])
            if core.has_work:
                self._step(core, seen, began)
            else:
                time.sleep(min(0.002, trace[waiting[0]].at_s - now))
        return [s.felt() for s in seen]

    def _step(self, core: EngineCore, seen: Sequence[_Seen], began: float) -> None:
        start = time.perf_counter() - began
        events = core.step()
        now = time.perf_counter() - began
        for choice in core.scheduler.running:
            seen[int(choice.request.request_id)].started(start)
        for event in events:
            one = seen[int(event.request_id)]
            one.started(start)
            match event:
                case TokenOut():
                    one.tokens.append(now)
                case PromptDone():
                    one.cached = event.cached_tokens
                case ChoiceEnd():
                    if event.reason is FinishReason.FAILED:
                        one.failure = event.message or "failed"
                case _:
                    pass

    def _broken_down(self, core: EngineCore, spec: ArmSpec, work: Trace, seed: int) -> Breakdown:
        now = self._now
        ops = partial(getattr, self.clock, "total_s")
        build = _Timed(core.runner.batches.build, ops, now)
        forward = _Timed(core.runner.model.forward, ops, now)
        draw = _Timed(core.runner.sampler.draw, ops, now)
        core.runner.batches.build = build  # type: ignore[method-assign, assignment]
        core.runner.model = _Model(core.runner.model, forward)  # type: ignore[assignment]
        core.runner.sampler.draw = draw  # type: ignore[method-assign, assignment]
        spec.tamper(core)
        requests = self._requests(work, seed, spec.reuse_prefix)
        self.clock.reset()
        stepping, idle, steps = 0.0, 0.0, 0
        began = now()
        for request in requests:
            core.add(request)
        while core.has_work:
            steps_before, start = core.counters.steps, now()
            core.step()
            taken = now() - start
            if core.counters.steps == steps_before:
                idle += taken
            else:
                stepping += taken
                steps += 1
        total = now() - began
        parts = {f"op:{op}": seconds for op, seconds in self.clock.seconds.items()}
        named = build.seconds + forward.seconds + draw.seconds
        parts |= {
            "batch": build.seconds - build.inside,
            "forward": forward.seconds - forward.inside,
            "sampling": draw.seconds - draw.inside,
            "bookkeeping": stepping - named,
            "queue": idle,
            "gap": total - stepping - idle,
        }
        counts = {f"calls:{op}": n for op, n in self.clock.calls.items()} | {"steps": steps}
        names = self._names | {op: name for op, (name, _) in spec.kernels.items()}
        return Breakdown(
            total_s=total, parts=parts, counts=counts, kernels=names, errors=dict(self.clock.errors)
        )

    def _switch(self, op: str) -> Callable[..., Any]:
        current = self._current

        def switched(*positional: Any, **named: Any) -> Any:
            given = dict(named)  # an op's own names: the kernel refuses what it does not know
            return current[op](*positional, **given)

        return switched

    def _take(self, spec: ArmSpec) -> None:
        self._current.update(self._plain)
        self._current.update({op: run for op, (_, run) in spec.kernels.items()})

    def _core(self, spec: ArmSpec, work: Trace) -> EngineCore:
        longest = max(a.prompt_tokens + a.new_tokens for a in work)
        slots = min(16, len(work))
        plan = exact_plan(
            trunk_components(self.model), _BLOCK,
            num_blocks=(slots + 2) * (-(-longest // _BLOCK) + 1), num_slots=slots, num_snapshots=8,
        )  # fmt: skip
        schedule = spec.scheduler or SchedulerOptions(step_target_s=None, max_prefill_tokens=256)
        memory = MemoryOptions(snapshot_tokens=_BLOCK)
        options = EngineOptions(scheduler=schedule, memory=memory)
        return EngineCore(self.model, self.table, plan, options, revision="speed")

    def _requests(self, work: Trace, seed: int, reuse: bool) -> list[Request]:
        return [
            Request(
                request_id=str(number),
                prompt_ids=self._prompt(arrival, number, seed),
                params=SamplingParams(
                    temperature=0.0, max_tokens=arrival.new_tokens, ignore_eos=True
                ),
                reuse_prefix=reuse,
            )
            for number, arrival in enumerate(work)
        ]

    def _prompt(self, arrival: Arrival, number: int, seed: int) -> list[int]:
        head, tail = random.Random(f"{seed}/{arrival.group}"), random.Random(f"{seed}#{number}")
        shared = min(arrival.shared_tokens, arrival.prompt_tokens)
        start = [head.randrange(self._vocab) for _ in range(shared)]
        return start + [tail.randrange(self._vocab) for _ in range(arrival.prompt_tokens - shared)]


class _Seen:
    """What is known of one arrival so far."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.scheduled: float | None = None
        self.tokens: list[float] = []
        self.cached, self.failure = 0, ""

    def started(self, at_s: float) -> None:
        """Note the first moment of work."""
        if self.scheduled is None:
            self.scheduled = at_s

    def felt(self) -> Felt:
        """Return the record."""
        return Felt(
            due_s=self.arrival.at_s, scheduled_s=self.scheduled, tokens_s=tuple(self.tokens),
            prompt_tokens=self.arrival.prompt_tokens, cached_tokens=self.cached,
            failure=self.failure,
        )  # fmt: skip
