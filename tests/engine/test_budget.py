"""Shares and floors of one step's prefill tokens."""

from hypothesis import given
from hypothesis import strategies as st

from oxplow.engine.budget import PrefillBudget

candidate = st.tuples(st.booleans(), st.integers(1, 200), st.booleans())


@given(
    total=st.integers(8, 300),
    candidates=st.lists(candidate, min_size=1, max_size=8),
    share=st.sampled_from([0.1, 0.25, 0.5]),
)
def test_nobody_takes_too_much_and_every_floor_is_honoured(
    total: int, candidates: list[tuple[bool, int, bool]], share: float
) -> None:
    floor = total // 8
    floors = [floor if holds else 0 for _, _, holds in candidates]
    budget = PrefillBudget(
        total, share=share, shorts=[short for short, _, _ in candidates], floors=floors
    )
    given_to: dict[bool, int] = {True: 0, False: 0}
    for (short, wanted, _), own in zip(candidates, floors, strict=True):
        budget.begin_turn(own, is_short=short)
        given = budget.grant(wanted, own, is_short=short)
        assert min(wanted, own) <= given <= wanted
        budget.spend(given, is_short=short)
        given_to[short] += given
    assert sum(given_to.values()) <= total
    kinds = {short for short, _, _ in candidates}
    if len(kinds) == 2 and not any(floors):
        assert max(given_to.values()) <= total - int(total * share)


def test_one_kind_alone_may_take_everything() -> None:
    budget = PrefillBudget(100, share=0.25, shorts=[False], floors=[10])
    budget.begin_turn(10, is_short=False)
    assert budget.grant(500, 10, is_short=False) == 100


def test_the_other_kind_finds_its_share() -> None:
    budget = PrefillBudget(100, share=0.25, shorts=[False, True], floors=[0, 0])
    first = budget.grant(500, 0, is_short=False)
    budget.spend(first, is_short=False)
    assert first == 75
    assert budget.grant(500, 0, is_short=True) == 25
