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
    assert model.token_seconds() == pytest.approx(1e-4, rel=0.2)


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


def cost(tokens: int, start: int) -> float:
    """A step of one prompt at a depth: 40 ms, 0.5 ms a token, 30 ns a token and context token."""
    return 0.04 + tokens * (5e-4 + 3e-8 * (start + tokens / 2))


def test_steps_keep_the_target_while_the_context_grows() -> None:
    pacer = Pacer(target_s=0.2, block_size=64, max_tokens=2048)
    for _ in range(20):
        pacer.observe(2, 0, 0.04)
    start, late = 0, []
    while start < 200_000:
        tokens = pacer.budget(2, start)
        seconds = cost(tokens, start)
        pacer.observe(2, tokens, seconds, tokens * (start + tokens / 2))
        start += tokens
        late.append(seconds)
    assert max(late) < 0.25
    assert sum(s > 0.21 for s in late) < 0.02 * len(late)
    assert sum(late[100:]) / len(late[100:]) > 0.18, "the target is used up"


def test_a_short_prompt_is_priced_by_its_own_context() -> None:
    pacer = Pacer(target_s=0.2, block_size=64, max_tokens=2048)
    for start in range(0, 200_000, 200):
        pacer.observe(0, 64, cost(64, start) - 0.04, 64 * (start + 32))
    weight = pacer.weight(190_000, 0)
    assert weight == pytest.approx((5e-4 + 3e-8 * 190_000) / 5e-4, rel=0.3)
    assert pacer.budget(0, 0) > 5 * pacer.budget(0, 190_000)


@given(
    st.lists(
        st.tuples(st.integers(1, 2048), st.integers(0, 10**6), st.floats(0, 5)),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_is_measured_no_cost_is_negative(steps: list[tuple[int, int, float]]) -> None:
    pacer = Pacer(target_s=0.2, block_size=64, max_tokens=2048)
    for tokens, start, seconds in steps:
        pacer.observe(1, tokens, seconds, tokens * (start + tokens / 2))
        for context in (0, 10**6):
            assert pacer.model.token_seconds(context) >= 0
            assert 1 <= pacer.budget(1, context) <= 2048
            assert pacer.weight(context, 0) > 0 or pacer.model.token_seconds(context) == 0


def test_without_a_target_the_budget_is_fixed() -> None:
    pacer = Pacer(target_s=None, block_size=16, max_tokens=512)
    pacer.observe(1, 512, 100.0)
    assert pacer.budget(8) == 512
