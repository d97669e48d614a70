"""Loads: traces, what users felt, and paired arms that do not see differences where none are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from oxplow.errors import ConfigError
from oxplow.feedback.load import (
    Felt,
    Slo,
    Trace,
    bursts,
    compare_arms,
    figures,
    poisson,
    read_trace,
    write_trace,
)


def _felt(due: float, first: float, gap: float, count: int, **more: object) -> Felt:
    stamps = tuple(first + i * gap for i in range(count))
    return Felt(due_s=due, scheduled_s=due + 0.1, tokens_s=stamps, prompt_tokens=10, **more)  # type: ignore[arg-type]


def test_figures_are_those_of_the_stamps() -> None:
    felt = [
        _felt(0.0, 0.5, 0.05, 5, cached_tokens=5),
        _felt(1.0, 3.0, 0.05, 5),
        Felt(due_s=2.0, scheduled_s=None, tokens_s=(), prompt_tokens=10, failure="full"),
    ]
    told = figures(felt, Slo(ttft_s=1.0, itl_s=0.1))
    assert told["ttft_p50_s"] == pytest.approx(0.5) and told["ttft_p99_s"] == pytest.approx(2.0)
    assert told["itl_p99_s"] == pytest.approx(0.05)
    assert told["queue_p50_s"] == pytest.approx(0.1)
    assert told["failed"] == 1 and told["good_share"] == pytest.approx(1 / 3)
    assert told["hit_ratio"] == pytest.approx(0.25)
    assert told["tokens_s"] == pytest.approx(10 / 3.2)
    assert figures([], Slo())["tokens_s"] == 0


def test_traces_are_drawn_from_their_seed_and_survive_a_file(tmp_path: Path) -> None:
    one = poisson(5.0, 200, prompt=(10, 20), new=(1, 3), seed=3, groups=4)
    assert one == poisson(5.0, 200, prompt=(10, 20), new=(1, 3), seed=3, groups=4)
    assert one[-1].at_s == pytest.approx(40, rel=0.3)
    assert {a.group for a in one} == {0, 1, 2, 3} and all(a.shared_tokens == 5 for a in one)
    in_bursts = bursts(3, 2.0, 7, prompt=(4, 4), new=(1, 1))
    assert [a.at_s for a in in_bursts] == [0, 0, 0, 2, 2, 2, 4]
    write_trace(one, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == one


@pytest.mark.parametrize("line", ["", "{}", '{"at_s": -1, "prompt_tokens": 1, "new_tokens": 1}'])
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(ConfigError):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


class _Arm:
    """Serves with a known time to first token, and the machine's noise on top."""

    def __init__(self, ttft: float, gap: float, noise: random.Random) -> None:
        self.ttft, self.gap, self.noise, self.seen = ttft, gap, noise, list[int]()

    def __call__(self, trace: Trace, seed: int) -> Sequence[Felt]:
        self.seen.append(seed)
        mood = 1 + 0.5 * self.noise.random()  # the whole run is slower or faster
        return [
            _felt(a.at_s, a.at_s + self.ttft * mood * (1 + 0.05 * self.noise.random()),
                  self.gap * mood, a.new_tokens)
            for a in trace
        ]  # fmt: skip


def _trace() -> Trace:
    return poisson(5.0, 20, prompt=(10, 20), new=(2, 5), seed=1)


def test_a_clear_difference_is_seen_where_it_is() -> None:
    noise = random.Random(0)
    one, other = _Arm(0.1, 0.01, noise), _Arm(0.4, 0.01, noise)
    told = compare_arms(one, other, _trace(), rounds=6)
    assert told.differs("ttft") and told.ratios["ttft"].ratio > 2.5
    assert not told.differs("itl")
    assert sorted(set(one.seen)) == sorted(set(other.seen))  # the same contents for both


def test_equal_arms_differ_no_more_than_one_from_itself() -> None:
    wrong = 0
    for seed in range(10):
        noise = random.Random(seed)
        arms = _Arm(0.1, 0.01, noise), _Arm(0.1, 0.01, noise)
        wrong += compare_arms(*arms, _trace(), rounds=4, seed=seed).differs("ttft")
    assert wrong <= 1  # moods last a whole run: rounds are the samples, not requests


def test_arms_without_an_answer_in_common_are_an_error() -> None:
    def none(trace: Trace, seed: int) -> Sequence[Felt]:
        return [
            Felt(due_s=a.at_s, scheduled_s=None, tokens_s=(), prompt_tokens=1, failure="down")
            for a in trace
        ]

    with pytest.raises(ConfigError, match="down"):
        compare_arms(_Arm(0.1, 0.01, random.Random(0)), none, _trace(), rounds=1)
