"""The isolated gate: every cheat is stopped, and for the right reason; honest work passes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.feedback.calibrate import MachineProfile, calibrate
from oxplow.feedback.gate import Reason, Stop
from oxplow.feedback.isolate import Isolated
from oxplow.feedback.judge import Judgement, Terms, judge

LINEAR = CONTRACTS["linear"]
_HERE = Path(__file__).with_name("candidates.py")
QUICK = Terms(cases=("decode",), held_out=2, deadline_s=20.0)


@pytest.fixture(scope="module")
def profile() -> MachineProfile:
    return calibrate(torch.device("cpu"), 1, budget_s=1.5)


def _judge(name: str, terms: Terms = QUICK) -> Judgement:
    return judge(LINEAR, f"{_HERE}:{name}", terms)


CHEATS = {
    "zeros": Reason.NUMERICS,
    "uniform": Reason.NUMERICS,
    "pointer_keyed": Reason.NUMERICS,
    "background_thread": Reason.NUMERICS,
    "lazy_subclass": Reason.FORM,
    "stale_buffer": Reason.NUMERICS,
    "silent_bf16": Reason.NUMERICS,
    "static_buffer": Reason.ALIAS,
    "one_shape": Reason.NUMERICS,
    "input_mutation": Reason.UNTOUCHED,
    "clock_patch": Reason.TAMPERED,
}
OTHERS = {
    "dies": Reason.DIED,
    "leaves": Reason.DIED,
    "raises": Reason.RAISED,
    "works_on": Reason.BUSY,
    "forks": Reason.BUSY,
    "sends_rubbish": Reason.TAMPERED,
    "looks_for_the_truth": Reason.NUMERICS,
}
DETAILS = {
    "pointer_keyed": "decode",  # the second values in the same memory
    "background_thread": "not finite",
    "stale_buffer": "not finite",
    "one_shape": "held_out",
    "input_mutation": "x",
    "clock_patch": "time.perf_counter",
    "dies": "SIGSEGV",
    "leaves": "exit code 0",
    "raises": "SystemExit",
    "works_on": "after its answer",
    "forks": "another process",
}


@pytest.mark.parametrize("name", [*CHEATS, *OTHERS])
def test_a_cheat_is_stopped_for_the_right_reason(name: str) -> None:
    told = _judge(name).finding
    assert told.reason is (CHEATS | OTHERS)[name], str(told)
    assert DETAILS.get(name, "") in str(told)


@pytest.mark.parametrize("name", ["honest", "in_columns"])
def test_an_honest_rewrite_passes_the_whole_gate(name: str, profile: MachineProfile) -> None:
    told = _judge(name, replace(QUICK, cases=(), held_out=4, profile=profile))
    assert told.finding.ok, str(told.finding)
    assert sum("held_out" in c for c in told.judged) == 4
    assert told.seconds is not None and told.floor is not None
    assert told.seconds > 0.8 * told.floor.seconds


def test_a_hang_is_a_verdict_and_leaves_no_process() -> None:
    began = time.monotonic()
    told = _judge("hangs", replace(QUICK, deadline_s=0.5)).finding
    assert told.reason is Reason.HUNG
    assert time.monotonic() - began < 20


def test_results_made_before_they_are_asked_for_are_under_the_floor(
    profile: MachineProfile,
) -> None:
    told = _judge("answers_for_the_harness", replace(QUICK, held_out=0, profile=profile)).finding
    assert told.reason is Reason.FLOOR, str(told)
    assert "at the best rate measured" in told.detail


def test_the_seed_repeats_the_examination_and_is_secret_by_default() -> None:
    one, other = _judge("one_shape"), _judge("one_shape")
    assert one.seed != other.seed
    again = _judge("one_shape", replace(QUICK, seed=one.seed))
    assert again.finding.case == one.finding.case


def test_an_op_with_state_is_judged_too_and_null_work_scores_nothing() -> None:
    contract = CONTRACTS["kda_decode"]
    terms = replace(QUICK, cases=("decode", "padding_rows"))
    assert judge(contract, "kernel:torch", terms).finding.ok
    assert judge(CONTRACTS["swiglu"], "kernel:torch", replace(QUICK, held_out=3)).finding.ok
    null = judge(CONTRACTS["rms_norm"], f"{_HERE}:zeros", QUICK).finding
    assert not null.ok


def test_a_race_says_what_a_person_must_look_at() -> None:
    terms = replace(QUICK, held_out=0, baseline=f"{_HERE}:honest", pairs=5)
    told = _judge("in_columns", terms)
    assert told.finding.ok and told.race is not None
    assert told.race.ratio.low <= told.race.ratio.high
    assert bool(told.needs_human) == (told.race.ratio.high < 0.5)


def test_a_candidate_that_cannot_be_loaded_is_told_so() -> None:
    for spec, word in ((f"{_HERE}:nobody", "no such function"), ("kernel:none", "no such kernel")):
        told = judge(LINEAR, spec, QUICK).finding
        assert told.reason is Reason.RAISED
        assert word in told.detail


def test_the_child_ends_with_its_judge() -> None:
    with Isolated("linear", f"{_HERE}:honest") as child:
        pid = child._process.pid
        assert pid is not None and child.ping() > 0
        assert child.check_quiet() in (True, False)
    with pytest.raises(OSError):
        os.kill(pid, 0)
    with pytest.raises(Stop), Isolated("linear", "nowhere"):
        pass
