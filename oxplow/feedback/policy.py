"""The deterministic policy: from a symptom, or none, to a locus, by fixed rules and no language
model.

Owns suspects with their odds, the choice of the next instrument, the refinement of a failure and
the diagnosis. Knows no single probe, no fault and no engine: instruments come bound to a target.
Invariant: the same findings give the same choices; nothing is blamed without a failing finding; an
instrument that cannot judge acquits nobody.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from oxplow.feedback.finding import Finding, Locus, Verdict

__all__ = [
    "ByValue",
    "Diagnosis",
    "InRandomOrder",
    "Instrument",
    "Order",
    "Step",
    "Suspicion",
    "Toolbox",
    "diagnose",
]

_ENOUGH = 0.02  # odds left on all suspects together at which the search ends
_CLEAN = 0.3  # odds that nothing is wrong, before the first look


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """A probe bound to its target. `cost_s` is what it usually takes in seconds.

    `reach` says per suspect how likely the probe fails if that one is at fault.
    """

    name: str
    cost_s: float
    reach: Mapping[str, float]
    run: Callable[[], Sequence[Finding]]


class Toolbox(Protocol):
    """What the policy may use. `odds` are the suspects' shares before the first look."""

    @property
    def odds(self) -> Mapping[str, float]:
        """Return the suspects and their odds for the symptom at hand."""
        ...

    @property
    def surroundings(self) -> Sequence[Instrument]:
        """Return what compares the surroundings: told first, a suspect, never the whole answer."""
        ...

    @property
    def first(self) -> Sequence[Instrument]:
        """Return what is looked at next, in order, as far as it is always worth it."""
        ...

    @property
    def instruments(self) -> Sequence[Instrument]:
        """Return what may be chosen freely."""
        ...

    def refine(self, failure: Finding) -> Sequence[Instrument]:
        """Return what may sharpen a failure, in order."""
        ...

    def acquits(self, failure: Finding) -> Finding | None:
        """Try to clear whom the failure blames: a failing answer means it was not him."""
        ...


class Suspicion:
    """Odds of each suspect, updated by what instruments say."""

    def __init__(self, odds: Mapping[str, float]) -> None:
        """Scale `odds` so that, with the share of "nothing is wrong", they sum to 1."""
        total = sum(odds.values()) or 1.0
        self._odds = {name: (1 - _CLEAN) * share / total for name, share in odds.items()}
        self._clean = _CLEAN

    @property
    def left(self) -> float:
        """Return the odds that any suspect is at fault."""
        return sum(self._odds.values())

    def ranked(self) -> list[tuple[str, float]]:
        """Return suspects, most likely first; ties by name."""
        return sorted(self._odds.items(), key=lambda pair: (-pair[1], pair[0]))

    def splits(self, instrument: Instrument) -> float:
        """Return how evenly an instrument divides the odds: 0 where its answer is known."""
        fails = sum(share * instrument.reach.get(name, 0.0) for name, share in self._odds.items())
        return min(fails, 1 - fails)

    def note(self, instrument: Instrument, passed: bool) -> None:
        """Apply Bayes' rule to one answer."""
        for name in self._odds:
            likely = instrument.reach.get(name, 0.0)
            self._odds[name] *= 1 - likely if passed else max(likely, 1e-3)
        if not passed:
            self._clean *= 1e-3
        total = self.left + self._clean
        self._odds = {name: share / total for name, share in self._odds.items()}
        self._clean /= total


class Order(Protocol):
    """Chooses the next instrument."""

    def choose(self, waiting: Sequence[Instrument], suspicion: Suspicion) -> Instrument | None:
        """Return one of `waiting`, None to end the search."""
        ...


class ByValue:
    """The highest chance to divide the suspects for each second of cost."""

    def choose(self, waiting: Sequence[Instrument], suspicion: Suspicion) -> Instrument | None:
        """Return the best instrument; None where nothing is left to learn."""
        if suspicion.left < _ENOUGH:
            return None
        rated = [(suspicion.splits(i) / max(i.cost_s, 1e-3), i) for i in waiting]
        rated = [(value, i) for value, i in rated if value > 0]
        return max(rated, key=lambda pair: (pair[0], pair[1].name))[1] if rated else None


class InRandomOrder:
    """Any order: what the choice by value is compared with."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, waiting: Sequence[Instrument], suspicion: Suspicion) -> Instrument | None:
        """Return any instrument."""
        return self._rng.choice(list(waiting)) if waiting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instrument that was used: why it was chosen, what it said, what it cost in seconds."""

    instrument: str
    splits: float
    verdict: Verdict
    summary: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where the fault is, or that none was found.

    `verdict` FAIL names a locus; PASS means that every suspect was cleared; INCONCLUSIVE that the
    time or the instruments ran out. `confirmed` tells whether a disconfirming experiment was tried
    and failed to clear the locus.
    """

    symptom: str
    verdict: Verdict
    summary: str
    locus: Locus = Locus()
    suspects: tuple[Locus, ...] = ()
    confirmed: bool = False
    repro: str = ""
    findings: tuple[Finding, ...] = ()
    steps: tuple[Step, ...] = ()
    left: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


class _Search:
    """One run of the policy: what was used so far and what it said."""

    def __init__(self, toolbox: Toolbox, budget_s: float, tell: Callable[[Step], None]) -> None:
        self.toolbox, self.tell = toolbox, tell
        self.suspicion = Suspicion(toolbox.odds)
        self.findings: list[Finding] = []
        self.steps: list[Step] = []
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._budget_s = budget_s

    @property
    def spent(self) -> tuple[float, float]:
        """Seconds since the start: wall, and of this process's processors."""
        return time.perf_counter() - self._began, time.process_time() - self._cpu

    @property
    def is_late(self) -> bool:
        return self.spent[0] > self._budget_s

    def use(self, instrument: Instrument) -> list[Finding]:
        """Run one instrument and note what it said."""
        splits = self.suspicion.splits(instrument)
        began, cpu = time.perf_counter(), time.process_time()
        found = list(instrument.run())
        failures = [f for f in found if f.verdict is Verdict.FAIL]
        shown = next(iter(failures or found), None)
        verdict = Verdict.INVALID if shown is None else shown.verdict
        if failures:
            self.suspicion.note(instrument, passed=False)
        elif found and all(f.verdict is Verdict.PASS for f in found):
            self.suspicion.note(instrument, passed=True)
        step = Step(
            instrument=instrument.name,
            splits=splits,
            verdict=verdict,
            summary="nothing to judge" if shown is None else shown.summary,
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
        )
        self.findings += found
        self.steps.append(step)
        self.tell(step)
        return failures


def diagnose(
    toolbox: Toolbox,
    *,
    symptom: str = "",
    order: Order | None = None,
    budget_s: float = 600.0,
    tell: Callable[[Step], None] = lambda step: None,
) -> Diagnosis:
    """Search until a failure is found, sharpened and not cleared, or everybody is cleared.

    `tell` hears each step. Ends with INCONCLUSIVE after `budget_s` seconds.
    """
    search = _Search(toolbox, budget_s, tell)
    waiting = list(toolbox.instruments)
    chosen = order or ByValue()
    for instrument in toolbox.surroundings:
        search.use(instrument)
    for instrument in toolbox.first:
        for failure in search.use(instrument)[:1]:
            found = _pursue(search, failure)
            if found is not None:
                return _report(search, symptom, *found)
    while not search.is_late:
        chosen_next = chosen.choose(waiting, search.suspicion)
        if chosen_next is None:
            break
        waiting.remove(chosen_next)
        failures = search.use(chosen_next)
        if failures:
            found = _pursue(search, deepest(failures))
            if found is not None:
                return _report(search, symptom, *found)
    return _no_fault(search, symptom)


def deepest(failures: Iterable[Finding]) -> Finding:
    """Return the failure that says most about where: parameter over op over component."""
    return max(failures, key=lambda f: depth(f.locus))


def depth(locus: Locus) -> int:
    """Count what a locus names: 0 nothing, 1 component, 2 op, 3 parameter or line."""
    if not locus.component:
        return 0
    if not locus.op:
        return 1
    return 3 if locus.parameter or locus.code else 2


def _pursue(search: _Search, failure: Finding) -> tuple[Finding, bool] | None:
    """Sharpen a failure, then try to clear it; None where it was cleared."""
    best = failure
    for instrument in search.toolbox.refine(failure):
        if search.is_late:
            break
        sharper = search.use(instrument)
        if sharper:
            candidate = deepest(sharper)
            if depth(candidate.locus) >= depth(best.locus):
                best = candidate
    cleared = search.toolbox.acquits(best)
    if cleared is None:
        return best, False
    search.findings.append(cleared)
    return None if cleared.verdict is Verdict.FAIL else (best, cleared.verdict is Verdict.PASS)


def _report(search: _Search, symptom: str, finding: Finding, confirmed: bool) -> Diagnosis:
    wall, cpu = search.spent
    others = [finding.locus, *finding.suspects]
    others += [f.locus for f in search.findings if f.verdict is Verdict.FAIL]
    suspects = tuple(dict.fromkeys(locus for locus in others if locus != Locus()))
    return Diagnosis(
        symptom=symptom,
        verdict=Verdict.FAIL,
        summary=finding.summary,
        locus=finding.locus,
        suspects=suspects,
        confirmed=confirmed,
        repro=finding.repro,
        findings=tuple(search.findings),
        steps=tuple(search.steps),
        left=dict(search.suspicion.ranked()),
        seconds=wall,
        cpu_s=cpu,
    )


def _no_fault(search: _Search, symptom: str) -> Diagnosis:
    wall, cpu = search.spent
    around = {i.name for i in search.toolbox.surroundings}
    judged = [f for f in search.findings if f.probe not in around]
    changed = [f for f in search.findings if f.probe in around and f.verdict is Verdict.FAIL]
    unsure = [f for f in judged if f.verdict is Verdict.INCONCLUSIVE]
    failed = [f for f in judged if f.verdict is Verdict.FAIL]
    is_clean = not (search.is_late or unsure or failed)
    summary = "every suspect was cleared"
    if search.is_late:
        summary = "the time ran out"
    elif failed:
        summary = f"something fails, but whom it blames was cleared: {failed[-1].summary}"
    elif unsure:
        summary = f"{len(unsure)} probes could not judge, first: {unsure[0].summary}"
    if changed:
        summary += f"; the surroundings changed: {changed[0].summary}"
    return Diagnosis(
        symptom=symptom,
        verdict=Verdict.PASS if is_clean else Verdict.INCONCLUSIVE,
        summary=summary,
        suspects=tuple(f.locus for f in changed),
        findings=tuple(search.findings),
        steps=tuple(search.steps),
        left=dict(search.suspicion.ranked()),
        seconds=wall,
        cpu_s=cpu,
    )
