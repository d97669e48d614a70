"""Marks: depths build on one another, abstentions are no errors, shares carry intervals."""

from __future__ import annotations

from oxplow.feedback.finding import Locus
from oxplow.feedback.scoring import (
    Answer,
    ControlMark,
    Depths,
    Mark,
    best_of,
    grade,
    share,
    summary,
)

ANSWER = Answer(components={"ops"}, ops={"router"}, parameters={"bias", "expert_ids"})


def test_depths_build_on_one_another() -> None:
    assert grade(Locus(component="ops", op="router", parameter="bias"), ANSWER) == Depths(
        component=True, op=True, parameter=True
    )
    assert grade(Locus(component="model", op="router", parameter="bias"), ANSWER) == Depths()
    assert grade(Locus(component="ops", op="experts", parameter="bias"), ANSWER) == Depths(
        component=True
    )
    assert grade(Locus(component="ops", op="router"), ANSWER) == Depths(component=True, op=True)


def test_only_three_answers_count() -> None:
    wrong = [Locus(component="model")] * 3
    right = Locus(component="ops", op="router")
    assert best_of([*wrong[:2], right], ANSWER).op
    assert not best_of([*wrong, right], ANSWER).component


def _mark(name: str, **changes: object) -> Mark:
    values: dict[str, object] = {
        "id": name, "kind": "numeric", "held_out": False, "detected": True, "abstained": False,
        "top": Depths(component=True, op=True), "within_three": Depths(component=True, op=True),
        "blamed": "", "probes": 1, "seconds": 2.0, "cpu_s": 1.0,
    }  # fmt: skip
    return Mark(**(values | changes))  # type: ignore[arg-type]


def test_a_summary_counts_each_kind_of_outcome() -> None:
    marks = [
        _mark("a", repro_fails=True, repro_passes=True, held_out=True),
        _mark("b", seconds=4.0, repro_fails=True, repro_passes=False),
        _mark("c", detected=False, abstained=True, top=Depths(), within_three=Depths()),
    ]
    alarms = [
        ControlMark(id="x", alarm=False, abstained=False, blamed="", seconds=1.0),
        ControlMark(id="y", alarm=True, abstained=False, blamed="ops", seconds=1.0),
    ]
    told = summary(marks, alarms)
    wanted = {
        "faults": 3, "detected": 2, "op_localised": 2, "abstained": 1, "median_s": 3.0,
        "repros": 2, "repros_right": 1, "clean_controls": 2, "false_alarms": 1,
    }  # fmt: skip
    assert wanted.items() <= told.items()
    assert told["held_out"] == {"faults": 1, "detected": 1, "op_localised": 1}


def test_shares_carry_an_interval() -> None:
    found = share([True] * 9 + [False])
    assert found.low < found.value == 0.9 < 1.0 == found.high
    assert share([]).n == 0 and share([]).high == 1.0
