"""The prefill budget follows the measured cost of steps towards the wished step time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxplow.engine.pacing import Pacer, StepModel


def learn(model: StepModel, fixed: float, decode: float, prefill: float, steps: int = 60) -> None:
    for i in range(steps):
        rows, tokens = i % 5, (i % 3) * 100 * (i > 5)
        model.observe(rows, tokens, fixed + decode * rows + prefill * tokens)


@given(st.floats(1e-4, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-3))
def test_the_model_finds_a_linear_cost(fixed: float, decode: float, prefill: float) -> None:
    model = StepModel()
    learn(model, fixed, decode, prefill)
    wanted = fixed + 4 * decode + 150 * prefill
    assert model.predict(4, 150) == pytest.approx(wanted, rel=0.05, abs=1e-3)


def test_a_change_of_cost_is_learnt_and_an_unused_direction_is_not_forgotten() -> None:
    model = StepModel()
    learn(model, 0.01, 1e-3, 1e-4)
    for _ in range(500):  # a long answer: no prefill at all
        model.observe(2, 0, 0.05)
    assert model.predict(2, 0) == pytest.approx(0.05, rel=0.02)
    assert model.prefill_token_seconds == pytest.approx(1e-4, rel=0.2)


def test_steps_settle_at_the_target() -> None:
    pacer = Pacer(target_s=0.1, block_size=16, max_tokens=4096)
    seconds = 0.0
    for _ in range(40):
        tokens = pacer.budget(4)
        seconds = 0.01 + 4 * 1e-3 + tokens * 5e-5
        pacer.observe(4, tokens, seconds)
    assert seconds == pytest.approx(0.1, rel=0.05)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30), st.integers(1, 64))
def test_the_budget_stays_between_one_block_and_the_most(times: list[float], rows: int) -> None:
    pacer = Pacer(target_s=0.1, block_size=16, max_tokens=512)
    last = 4 * 16
    for seconds in times:
        budget = pacer.budget(rows)
        assert 16 <= budget <= 512
        assert budget <= max(2 * last, 16)
        pacer.observe(rows, budget, seconds)
        last = budget


def test_without_a_target_the_budget_is_fixed() -> None:
    pacer = Pacer(target_s=None, block_size=16, max_tokens=512)
    pacer.observe(1, 512, 100.0)
    assert pacer.budget(8) == 512
