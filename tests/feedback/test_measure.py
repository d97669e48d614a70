"""Paired timing tells real differences from noise."""

from __future__ import annotations

import math
import random

import pytest
import torch

from oxplow.errors import ContractError
from oxplow.feedback.measure import compare, read_bandwidth


def noisy(seconds: float, spread: float, source: random.Random):
    """Return work that reports a drifting, noisy time around `seconds` without spending it."""
    return lambda seed: seconds * (1 + 0.2 * ((seed % 7) / 7)) * math.exp(source.gauss(0, spread))


def test_a_real_difference_is_seen_with_its_size() -> None:
    source = random.Random(1)
    told = compare(("a", noisy(1.0, 0.05, source)), ("b", noisy(1.3, 0.05, source)), pairs=40)
    assert told.ratio.excludes_one
    assert 1.2 < told.ratio.ratio < 1.4
    assert told.is_sound


def test_equal_work_is_not_called_different() -> None:
    wrong = 0
    for seed in range(30):
        source = random.Random(seed)
        told = compare(
            ("a", noisy(1.0, 0.1, source)), ("b", noisy(1.0, 0.1, source)), pairs=40, seed=seed
        )
        wrong += told.ratio.excludes_one
    assert wrong <= 2  # a 99% interval over 30 trials


def test_each_round_gets_one_fresh_seed_for_all_sides() -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def recording(name: str):
        return lambda seed: seen[name].append(seed) or 1.0

    compare(("a", recording("a")), ("b", recording("b")), pairs=5)
    assert len(set(seen["b"])) == 6  # warm-up and five rounds
    assert set(seen["a"]) == set(seen["b"])


@pytest.mark.parametrize(("pairs", "seconds"), [(2, 1.0), (5, 0.0)])
def test_nonsense_is_refused(pairs: int, seconds: float) -> None:
    with pytest.raises(ContractError):
        compare(("a", lambda seed: seconds), ("b", lambda seed: 1.0), pairs=pairs)


def test_bandwidth_is_plausible() -> None:
    rate = read_bandwidth(torch.device("cpu"), size_bytes=32 * 2**20, repeats=2)
    assert 1e8 < rate < 1e13
