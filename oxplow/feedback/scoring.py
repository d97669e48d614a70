"""How good a diagnosis is: depths reached, seconds, false alarms, abstentions, repro commands.

Owns the marks of one trial and their summary. Knows no fault, no probe and no model: right answers
come as plain sets of names. Invariant: an abstention is never counted as an error, nor an error as
an abstention; a share comes with its bootstrap interval over faults.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from oxplow.feedback.finding import Locus

__all__ = ["Answer", "ControlMark", "Depths", "Mark", "Share", "grade", "share", "summary"]

_BOOTSTRAPS = 2000
_TOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The right answers of one fault at three depths; any member of a set is right."""

    components: Collection[str]
    ops: Collection[str]
    parameters: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Which depths a locus got right; a depth counts only where those above it are right."""

    component: bool = False
    op: bool = False
    parameter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One trial of one fault. `seconds` is wall time, `cpu_s` the process's own time.

    `detected`: something was blamed. `top` looks at the first answer, `within_three` at the first
    three. `repro_fails` and `repro_passes` tell what the printed command did with the fault and
    without it; None where there was no command to try.
    """

    id: str
    kind: str
    held_out: bool
    detected: bool
    abstained: bool
    top: Depths
    within_three: Depths
    blamed: str
    probes: int
    seconds: float
    cpu_s: float
    repro_fails: bool | None = None
    repro_passes: bool | None = None

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMark:
    """One clean control: whether anything was blamed, and what."""

    id: str
    alarm: bool
    abstained: bool
    blamed: str
    seconds: float

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of `n` trials with its 95% bootstrap interval."""

    value: float
    low: float
    high: float
    n: int


def grade(locus: Locus, answer: Answer) -> Depths:
    """Compare a blamed locus with the right answers."""
    component = locus.component in answer.components
    op = component and locus.op in answer.ops
    told = {*locus.parameter.replace(",", " ").split()}
    return Depths(
        component=component,
        op=op,
        parameter=op and bool(told & set(answer.parameters)),
    )


def best_of(loci: Sequence[Locus], answer: Answer) -> Depths:
    """Return the deepest depths that any of the first three loci gets right."""
    grades = [grade(locus, answer) for locus in loci[:_TOP]]
    return Depths(
        component=any(g.component for g in grades),
        op=any(g.op for g in grades),
        parameter=any(g.parameter for g in grades),
    )


def share(hits: Sequence[bool], seed: int = 0) -> Share:
    """Return the share of hits with its interval; 0 of 0 is 0 with the widest one."""
    if not hits:
        return Share(value=0.0, low=0.0, high=1.0, n=0)
    rng = random.Random(seed)
    values = [float(h) for h in hits]
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(_BOOTSTRAPS))
    cut = int(0.025 * _BOOTSTRAPS)
    return Share(value=statistics.mean(values), low=means[cut], high=means[-1 - cut], n=len(values))


def summary(marks: Sequence[Mark], controls: Sequence[ControlMark]) -> dict[str, object]:
    """Return the figures of a run as plain data.

    `op_localised` counts faults whose first answer is right down to the op or function.
    """
    found = [m.seconds for m in marks if m.detected]
    repros = [m for m in marks if m.repro_fails is not None]
    return {
        "faults": len(marks),
        "detected": sum(m.detected for m in marks),
        "component_localised": sum(m.top.component for m in marks),
        "op_localised": sum(m.top.op for m in marks),
        "op_within_three": sum(m.within_three.op for m in marks),
        "parameter_localised": sum(m.top.parameter for m in marks),
        "abstained": sum(m.abstained for m in marks),
        "median_s": round(statistics.median(found), 2) if found else None,
        "median_cpu_s": round(statistics.median(m.cpu_s for m in marks if m.detected), 2)
        if found
        else None,
        "max_s": round(max(found), 2) if found else None,
        "repros": len(repros),
        "repros_right": sum(bool(m.repro_fails and m.repro_passes) for m in repros),
        "clean_controls": len(controls),
        "false_alarms": sum(c.alarm for c in controls),
        "shares": {name: asdict(share([read(m) for m in marks])) for name, read in _SHARES.items()},
        "held_out": _half([m for m in marks if m.held_out]),
        "tuned": _half([m for m in marks if not m.held_out]),
    }


_SHARES: Mapping[str, Callable[[Mark], bool]] = {
    "detected": lambda m: m.detected,
    "op_localised": lambda m: m.top.op,
}


def _half(marks: Sequence[Mark]) -> dict[str, int]:
    return {
        "faults": len(marks),
        "detected": sum(m.detected for m in marks),
        "op_localised": sum(m.top.op for m in marks),
    }
