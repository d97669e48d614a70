"""The records of planted faults are whole, and every switch undoes itself."""

from __future__ import annotations

import re

import pytest

from oxplow.contracts import CONTRACTS
from oxplow.engine.batch import BatchBuilder
from oxplow.engine.sampling import Sampler
from oxplow.ops.kernels import builtin_kernels
from tests.faults import CONTROLS, FAULTS, NOT_APPLICABLE, Control, Fault, FaultClass


def test_there_are_enough_of_each() -> None:
    assert len(FAULTS) >= 14 and len(CONTROLS) >= 40
    assert {"F05", "F12"} <= {n.id for n in NOT_APPLICABLE}
    ids = [x.id for x in (*FAULTS, *NOT_APPLICABLE, *CONTROLS)]
    assert len(set(ids)) == len(ids)
    assert {f.kind for f in FAULTS} == {FaultClass(k) for k in _CLASSES}


_CLASSES = ("numeric", "state", "concurrency", "performance")


def test_about_half_is_held_out() -> None:
    held = sum(f.held_out for f in FAULTS)
    assert len(FAULTS) * 0.35 <= held <= len(FAULTS) * 0.65


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_a_record_is_whole(fault: Fault) -> None:
    assert fault.expected.components and fault.expected.ops and fault.expected.parameters
    assert fault.reports and fault.excitation and fault.title
    assert fault.symptom in {"accuracy", "nan", "ttft", "throughput", "itl", "hang"}
    for report in fault.reports:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) or " " in report
    if fault.expected.components == {"ops"}:
        assert fault.expected.ops <= set(CONTRACTS)


@pytest.mark.parametrize("switch", [*FAULTS, *CONTROLS], ids=lambda f: f.id)
def test_a_switch_undoes_itself(switch: Fault | Control) -> None:
    before = [k.run for k in builtin_kernels()], dict(vars(Sampler)), dict(vars(BatchBuilder))
    with switch.plant():
        pass
    after = [k.run for k in builtin_kernels()], dict(vars(Sampler)), dict(vars(BatchBuilder))
    assert before == after
