"""The benchmark of the instruments: plant a fault, complain, let the policy search, grade it.

Owns the order of trials, the check of repro commands and the sharing of passes among controls.
Knows the planted faults only as switches with right answers: the policy sees a fresh target and a
symptom, never a name. Invariant: a trial builds its target inside the switch and nothing of it is
used outside; a repro command is right only if it fails with the fault and passes without.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from oxplow.errors import OxplowError
from oxplow.feedback.finding import Verdict
from oxplow.feedback.policy import Diagnosis
from oxplow.feedback.scoring import Answer, ControlMark, Depths, Mark, best_of, grade

__all__ = ["PlantedControl", "PlantedFault", "Trials", "run_repro"]

Diagnose = Callable[[str, int], Diagnosis]
"""Search for the cause of a symptom with a seed, on a target built at the call."""


class PlantedControl(Protocol):
    """A change that must not be blamed."""

    id: str
    title: str
    symptom: str

    def plant(self) -> AbstractContextManager[None]:
        """Make the change while the context is open."""
        ...


class PlantedFault(Protocol):
    """A fault with its right answers."""

    id: str
    title: str
    symptom: str
    held_out: bool

    def plant(self) -> AbstractContextManager[None]:
        """Plant the fault while the context is open."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs trials with one way to diagnose; `tell` hears a line of progress for each."""

    diagnose: Diagnose
    tell: Callable[[str], None]
    check_repros: bool = True

    def fault(self, fault: PlantedFault, answer: Answer, kind: str, seed: int) -> Mark:
        """Plant one fault, diagnose it, grade the answer and try its repro command."""
        began, cpu = time.perf_counter(), time.process_time()
        with fault.plant():
            found = self.diagnose(fault.symptom, seed)
            wall, spent = time.perf_counter() - began, time.process_time() - cpu
            is_blamed = found.verdict is Verdict.FAIL
            tried = is_blamed and self.check_repros and bool(found.repro)
            fails = run_repro(found.repro) == 1 if tried else None
        passes = run_repro(found.repro) == 0 if tried else None
        loci = found.suspects or (found.locus,)
        mark = Mark(
            id=fault.id,
            kind=kind,
            held_out=fault.held_out,
            detected=is_blamed,
            abstained=found.verdict is Verdict.INCONCLUSIVE,
            top=grade(found.locus, answer) if is_blamed else Depths(),
            within_three=best_of(loci, answer) if is_blamed else Depths(),
            blamed=str(found.locus) if is_blamed else found.summary,
            probes=len(found.steps),
            seconds=wall,
            cpu_s=spent,
            repro_fails=fails,
            repro_passes=passes,
        )
        self.tell(_line(mark, fault.title))
        return mark

    def controls(
        self, controls: Sequence[PlantedControl], seed: int, *, shared: bool
    ) -> list[ControlMark]:
        """Judge controls: each by itself, or all of one symptom in one pass.

        In a shared pass all are open at once; where it blames anything, each is judged again alone.
        """
        marks: list[ControlMark] = []
        for symptom in dict.fromkeys(c.symptom for c in controls):
            group = [c for c in controls if c.symptom == symptom]
            if not shared:
                marks += [self._control([c], symptom, seed)[0] for c in group]
                continue
            together = self._control(group, symptom, seed)
            if any(mark.alarm for mark in together):
                together = [self._control([c], symptom, seed)[0] for c in group]
            marks += together
        return marks

    def _control(
        self, group: Sequence[PlantedControl], symptom: str, seed: int
    ) -> list[ControlMark]:
        began = time.perf_counter()
        with ExitStack() as stack:
            for control in group:
                stack.enter_context(control.plant())
            found = self.diagnose(symptom, seed)
        spent = (time.perf_counter() - began) / len(group)
        alarm = found.verdict is Verdict.FAIL
        names = group[0].id if len(group) == 1 else f"{len(group)} controls of {symptom}"
        said = f"FALSE ALARM {found.locus}: {found.summary}" if alarm else found.verdict.value
        self.tell(f"{names}: {said} ({time.perf_counter() - began:.1f} s)")
        return [
            ControlMark(
                id=control.id,
                alarm=alarm,
                abstained=found.verdict is Verdict.INCONCLUSIVE,
                blamed=str(found.locus) if alarm else "",
                seconds=spent,
            )
            for control in group
        ]


def run_repro(command: str) -> int:
    """Run an `oxplow ...` command in this process, its output dropped; return its exit code."""
    from typer.testing import CliRunner

    from oxplow.serve.cli import app

    words = shlex.split(command)
    if words[:1] != ["oxplow"]:
        return 2
    result = CliRunner().invoke(app, words[1:])
    if result.exception is not None and not isinstance(result.exception, SystemExit | OxplowError):
        return 70
    return 2 if isinstance(result.exception, OxplowError) else result.exit_code


def chosen(ids: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the ids that `wanted` names, all of them where it names none."""
    return [i for i in ids if not wanted or i in wanted]


def _line(mark: Mark, title: str) -> str:
    depth = (
        "parameter" if mark.top.parameter
        else "op" if mark.top.op
        else "component" if mark.top.component
        else "elsewhere" if mark.detected
        else "not found"
    )  # fmt: skip
    repro = {None: "", True: ", repro right", False: ", REPRO WRONG"}[
        None if mark.repro_fails is None else bool(mark.repro_fails and mark.repro_passes)
    ]
    return f"{mark.id} {title}: {depth}{repro} ({mark.seconds:.1f} s) {mark.blamed}"
