"""Sweeps: a winner must hold on shapes it was not chosen on; cliffs and failures are told."""

from __future__ import annotations

import math

import pytest

from oxplow.errors import ContractError
from oxplow.feedback.finding import Verdict
from oxplow.feedback.sweep import Space, Swept, grid, sweep


def _noise(setting: float, shape: str, seed: int) -> float:
    return 1 + 0.02 * math.sin(997 * setting + len(shape) + seed % 1013)


def _space(**changes: object) -> Space:
    given = {"settings": (8, 16, 32, 64, 128), "default": 16} | changes
    return Space(
        op="kda_prefill", parameter="chunk", settings=given["settings"], default=given["default"],  # type: ignore[arg-type]
        tuning=("short", "long"), held_out=("odd", "longer"), rounds=9,
    )  # fmt: skip


def test_a_better_setting_that_holds_convicts_the_default() -> None:
    def timed(setting: float, shape: str, seed: int) -> float:
        return (1 + abs(math.log2(setting / 64)) * 0.3) * _noise(setting, shape, seed)

    swept, told = sweep(_space(), timed, repro="oxplow bench sweep")
    assert swept.winner == 64 and swept.holds
    assert told.verdict is Verdict.FAIL and told.locus.parameter == "chunk"
    assert [x for x, _ in told.curves[0].series["short"]] == [8, 16, 32, 64, 128]


def test_a_winner_of_the_tuning_shapes_alone_is_not_believed() -> None:
    def timed(setting: float, shape: str, seed: int) -> float:
        slow = 0.5 if setting == 32 and shape in ("short", "long") else 1.3 if setting == 32 else 1
        return slow * _noise(setting, shape, seed)

    swept, told = sweep(_space(), timed, repro="oxplow bench sweep")
    assert swept.winner == 32 and not swept.holds
    assert told.verdict is Verdict.PASS and "loses on held-out" in told.summary


def test_a_lucky_winner_among_equals_is_not_praised() -> None:
    swept, told = sweep(_space(), _noise, repro="oxplow bench sweep")
    assert told.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    assert not swept.holds


def test_cliffs_and_settings_that_cannot_run_are_told() -> None:
    def timed(setting: float, shape: str, seed: int) -> float:
        if setting == 128:
            raise ContractError("too large")
        return 3.0 if setting == 64 else 1.0

    swept, told = sweep(_space(), timed, repro="oxplow bench sweep")
    assert ("long", 32, 64, 3.0) in swept.cliffs
    assert "too large" in swept.failed[128]
    assert told.evidence["cannot run"] == {"128": "too large"}
    assert isinstance(swept, Swept)


def test_a_held_out_shape_may_not_be_a_tuning_shape() -> None:
    with pytest.raises(ContractError, match="tuned on"):
        Space(op="a", parameter="b", settings=(1,), default=1, tuning=("x",), held_out=("x",))
    assert grid(4, 40) == [4, 8, 16, 32]
