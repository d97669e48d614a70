"""Load as it arrives: traces of arrivals, what users of an engine felt, two arms on one trace.

Owns traces (recorded or drawn), the figures per request and the paired comparison. Knows no engine:
an arm is a callable that serves a trace. Invariant: both arms serve the same arrivals with the same
contents, in alternating order; differences are taken request by request; the first arm runs again
in each round, and what it differs from itself is what "equal" means.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from oxplow.errors import ConfigError
from oxplow.feedback.measure import Interval

__all__ = [
    "Arm",
    "Arrival",
    "Felt",
    "LoadComparison",
    "Slo",
    "Trace",
    "bursts",
    "compare_arms",
    "figures",
    "poisson",
    "read_trace",
    "write_trace",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace: when it comes, how long it is, and with whom it shares a start.

    `at_s` counts from the start of the trace. The first `shared_tokens` of the prompt are those of
    every other arrival of the same `group`; contents follow from group and number.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int
    group: int = 0
    shared_tokens: int = 0


Trace: TypeAlias = tuple[Arrival, ...]
_Three: TypeAlias = tuple[float, float, float]
_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Felt:
    """What became of one arrival, in seconds since the start of the trace.

    `scheduled_s` is the first moment at which an engine worked on it (None: not known),
    `tokens_s` one stamp per token, `cached_tokens` of the prompt came from a cache.
    """

    due_s: float
    scheduled_s: float | None
    tokens_s: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int = 0
    failure: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from the due time to the first token."""
        return self.tokens_s[0] - self.due_s

    @property
    def queue_s(self) -> float:
        """Seconds before anything was done for it."""
        return 0.0 if self.scheduled_s is None else max(0.0, self.scheduled_s - self.due_s)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between its tokens."""
        pairs = zip(self.tokens_s, self.tokens_s[1:], strict=False)
        return tuple(b - a for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What counts as good: seconds to the first token, and the mean seconds between tokens."""

    ttft_s: float = 1.0
    itl_s: float = 0.1

    def holds(self, felt: Felt) -> bool:
        """Tell whether one request was served well."""
        if felt.failure or not felt.tokens_s:
            return False
        gaps = felt.gaps_s
        mean = statistics.mean(gaps) if gaps else 0.0
        return felt.ttft_s <= self.ttft_s and mean <= self.itl_s


Arm: TypeAlias = Callable[[Trace, int], Sequence[Felt]]
"""Serves a trace whose contents follow from a seed; answers in the order of the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadComparison:
    """Ratios second / first by name ("ttft", "itl", "total"), and first again / first.

    Each is the median of the per-request ratios, with a 99% interval.
    """

    ratios: Mapping[str, Interval]
    controls: Mapping[str, Interval]
    first: Mapping[str, float]
    second: Mapping[str, float]

    def differs(self, name: str) -> bool:
        """Tell whether the arms differ by more than the first arm does from itself."""
        ratio, control = self.ratios[name], self.controls[name]
        return ratio.excludes_one and (ratio.low > control.high or ratio.high < control.low)


def poisson(
    rate_s: float, count: int, *, prompt: tuple[int, int], new: tuple[int, int], seed: int = 0,
    groups: int = 0,
) -> Trace:  # fmt: skip
    """Draw arrivals at `rate_s` a second; lengths are even between their two ends.

    `groups` of them (0: none) share the first half of their prompts.
    """
    rng = random.Random(seed)
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(rate_s)
        made.append(_drawn(at, number, rng, prompt, new, groups))
    return tuple(made)


def bursts(
    size: int, gap_s: float, count: int, *, prompt: tuple[int, int], new: tuple[int, int],
    seed: int = 0, groups: int = 0,
) -> Trace:  # fmt: skip
    """Draw `count` arrivals that come `size` at once, `gap_s` seconds apart."""
    rng = random.Random(seed)
    return tuple(
        _drawn(number // size * gap_s, number, rng, prompt, new, groups) for number in range(count)
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Write one JSON line per arrival."""
    path.write_text("".join(json.dumps(asdict(a)) + "\n" for a in trace), encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """Read arrivals, in any order. Raises ConfigError that names the line."""
    made = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"the trace cannot be read: {error}", where=str(path)) from error
    for number, line in enumerate(lines, 1):
        try:
            arrival = Arrival(**json.loads(line))
            if arrival.at_s < 0 or arrival.prompt_tokens < 1 or arrival.new_tokens < 1:
                raise ValueError("times and lengths are positive")
            made.append(arrival)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"this is no arrival: {error}",
                wanted="at_s, prompt_tokens, new_tokens",
                where=f"{path}:{number}",
            ) from error
    if not made:
        raise ConfigError("the trace is empty", where=str(path))
    return tuple(sorted(made, key=lambda a: a.at_s))


def figures(felt: Sequence[Felt], slo: Slo) -> dict[str, float]:
    """Return what a service is judged by; times in seconds, rates a second."""
    done = [f for f in felt if f.tokens_s and not f.failure]
    ends = [f.tokens_s[-1] for f in done]
    span = max(ends, default=0.0) - min((f.due_s for f in felt), default=0.0)
    gaps = [g for f in done for g in f.gaps_s]
    good = sum(slo.holds(f) for f in felt)
    tokens = sum(len(f.tokens_s) for f in done)
    prompt = sum(f.prompt_tokens for f in done)
    told = {
        "requests": float(len(felt)),
        "failed": float(len(felt) - len(done)),
        "tokens_s": tokens / span if span else 0.0,
        "good_share": good / len(felt) if felt else 0.0,
        "goodput_s": good / span if span else 0.0,
        "hit_ratio": sum(f.cached_tokens for f in done) / prompt if prompt else 0.0,
    }
    for name, values in (
        ("ttft", [f.ttft_s for f in done]),
        ("itl", gaps),
        ("queue", [f.queue_s for f in done]),
    ):
        told |= {f"{name}_p50_s": _quantile(values, 0.5), f"{name}_p99_s": _quantile(values, 0.99)}
    return told


def compare_arms(
    first: Arm, second: Arm, trace: Trace, *, rounds: int, slo: Slo | None = None, seed: int = 0
) -> LoadComparison:
    """Serve `trace` by both arms in `rounds` rounds; in each the first arm runs a second time.

    Raises ConfigError where no request was served by all.
    """
    rng = random.Random(seed)
    pairs: dict[str, list[list[_Three]]] = {"ttft": [], "itl": [], "total": []}
    felt: dict[str, list[Felt]] = {"first": [], "second": [], "again": []}
    for arm in (first, second):
        arm(trace[:2], seed)  # caches, threads and allocators awake
    for round_ in range(rounds):
        arms = [("first", first), ("second", second), ("again", first)]
        rng.shuffle(arms)
        told = {name: list(arm(trace, seed + 1 + round_)) for name, arm in arms}
        for name, results in told.items():
            felt[name] += results
        for name, rows in pairs.items():
            rows.append(_threes(told["first"], told["second"], told["again"], name))
    if not any(pairs["total"]):
        raise ConfigError("no request was served by both arms", got=felt["second"][0].failure)
    ratios, controls = {}, {}
    for name, rows in pairs.items():
        kept = [row for row in rows if row]
        if kept:
            ratios[name] = _clustered([[(t[1], t[0]) for t in row] for row in kept], rng)
            controls[name] = _clustered([[(t[2], t[0]) for t in row] for row in kept], rng)
    limits = slo or Slo()
    return LoadComparison(
        ratios=ratios, controls=controls,
        first=_mean_figures(felt["first"], limits, rounds),
        second=_mean_figures(felt["second"], limits, rounds),
    )  # fmt: skip


def _drawn(
    at: float, number: int, rng: random.Random, prompt: tuple[int, int], new: tuple[int, int],
    groups: int,
) -> Arrival:  # fmt: skip
    length, answer = rng.randint(*prompt), rng.randint(*new)
    return Arrival(
        at_s=at, prompt_tokens=length, new_tokens=answer,
        group=number % groups if groups else number,
        shared_tokens=prompt[0] // 2 if groups else 0,
    )  # fmt: skip


def _threes(
    first: Sequence[Felt], second: Sequence[Felt], again: Sequence[Felt], name: str
) -> list[_Three]:
    """Return one figure of every request that all three runs served."""
    found = []
    for one in zip(first, second, again, strict=True):
        if all(f.tokens_s and not f.failure for f in one):
            a, b, c = (_value(f, name) for f in one)
            if min(a, b, c) > 0:
                found.append((a, b, c))
    return found


def _clustered(rounds: Sequence[Sequence[tuple[float, float]]], rng: random.Random) -> Interval:
    """Return the median ratio with a 99% interval that draws whole rounds, then requests.

    A busy moment makes all requests of a round alike: they are not independent samples.
    """
    logs = [[math.log(a / b) for a, b in row] for row in rounds]
    draws = []
    for _ in range(_BOOTSTRAPS):
        picked = [rng.choice(logs) for _ in logs]
        draws.append(statistics.median(x for row in picked for x in rng.choices(row, k=len(row))))
    draws.sort()
    cut = _BOOTSTRAPS // 200
    return Interval(
        ratio=math.exp(statistics.median(x for row in logs for x in row)),
        low=math.exp(draws[cut]),
        high=math.exp(draws[-1 - cut]),
    )


def _mean_figures(felt: Sequence[Felt], slo: Slo, rounds: int) -> dict[str, float]:
    """Average the figures of the rounds: their clocks start anew in each."""
    size = len(felt) // rounds
    told = [figures(felt[i * size : (i + 1) * size], slo) for i in range(rounds)]
    return {name: statistics.mean(t[name] for t in told) for name in told[0]}


def _value(felt: Felt, name: str) -> float:
    if name == "ttft":
        return felt.ttft_s
    if name == "total":
        return felt.tokens_s[-1] - felt.due_s
    return statistics.mean(felt.gaps_s) if felt.gaps_s else 0.0


def _quantile(values: Sequence[float], share: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]
