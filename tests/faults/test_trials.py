"""Trials on planted faults: found where they are, repeated by their command, silent when clean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from oxplow.feedback.finding import Finding, Locus, Verdict
from oxplow.feedback.policy import Diagnosis, diagnose
from oxplow.feedback.scoring import Answer
from oxplow.serve.audits import AUDITS, audit
from oxplow.serve.commands.faults import planted_faults
from oxplow.serve.fault_trials import Trials, run_repro
from oxplow.serve.model_files import default_model
from oxplow.serve.toolbox import BenchToolbox
from oxplow.serve.workbench import Workbench
from tests.faults import FAULTS, Fault

AUDITED = {
    "F10": "kept-states",
    "F11": "kept-states",
    "F13": "pictures",
    "F16": "pictures",
    "F17": "sampling",
    "F18": "block-counts",
    "F29": "lookups",
    "F34": "progress",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _fault(name: str) -> Fault:
    return next(f for f in FAULTS if f.id == name)


def _audit(name: str) -> Finding:
    return audit(name, Workbench(directory=default_model(), seed=3), "oxplow diagnose")


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_passes_on_the_clean_engine(name: str) -> None:
    assert _audit(name).verdict is Verdict.PASS


@pytest.mark.parametrize(("fault", "name"), AUDITED.items())
def test_an_audit_names_the_function(fault: str, name: str) -> None:
    planted = _fault(fault)
    with planted.plant():
        found = _audit(name)
    assert found.verdict is Verdict.FAIL
    assert found.locus.component in planted.expected.components
    assert found.locus.op in planted.expected.ops


def test_the_policy_finds_a_fault_and_its_command_repeats_it() -> None:
    planted = _fault("F03")
    with planted.plant():
        box = BenchToolbox(Workbench(directory=default_model()), planted.symptom)
        found = diagnose(box, symptom=planted.symptom)
        assert found.locus == Locus(component="ops", op="router", parameter="bias")
        assert found.confirmed and run_repro(found.repro) == 1
    assert run_repro(found.repro) == 0


def test_faults_are_found_in_the_checkout() -> None:
    assert len(planted_faults().FAULTS) == len(FAULTS)


@dataclass
class _Planted:
    id: str
    title: str = "a change"
    symptom: str = "accuracy"
    held_out: bool = False
    is_open: bool = False

    @contextmanager
    def plant(self) -> Iterator[None]:
        self.is_open = True
        yield
        self.is_open = False


def _said(verdict: Verdict, locus: Locus | None = None) -> Diagnosis:
    return Diagnosis(symptom="accuracy", verdict=verdict, summary="", locus=locus or Locus())


def test_controls_share_a_pass_and_are_judged_alone_when_it_alarms() -> None:
    controls = [_Planted("a"), _Planted("b"), _Planted("c")]
    seen: list[str] = []

    def search(symptom: str, seed: int) -> Diagnosis:
        seen.append("".join(c.id for c in controls if c.is_open))
        bad = controls[1].is_open
        locus = Locus(component="ops", op="router")
        return _said(Verdict.FAIL, locus) if bad else _said(Verdict.PASS)

    marks = Trials(diagnose=search, tell=lambda line: None).controls(controls, 0, shared=True)
    assert seen == ["abc", "a", "b", "c"]
    assert [m.alarm for m in marks] == [False, True, False]


def test_an_abstention_is_no_detection() -> None:
    answer = Answer(components={"ops"}, ops={"router"}, parameters={"bias"})
    trials = Trials(
        diagnose=lambda symptom, seed: _said(Verdict.INCONCLUSIVE), tell=lambda line: None
    )
    mark = trials.fault(_Planted("a"), answer, "numeric", 0)
    assert mark.abstained and not mark.detected and mark.repro_fails is None


def test_a_strange_command_is_no_repro() -> None:
    assert run_repro("rm -rf nothing") == 2
    assert run_repro("oxplow diagnose --only nothing") == 2
