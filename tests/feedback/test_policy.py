"""The policy on instruments of paper: what it chooses, whom it blames, when it stays silent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oxplow.feedback.finding import Finding, Locus, Verdict
from oxplow.feedback.policy import (
    ByValue,
    InRandomOrder,
    Instrument,
    Suspicion,
    deepest,
    diagnose,
)


def _said(verdict: Verdict, locus: Locus | None = None, name: str = "probe") -> Finding:
    return Finding(
        probe=name, verdict=verdict, summary="said so", locus=locus or Locus(), repro="true"
    )


def _instrument(
    name: str,
    reach: dict[str, float],
    verdict: Verdict = Verdict.PASS,
    *,
    cost_s: float = 1.0,
    locus: Locus | None = None,
) -> Instrument:
    return Instrument(
        name=name, cost_s=cost_s, reach=reach, run=lambda: [_said(verdict, locus, name)]
    )


@dataclass
class _Box:
    odds: dict[str, float]
    instruments: Sequence[Instrument]
    first: Sequence[Instrument] = ()
    surroundings: Sequence[Instrument] = ()
    sharper: Sequence[Instrument] = ()
    clears: Callable[[Finding], Finding | None] = field(default=lambda failure: None)

    def refine(self, failure: Finding) -> Sequence[Instrument]:
        return self.sharper

    def acquits(self, failure: Finding) -> Finding | None:
        return self.clears(failure)


ROUTER = Locus(component="ops", op="router", parameter="bias")


def test_the_best_chance_for_a_second_is_chosen_first() -> None:
    cheap = _instrument("cheap", {"ops": 0.9}, cost_s=1)
    dear = _instrument("dear", {"ops": 1.0}, cost_s=10)
    other = _instrument("other", {"cache": 1.0}, cost_s=1)
    told: list[str] = []
    box = _Box({"ops": 3, "cache": 1}, [dear, other, cheap])
    found = diagnose(box, tell=lambda step: told.append(step.instrument))
    assert told[0] == "cheap" and told[1] == "other"
    assert found.verdict is Verdict.PASS and found.suspects == ()


def test_a_pass_moves_the_odds_to_those_it_cannot_see() -> None:
    suspicion = Suspicion({"ops": 1, "cache": 1})
    suspicion.note(_instrument("ops", {"ops": 0.9}), passed=True)
    assert suspicion.ranked()[0][0] == "cache"
    before = suspicion.left
    suspicion.note(_instrument("all", {"ops": 0.9, "cache": 0.9}), passed=True)
    assert suspicion.left < before


def test_an_instrument_that_cannot_judge_clears_nobody() -> None:
    box = _Box({"ops": 1}, [_instrument("blind", {"ops": 1.0}, Verdict.INCONCLUSIVE)])
    found = diagnose(box)
    assert found.verdict is Verdict.INCONCLUSIVE and found.left["ops"] > 0.6


def test_a_failure_is_sharpened_and_confirmed() -> None:
    box = _Box(
        {"ops": 1},
        [_instrument("coarse", {"ops": 1.0}, Verdict.FAIL, locus=Locus(component="ops"))],
        sharper=[_instrument("sharp", {"ops": 1.0}, Verdict.FAIL, locus=ROUTER)],
        clears=lambda failure: _said(Verdict.PASS, name="toggle"),
    )
    found = diagnose(box)
    assert found.locus == ROUTER and found.confirmed and found.repro
    assert found.suspects == (ROUTER, Locus(component="ops"))


def test_a_sharper_probe_that_says_less_does_not_blur_the_answer() -> None:
    box = _Box(
        {"ops": 1},
        [_instrument("exact", {"ops": 1.0}, Verdict.FAIL, locus=ROUTER)],
        sharper=[_instrument("blur", {}, Verdict.FAIL, locus=Locus(component="model"))],
    )
    assert diagnose(box).locus == ROUTER


def test_whom_an_experiment_clears_is_not_blamed() -> None:
    box = _Box(
        {"ops": 1},
        [_instrument("wrong", {"ops": 1.0}, Verdict.FAIL, locus=ROUTER)],
        clears=lambda failure: _said(Verdict.FAIL, ROUTER, "toggle"),
    )
    found = diagnose(box)
    assert found.verdict is Verdict.INCONCLUSIVE and found.suspects == ()


def test_changed_surroundings_are_a_suspect_and_not_the_answer() -> None:
    locus = Locus(component="runtime", op="environment", parameter="numpy")
    changed = _instrument("environment", {}, Verdict.FAIL, locus=locus)
    clean = _Box({"ops": 1}, [_instrument("a", {"ops": 1.0})], surroundings=[changed])
    found = diagnose(clean)
    assert found.verdict is Verdict.PASS and found.suspects == (locus,)
    broken = _Box(
        {"ops": 1},
        [_instrument("a", {"ops": 1.0}, Verdict.FAIL, locus=ROUTER)],
        surroundings=[changed],
    )
    assert diagnose(broken).locus == ROUTER


def test_the_time_is_kept() -> None:
    box = _Box({"ops": 1}, [_instrument("a", {"ops": 0.5}), _instrument("b", {"ops": 0.5})])
    assert diagnose(box, budget_s=0).verdict is Verdict.INCONCLUSIVE


def test_random_order_is_repeatable_and_uses_everything() -> None:
    box = _Box({"ops": 1}, [_instrument(n, {"ops": 0.1}) for n in "abcdef"])
    orders = []
    for _ in range(2):
        used: list[str] = []
        diagnose(
            box, order=InRandomOrder(3), tell=lambda step, used=used: used.append(step.instrument)
        )
        orders.append(used)
    assert orders[0] == orders[1] and sorted(orders[0]) == list("abcdef")
    assert ByValue().choose([], Suspicion({"ops": 1})) is None


def test_the_deepest_of_many_failures_leads() -> None:
    loci = [Locus(component="model"), ROUTER, Locus(component="ops", op="router")]
    assert deepest([_said(Verdict.FAIL, locus) for locus in loci]).locus == ROUTER
