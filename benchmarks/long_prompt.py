"""A very long prompt beside short requests, on the engine alone: does the step target hold?

One prompt of `--tokens` random tokens runs from its first token to its answer, while a short
request (32 tokens in, 16 out) is always open. Times are CPU seconds of the engine's one thread, so
that other work on the machine does not count; the engine paces itself by the same clock. The last
line is one JSON object.

    python -m benchmarks.long_prompt DIR --tokens 200000
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from oxplow.cache.plan import CacheBudget, plan_cache
from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.engine.events import RequestEnd, TokenOut
from oxplow.engine.options import EngineOptions
from oxplow.engine.request import Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.model.load import load_model
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, select

LONG, SHORT = "long", "short"
clock = time.thread_time


def main() -> None:
    """Run the prompt to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    asked = parser.parse_args()
    core = open_core(asked.model, asked.tokens + 64)
    record = {"command": f"benchmarks.long_prompt DIR --tokens {asked.tokens}", "clock": "CPU s"}
    record |= {"torch": torch.__version__, "alone": neighbours_alone(core)}
    sys.stdout.write(json.dumps(record | run(core, asked.tokens)) + "\n")


def open_core(directory: Path, longest: int) -> EngineCore:
    """Open an engine on one thread that measures its own CPU time."""
    torch.set_num_threads(1)
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32)
    ops = select(builtin_kernels(), CONTRACTS, facts)
    model = load_model(directory, ops)
    budget = CacheBudget(total_bytes=2 << 30, num_slots=4, max_model_len=longest)
    plan = plan_cache(trunk_components(model), model.block_size, budget)
    return EngineCore(model, ops, plan, EngineOptions(), revision="bench", clock=clock)


class Neighbour:
    """Keeps one short request open and notes when its tokens come."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._number, self._rng = core, 0, random.Random(1)
        self._last: float | None = None
        self.first: list[float] = []
        self.between: list[float] = []

    def ask(self) -> None:
        """Send the next request."""
        self._number += 1
        name = f"{SHORT} {self._number}"
        prompt = [self._rng.randrange(5, 250) for _ in range(32)]
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        self._core.add(Request(request_id=name, prompt_ids=prompt, params=params))
        self._asked, self._last = clock(), None

    def note(self, event: object) -> None:
        """Take an event in; after the end of one request the next is sent."""
        if isinstance(event, TokenOut) and event.request_id.startswith(SHORT):
            now = clock()
            if self._last is None:
                self.first.append(now - self._asked)
            else:
                self.between.append(now - self._last)
            self._last = now
        if isinstance(event, RequestEnd) and event.request_id.startswith(SHORT):
            self.ask()

    def figures(self) -> dict[str, float]:
        """Return medians and ends of both distributions."""
        told: dict[str, float] = {"requests": len(self.first)}
        for name, times in (("ttft", self.first), ("itl", self.between)):
            told |= spread(name, times)
        return told


def spread(name: str, times: list[float]) -> dict[str, float]:
    """Return median, 95th percentile and maximum, rounded to 0.1 ms."""
    ordered = sorted(times)
    ends = {"p95": ordered[int(0.95 * (len(ordered) - 1))], "max": ordered[-1]}
    told = {"median": statistics.median(ordered)} | ends
    return {f"{name}_{key}": round(value, 4) for key, value in told.items()}


def neighbours_alone(core: EngineCore) -> dict[str, float]:
    """Measure short requests with nothing beside them."""
    neighbour = Neighbour(core)
    neighbour.ask()
    while len(neighbour.first) < 10:
        for event in core.step():
            neighbour.note(event)
    for number in range(20):
        core.abort(f"{SHORT} {number}")
    core.step()
    return neighbour.figures()


def run(core: EngineCore, tokens: int) -> dict[str, object]:
    """Run the long prompt beside short requests; tell how deep it is every 10,000 tokens."""
    rng = random.Random(0)
    prompt = [rng.randrange(5, 250) for _ in range(tokens)]
    neighbour = Neighbour(core)
    began, told, steps = clock(), 0, []
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    core.add(Request(request_id=LONG, prompt_ids=prompt, params=params))
    neighbour.ask()
    while core.book.is_live(LONG):
        at = clock()
        events = core.step()
        steps.append(clock() - at)
        for event in events:
            neighbour.note(event)
        depth = core.book.choices(LONG)[0].computed_tokens if core.book.is_live(LONG) else tokens
        if depth >= told:
            sys.stderr.write(f"{depth} tokens, {clock() - began:.0f} s, {steps[-1]:.3f} s a step\n")
            told += 10_000
    late = steps[len(steps) // 2 :]
    return {
        "beside": neighbour.figures(),
        "seconds": round(clock() - began, 1),
        "steps": len(steps),
        **spread("step", steps),
        "over_target_by_half": round(sum(s > 0.3 for s in late) / len(late), 4),
    }


if __name__ == "__main__":
    main()
