"""Where two runs of the same work differ in time: by op, by function, computed or waited.

Owns profiles of a run, their file form and the attribution of a difference. Knows no engine and no
load: the work is a callable. Invariant: processor time decides first, because other processes
cannot add to it; the best of several repeats counts; a difference inside the spread of the
baseline's own repeats is no difference; what no part explains is told as a residual.
"""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from oxplow.errors import ContractError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

__all__ = [
    "Growth",
    "Profile",
    "attribute_growth",
    "best_of_both",
    "growth_finding",
    "profile_of",
]

_PACKAGE = Path(__file__).resolve().parents[1]
_LEAST_GROWTH = 0.12  # of the whole; less cannot be told from another day
_MOST_PACE = 1.5  # a machine that changed more cannot be corrected for
_LEAST_SHARE = 0.3  # of the growth that the first suspect must carry
_WAITS = ("sleep", "acquire", "wait", "select", "poll", "recv", "join", "synchronize", "item")

Part = tuple[str, str, str]
"""Component, op or function, and the builtin that it waits in or calls ("" for its own time)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one piece of work: `total` of each repeat, then per part the least of all.

    `computed` is processor time, `waited` is wall time inside calls that give the processor up;
    `calls` counts calls of each part. An op's seconds hold all that it called.
    """

    totals: tuple[float, ...]
    waits: tuple[float, ...]
    computed: Mapping[Part, float]
    waited: Mapping[Part, float]
    calls: Mapping[Part, int]

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        plain = asdict(self)
        for name in ("computed", "waited", "calls"):
            plain[name] = [[*part, value] for part, value in getattr(self, name).items()]
        return plain

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Profile:
        """Read what `row` wrote."""
        parts = {
            name: {(c, f, b): value for c, f, b, value in row[name]}
            for name in ("computed", "waited", "calls")
        }
        return cls(totals=tuple(row["totals"]), waits=tuple(row["waits"]), **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One part of a difference: seconds more, and its share of the whole difference."""

    part: Part
    seconds: float
    share: float
    is_wait: bool
    calls: tuple[int, int]


def profile_of(
    work: Callable[[], object], kernels: Mapping[str, Callable[..., Any]], *, repeats: int = 3
) -> Profile:
    """Run `work` once without a profiler, `repeats` times for what is computed, once for waits.

    `kernels` maps op to its bound callable, whose calls are counted as the op. Raises
    ContractError for no repeats.
    """
    if repeats < 1:
        raise ContractError("a profile needs repeats", got=repeats, wanted=">= 1")
    ops = {_key(run.__code__): op for op, run in kernels.items() if hasattr(run, "__code__")}
    work()
    computed: list[tuple[float, dict[Part, float], dict[Part, int]]] = []
    for _ in range(repeats):
        entries = _run(work, time.thread_time)
        parts, calls = _parts(entries, ops)
        computed.append((sum(parts.values()), parts, calls))
    waits = _wait_parts(_run(work, time.perf_counter))
    return Profile(
        totals=tuple(total for total, _, _ in computed),
        waits=(sum(waits.values()),),
        computed=_least([parts for _, parts, _ in computed]),
        waited=waits,
        calls=computed[-1][2],
    )


def best_of_both(one: Profile, other: Profile) -> Profile:
    """Join two profiles of the same work: the least of each part, all totals."""
    return Profile(
        totals=one.totals + other.totals,
        waits=one.waits + other.waits,
        computed=_least([one.computed, other.computed]),
        waited=_least([one.waited, other.waited]),
        calls=other.calls,
    )


def attribute_growth(baseline: Profile, suspect: Profile) -> tuple[Growth, ...]:
    """Return what grew, most first; empty where the whole did not grow beyond the spread."""
    grown: list[Growth] = []
    base = min(baseline.totals) + min(baseline.waits)
    for is_wait in (False, True):
        before, after = (p.waited if is_wait else p.computed for p in (baseline, suspect))
        pace = 1.0 if is_wait else _pace(baseline, suspect)
        whole = sum(after.values()) - pace * sum(before.values())
        if whole <= _LEAST_GROWTH * base:
            continue
        for part in {*before, *after}:
            more = after.get(part, 0.0) - pace * before.get(part, 0.0)
            if more > 0:
                counts = (baseline.calls.get(part, 0), suspect.calls.get(part, 0))
                share = more / whole
                grown.append(
                    Growth(part=part, seconds=more, share=share, is_wait=is_wait, calls=counts)
                )
    return tuple(sorted(grown, key=lambda g: (-g.seconds, g.part)))


def _pace(baseline: Profile, suspect: Profile) -> float:
    """Return how much faster or slower the machine was, by the parts called as often as before.

    The median over them, weighted by their seconds: one part that changed does not move it.
    """
    same = [
        (suspect.computed[part] / seconds, seconds)
        for part, seconds in baseline.computed.items()
        if seconds > 0 and part in suspect.computed and baseline.calls[part] == suspect.calls[part]
    ]
    half, seen = sum(seconds for _, seconds in same) / 2, 0.0
    for ratio, seconds in sorted(same):
        seen += seconds
        if seen >= half:
            return min(max(ratio, 1 / _MOST_PACE), _MOST_PACE)
    return 1.0


def growth_finding(
    probe: str, baseline: Profile, suspect: Profile, *, repro: str, excitation: Mapping[str, object]
) -> Finding:
    """Judge a pair of profiles: pass where nothing grew, else blame the part that grew most.

    Inconclusive where the growth is spread so thin that no part carries a third of it.
    """
    grown = attribute_growth(baseline, suspect)
    base = _pace(baseline, suspect) * sum(baseline.computed.values()) + min(baseline.waits)
    now = sum(suspect.computed.values()) + min(suspect.waits)
    effect = Effect(name="time", value=now / base, unit="ratio", bound=1 + _LEAST_GROWTH)
    evidence = {"/".join(p for p in g.part if p): round(g.seconds, 5) for g in grown[:6]}
    if not grown:
        return Finding(
            probe=probe, verdict=Verdict.PASS, summary=f"time changed by {now / base - 1:+.1%}",
            effect=effect, excitation=excitation, repro=repro,
        )  # fmt: skip
    first = grown[0]
    loci = tuple(_locus(g) for g in grown[:3])
    told = "/".join(p for p in first.part if p)
    verb = "waits" if first.is_wait else "computes"
    summary = (
        f"{now / base - 1:+.0%} time; {told} {verb} {first.seconds:.4f} s more,"
        f" {min(first.share, 1.0):.0%} of it, in {first.calls[1]} calls (were {first.calls[0]})"
    )
    clear = first.share >= _LEAST_SHARE
    return Finding(
        probe=probe, verdict=Verdict.FAIL if clear else Verdict.INCONCLUSIVE, summary=summary,
        locus=loci[0], effect=effect, excitation=excitation, repro=repro, evidence=evidence,
        suspects=loci[1:],
    )  # fmt: skip


def _locus(growth: Growth) -> Locus:
    component, function, builtin = growth.part
    parameter = builtin or ("wait" if growth.is_wait else "time")
    return Locus(component=component, op=function, parameter=parameter)


def _run(work: Callable[[], object], clock: Callable[[], float]) -> Sequence[Any]:
    profiler = cProfile.Profile(clock)
    profiler.enable()
    try:
        work()
    finally:
        profiler.disable()
    return profiler.getstats()


def _key(code: CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def _place(code: CodeType | str) -> tuple[str, str] | None:
    """Return component and function of code inside this package, None for all other."""
    if isinstance(code, str):
        return None
    path = Path(code.co_filename)
    if not path.is_relative_to(_PACKAGE) or "feedback" in path.parts:
        return None
    room = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
    return ("ops" if room.startswith("ops.") else room), code.co_name


def _parts(
    entries: Sequence[Any], ops: Mapping[tuple[str, int, str], str]
) -> tuple[dict[Part, float], dict[Part, int]]:
    """Give every second to one part: ops with all they call, functions with the rest."""
    seconds: dict[Part, float] = {}
    calls: dict[Part, int] = {}
    lids = _lids(entries)
    for entry in entries:
        place = _place(entry.code)
        if place is None:
            continue
        op = ops.get(_key(entry.code))
        if op is not None:
            part = ("ops", op, "")
            seconds[part] = max(seconds.get(part, 0.0), entry.totaltime)
            calls[part] = calls.get(part, 0) + entry.callcount
            continue
        if place[0] == "ops":
            continue  # inside an op, or a kernel's own function
        own = (*place, "")
        seconds[own] = seconds.get(own, 0.0) + entry.inlinetime
        calls[own] = calls.get(own, 0) + entry.callcount
        for called in entry.calls or ():
            if _place(called.code) is None:
                part = (*place, _builtin(called.code))
                more = called.inlinetime if called.code in lids else called.totaltime
                seconds[part] = seconds.get(part, 0.0) + more
                calls[part] = calls.get(part, 0) + called.callcount
    return seconds, calls


def _lids(entries: Sequence[Any]) -> set[CodeType | str]:
    """Return outside functions under which this package's code runs again: wrappers, contexts."""
    calls = {e.code: [c.code for c in e.calls or ()] for e in entries}
    lids = {c for c, inner in calls.items() if _place(c) is None and any(map(_place, inner))}
    while True:
        more = {c for c, inner in calls.items() if _place(c) is None and lids & set(inner)} - lids
        if not more:
            return lids
        lids |= more


def _wait_parts(entries: Sequence[Any]) -> dict[Part, float]:
    """Give wall time in calls that wait to the functions of this package that called them."""
    seconds: dict[Part, float] = {}
    for entry in entries:
        place = _place(entry.code)
        if place is None:
            continue
        for called in entry.calls or ():
            name = _builtin(called.code)
            if _place(called.code) is None and name in _WAITS:
                part = (*place, name)
                seconds[part] = seconds.get(part, 0.0) + called.totaltime
    return seconds


def _builtin(code: CodeType | str) -> str:
    """Return the bare name of a function outside this package."""
    if not isinstance(code, str):
        return code.co_name
    words = code.strip("<>").replace("'", " ").split()
    named = [w for w in words if w not in ("built-in", "method", "of", "objects", "method")]
    return named[0].rsplit(".", 1)[-1] if named else code


def _least(runs: Sequence[Mapping[Part, float]]) -> dict[Part, float]:
    parts = {part for run in runs for part in run}
    return {part: min(run.get(part, 0.0) for run in runs) for part in parts}
