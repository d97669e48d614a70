"""Where the time of a whole went, and which part makes two wholes differ.

Owns the op clock, the breakdown and the attribution with its residual, ablation and engagement
proof. Knows no engine: arms are callables. Invariant: the parts of a breakdown do not overlap; what
they leave of the difference is told, and over a tenth of it nothing is blamed; the first suspect is
blamed only after putting it alone back has closed the difference it was charged with.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from oxplow.errors import ContractError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.ops.table import OpTable

__all__ = ["Ablation", "Breakdown", "Measured", "OpClock", "attribute", "clocked_table"]

_RESIDUAL = 0.1
_LEAST = 0.03  # of the whole: less is not traced
_STEPS_GREW = 1.1
_RECOVERED = 0.5
_BOOTSTRAPS = 1000


@dataclass(slots=True)
class OpClock:
    """Seconds, calls and errors by op since the last reset: the engagement proof, too."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget what was counted; the names of the kernels stay."""
        self.seconds.clear()
        self.calls.clear()
        self.errors.clear()

    @property
    def total_s(self) -> float:
        """Seconds in all ops."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One run of the same work: the whole, its parts by name, and counts that have no noise.

    Parts are "op:NAME", "batch", "sampling", "forward" (between ops), "bookkeeping", "gap" and
    "queue", in seconds. `counts` holds "steps" and "calls:OP".
    """

    total_s: float
    parts: Mapping[str, float]
    counts: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


Measured: TypeAlias = Callable[[int], Breakdown]
"""Does the work once on contents made from a seed."""
Ablation: TypeAlias = Callable[[str], Measured | None]
"""Return the suspect with one part as it was in the baseline; None where that cannot be done."""


def clocked_table(
    ops: OpTable, now: Callable[[], float] = time.perf_counter
) -> tuple[OpTable, OpClock]:
    """Return a table with the same kernels whose calls are timed by `now` and counted."""
    clock = OpClock(kernels={op: kernel.name for op, kernel in ops.kernels.items()})
    kernels = {
        op: replace(kernel, run=_clocked(op, kernel.run, clock, now))
        for op, kernel in ops.kernels.items()
    }
    return OpTable(kernels, ops.explain(), ops.facts), clock


def _clocked(
    op: str, run: Callable[..., Any], clock: OpClock, now: Callable[[], float]
) -> Callable[..., Any]:
    def clocked(*positional: Any, **named: Any) -> Any:
        given = dict(named)  # an op's own names: the kernel refuses what it does not know
        began = now()
        done = False
        try:
            result = run(*positional, **given)
            done = True
            return result
        finally:
            clock.seconds[op] = clock.seconds.get(op, 0.0) + now() - began
            clock.calls[op] = clock.calls.get(op, 0) + 1
            if not done:
                clock.errors[op] = clock.errors.get(op, 0) + 1

    return clocked


@dataclass(slots=True)
class _Rounds:
    """Paired runs of the arms and what they say."""

    base: list[Breakdown] = field(default_factory=list)
    again: list[Breakdown] = field(default_factory=list)
    suspect: list[Breakdown] = field(default_factory=list)

    def totals(self, name: str) -> list[float]:
        return [b.total_s for b in getattr(self, name)]

    def delta(self, part: str) -> float:
        """Return the median of the paired differences of one part."""
        pairs = zip(self.base, self.suspect, strict=True)
        return statistics.median(s.parts.get(part, 0.0) - b.parts.get(part, 0.0) for b, s in pairs)

    def names(self) -> set[str]:
        return {name for b in (*self.base, *self.suspect) for name in b.parts}


def attribute(
    probe: str,
    base: Measured,
    suspect: Measured,
    *,
    rounds: int = 7,
    ablate: Ablation = lambda part: None,
    repro: str,
    seed: int = 0,
) -> Finding:
    """Compare two arms part by part and blame what made the second slower.

    Pass where it is no slower than the base is than itself; inconclusive where noise or a residual
    hides the part, or the ablation does not close it. Raises ContractError under 3 rounds.
    """
    if rounds < 3:
        raise ContractError("an attribution needs repeats", got=rounds, wanted=">= 3 rounds")
    began = time.perf_counter()
    rng = random.Random(seed)
    seen = _measure(base, suspect, rounds, rng)
    whole = _paired(seen.totals("suspect"), seen.totals("base"), rng)
    control = _paired(seen.totals("again"), seen.totals("base"), rng)
    typical = statistics.median(seen.totals("base"))
    effect = Effect(
        name="suspect / base", value=1 + whole[0] / typical, unit="ratio",
        low=1 + whole[1] / typical, high=1 + whole[2] / typical, n=rounds,
    )  # fmt: skip
    deltas = {name: seen.delta(name) for name in seen.names()}
    residual = whole[0] - sum(deltas.values())
    ranked = sorted(deltas.items(), key=lambda item: -item[1])
    evidence: dict[str, object] = {
        "parts_s": {name: round(value, 6) for name, value in ranked if abs(value) > 1e-6},
        "residual_s": round(residual, 6),
        "equal_s": list(control),
        "engagement": _engagement(seen),
    }

    def told(verdict: Verdict, summary: str, loci: Sequence[Locus] = ()) -> Finding:
        return Finding(
            probe=probe, verdict=verdict, summary=summary, effect=effect, evidence=evidence,
            locus=loci[0] if loci else Locus(), suspects=tuple(loci[1:]), repro=repro,
            cost_s=time.perf_counter() - began,
        )  # fmt: skip

    more = f"{whole[0] / typical:+.0%} time"
    settled = _no_slower(whole, control, typical)
    if settled is not None:
        return told(settled[0], f"{more}{settled[1]}")
    grown = _counts_grown(seen)
    if grown:
        evidence["counts"] = grown
    if grown.get("steps", 1.0) > _STEPS_GREW:
        locus = Locus(component="engine.scheduler", op="schedule", parameter="prefill budget")
        summary = f"{more}; the same work takes {grown['steps']:.2f} times as many steps"
        return told(Verdict.FAIL, summary, (locus, *_loci(ranked[:2])))
    share = abs(residual / whole[0])
    if share > _RESIDUAL:
        summary = f"{more}, but the parts leave {share:.0%} of it unexplained"
        return told(Verdict.INCONCLUSIVE, summary, _loci(ranked[:3]))
    return _confirm(seen, (base, suspect), ablate(ranked[0][0]), ranked, whole[0], more, rng, told)


def _no_slower(
    whole: tuple[float, float, float], control: tuple[float, float, float], typical: float
) -> tuple[Verdict, str] | None:
    """Return pass or inconclusive where the suspect is not clearly slower, None where it is."""
    if whole[1] > max(control[2], _LEAST * typical):
        return None
    slower = whole[0] > _LEAST * typical and whole[2] > control[2]
    if slower and control[2] - control[1] > _LEAST * typical:
        return Verdict.INCONCLUSIVE, ", within what equal runs show here"
    return Verdict.PASS, ": no slower than equal runs are"


Told: TypeAlias = Callable[..., Finding]


def _confirm(
    seen: _Rounds,
    arms: tuple[Measured, Measured],
    ablated: Measured | None,
    ranked: Sequence[tuple[str, float]],
    whole: float,
    more: str,
    rng: random.Random,
    told: Told,
) -> Finding:
    """Put the first suspect back alone: its part of the difference must close."""
    part, seconds = ranked[0]
    share = seconds / whole
    loci = _loci(ranked[:3])
    summary = f"{more}; {part} takes {seconds:.4f} s more, {share:.0%} of it"
    calls = part.replace("op:", "calls:")
    before, after = (s[-1].counts.get(calls) for s in (seen.base, seen.suspect))
    if before is not None and after is not None:
        summary += f", in {after} calls (were {before})"
    if ablated is None:
        return told(Verdict.FAIL, f"{summary}; no ablation was possible", loci)
    closed = []
    for number in range(max(3, len(seen.base) // 2)):
        order = [arms[1], ablated]
        rng.shuffle(order)
        took = {id(arm): arm(1000 + number).total_s for arm in order}
        closed.append(took[id(arms[1])] - took[id(ablated)])
    gained = statistics.median(closed)
    if gained >= _RECOVERED * seconds:
        return told(Verdict.FAIL, f"{summary}; put back alone it gives {gained:.4f} s back", loci)
    return told(
        Verdict.INCONCLUSIVE,
        f"{summary}, but put back alone it gives only {gained:.4f} s back", loci,
    )  # fmt: skip


def _measure(base: Measured, suspect: Measured, rounds: int, rng: random.Random) -> _Rounds:
    seen = _Rounds()
    base(seed := rng.randrange(1 << 30))
    suspect(seed)
    for _ in range(rounds):
        seed = rng.randrange(1 << 30)
        arms = [("base", base), ("suspect", suspect), ("again", base)]
        rng.shuffle(arms)
        for name, arm in arms:
            getattr(seen, name).append(arm(seed))
    return seen


def _paired(
    top: Sequence[float], bottom: Sequence[float], rng: random.Random
) -> tuple[float, float, float]:
    """Return the median paired difference with its 99% interval."""
    deltas = [a - b for a, b in zip(top, bottom, strict=True)]
    draws = sorted(
        statistics.median(rng.choices(deltas, k=len(deltas))) for _ in range(_BOOTSTRAPS)
    )
    cut = _BOOTSTRAPS // 200
    return statistics.median(deltas), draws[cut], draws[-1 - cut]


def _counts_grown(seen: _Rounds) -> dict[str, float]:
    """Return counts that grew, as ratios: these have no noise."""
    one, other = seen.base[-1].counts, seen.suspect[-1].counts
    ratios = {name: other.get(name, 0) / n for name, n in one.items() if n}
    return {name: round(r, 3) for name, r in ratios.items() if r > 1.0}


def _engagement(seen: _Rounds) -> dict[str, object]:
    """Return per op whose kernel differs: kernels of both arms, hits and errors of the suspect."""
    one, other = seen.base[-1], seen.suspect[-1]
    return {
        op: {
            "base": one.kernels.get(op, "-"),
            "suspect": kernel,
            "hits": other.counts.get(f"calls:{op}", 0),
            "errors": other.errors.get(op, 0),
        }
        for op, kernel in other.kernels.items()
        if kernel != one.kernels.get(op) or other.errors.get(op)
    }


def _loci(ranked: Sequence[tuple[str, float]]) -> tuple[Locus, ...]:
    return tuple(_locus(name) for name, seconds in ranked if seconds > 0)


def _locus(part: str) -> Locus:
    kind, _, op = part.partition(":")
    if op:
        return Locus(component="ops", op=op, parameter="time")
    rooms = {
        "batch": ("engine.batch", "build"),
        "sampling": ("engine.sampling", "draw"),
        "forward": ("model", "forward"),
        "bookkeeping": ("engine.core", "step"),
        "queue": ("engine.scheduler", "schedule"),
        "gap": ("runtime", "between steps"),
    }
    component, function = rooms.get(kind, (kind, ""))
    return Locus(component=component, op=function, parameter="time")
