"""The ladder stops at the first red rung, and never takes silence for green."""

from __future__ import annotations

from collections.abc import Sequence

from oxplow.errors import WeightError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.ladder import Rung, climb


def _finding(verdict: Verdict, value: float = 0.1) -> Finding:
    return Finding(
        probe="p", verdict=verdict, summary="s", locus=Locus(component="ops", op="x"),
        effect=Effect(name="e", value=value, unit="bounds", bound=1.0), repro="oxplow check",
    )  # fmt: skip


def _rung(name: str, *findings: Finding) -> Rung:
    return Rung(name=name, asks="?", repro=f"oxplow check --only {name}", run=lambda: findings)


def test_it_stops_at_the_first_red_rung() -> None:
    rungs = [
        _rung("a", _finding(Verdict.PASS)),
        _rung("b", _finding(Verdict.PASS), _finding(Verdict.FAIL)),
        _rung("c", _finding(Verdict.PASS)),
    ]
    assert [r.verdict for r in climb(rungs)] == [Verdict.PASS, Verdict.FAIL]
    assert len(climb(rungs, keep_on=True)) == 3
    assert climb(rungs)[1].row()["locus"] == "component=ops, op=x"


def test_unsure_is_neither_green_nor_red() -> None:
    [result] = climb([_rung("a", _finding(Verdict.PASS), _finding(Verdict.INVALID))])
    assert result.verdict is Verdict.INVALID
    [silent] = climb([_rung("a")])
    assert silent.verdict is Verdict.INVALID


def test_a_green_rung_shows_what_came_nearest_to_its_bound() -> None:
    [result] = climb([_rung("a", _finding(Verdict.PASS, 0.2), _finding(Verdict.PASS, 0.9))])
    assert result.decisive is not None
    assert result.decisive.effect is not None
    assert result.decisive.effect.value == 0.9


def test_an_error_of_ours_is_a_red_rung() -> None:
    def run() -> Sequence[Finding]:
        raise WeightError("no such tensor", where="model.safetensors")

    [result] = climb([Rung(name="weights", asks="?", repro="oxplow check", run=run)])
    assert result.verdict is Verdict.FAIL
    assert result.decisive is not None
    assert "no such tensor" in result.decisive.summary
