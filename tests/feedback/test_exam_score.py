"""Judges, intervals and pairing: what counts as right, and when a difference is one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from oxplow.errors import ConfigError
from oxplow.feedback.exam import (
    Answer,
    DraftRun,
    ExamResult,
    JsonItem,
    Outcome,
    TextWindow,
    ToolCall,
    ToolItem,
    build_json_items,
    build_tool_items,
    item_name,
    load_result,
    save_result,
)
from oxplow.feedback.exam.intervals import (
    mcnemar,
    mean_interval,
    paired_share,
    ratio_interval,
    wilson,
)
from oxplow.feedback.exam.report import changes, figures, flips, unpaired
from oxplow.feedback.exam.score import judge_call, judge_json, judge_text

TOOL = ToolItem(
    messages=[{"role": "user", "content": "?"}],
    tools=[{"type": "function", "function": {"name": "brew"}}],
    name="brew",
    arguments={"cups": 2, "litres": 4.0, "decaf": True, "roast": "12"},
)
RIGHT = {"cups": 2, "litres": 4.0, "decaf": True, "roast": "12"}


def called(name: str, arguments: object) -> Answer:
    return Answer(calls=(ToolCall(name, json.dumps(arguments)),), end="tool_calls")


def judged(answer: Answer) -> tuple[bool, bool]:
    outcome = judge_call("tool_call", "0", answer, TOOL)
    return outcome.is_right, outcome.is_valid


def test_right_call_is_right() -> None:
    assert judged(called("brew", RIGHT)) == (True, True)
    assert judged(called("brew", RIGHT | {"litres": 4})) == (True, True)  # a number is its value


@pytest.mark.parametrize(
    "wrong",
    [
        {"cups": "2"},
        {"cups": 2.0},
        {"cups": True},
        {"decaf": 1},
        {"decaf": "true"},
        {"roast": 12},
        {"litres": "4.0"},
        {"litres": 4.5},
        {"extra": 1},
    ],
)
def test_wrong_value_or_type_or_field_is_wrong(wrong: dict[str, object]) -> None:
    assert judged(called("brew", RIGHT | wrong)) == (False, True)


def test_missing_field_other_name_and_second_call_are_wrong() -> None:
    short = {k: v for k, v in RIGHT.items() if k != "roast"}
    twice = Answer(calls=called("brew", RIGHT).calls * 2)
    assert judged(called("brew", short)) == (False, True)
    assert judged(called("brow", RIGHT)) == (False, True)
    assert judged(twice) == (False, False)
    assert judged(Answer(text="brew")) == (False, False)
    assert judged(called("brew", [1])) == (False, False)


def json_item() -> JsonItem:
    schema = {
        "type": "object",
        "properties": {"crates": {"type": "integer"}, "grams": {"type": "number"}},
        "required": ["crates", "grams"],
    }
    return JsonItem([{"role": "user", "content": "?"}], schema, {"crates": 3, "grams": 1.5})


@pytest.mark.parametrize(
    ("text", "is_right", "is_valid"),
    [
        ('{"crates": 3, "grams": 1.5}', True, True),
        (' {"grams": 1.5, "crates": 3}\n', True, True),
        ('{"crates": 3, "grams": 2}', False, True),
        ('{"crates": 3.0, "grams": 1.5}', False, False),
        ('{"crates": 3, "grams": true}', False, False),
        ('{"crates": 3}', False, False),
        ('{"crates": 3, "grams": 1.5, "x": 1}', False, False),
        ('{"crates": 3, "grams": 1.5} there', False, False),
        ("[1]", False, False),
        ("", False, False),
    ],
)
def test_json_is_judged_by_form_and_by_value(text: str, is_right: bool, is_valid: bool) -> None:
    outcome = judge_json("json", "0", Answer(text=text), json_item())
    assert (outcome.is_right, outcome.is_valid) == (is_right, is_valid)


def test_text_is_right_without_white_space_around_it_only() -> None:
    def right(text: str) -> bool:
        return judge_text("needle", "0", "", Answer(text=text), "kayak-17").is_right

    assert right(" kayak-17\n")
    assert not right("The kayak-17") and not right("kayak-17.") and not right("Kayak-17")


@pytest.mark.parametrize("seed", range(3))
def test_the_expected_answers_of_every_drawn_item_are_right(seed: int) -> None:
    for item in build_tool_items(60, seed):
        assert judge_call("t", "0", called(item.name, item.arguments), item).is_right
    for item in build_json_items(60, seed):
        assert judge_json("j", "0", Answer(text=json.dumps(item.expected)), item).is_right


def test_wilson_matches_published_values() -> None:
    # Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29
    for right, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(right, count)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_mcnemar_is_the_exact_binomial() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 5) == mcnemar(5, 0) == pytest.approx(2 / 32)
    assert mcnemar(3, 9) == pytest.approx(2 * (1 + 12 + 66 + 220) / 4096)


def test_mean_interval_is_student_s() -> None:
    # a sample with mean 3, deviation sqrt(2.5), n 5: t(4) = 2.7764
    found = mean_interval([1, 2, 3, 4, 5])
    assert found.high - found.value == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=5e-4)
    assert math.isnan(mean_interval([1.0]).low)


def test_ratio_interval_covers_the_truth_as_often_as_it_says() -> None:
    import random

    rng, hits = random.Random(1), 0
    for _ in range(600):
        bottoms = [rng.uniform(800, 1200) for _ in range(8)]
        tops = [0.7 * b + rng.gauss(0, 60) for b in bottoms]
        found = ratio_interval(tops, bottoms)
        hits += found.low <= 0.7 <= found.high
    assert 0.92 <= hits / 600 <= 0.98


def test_paired_share_of_no_flip_is_nothing() -> None:
    assert paired_share(0, 0, 64) == paired_share(0, 0, 10)
    found = paired_share(1, 9, 100)
    assert found.value == pytest.approx(0.08) and found.excludes_zero


def result(rights: str, nats: float = 100.0, accepted: int = 60) -> ExamResult:
    return ExamResult(
        outcomes=[
            Outcome(part="needle_1024", item=str(i), is_right=r == "1", is_valid=r == "1")
            for i, r in enumerate(rights)
        ],
        windows=[
            TextWindow(
                part="code",
                item=str(i),
                nats=nats + i,
                num_bytes=400 + i,
                num_tokens=100,
                drafted=90,
                accepted=accepted,
            )
            for i in range(4)
        ],
        drafts=[DraftRun(part="code", item="0", drafted=10, accepted=7, distinct=9)],
        seconds={"needle": 1.5},
    )


def test_flips_pair_the_same_items() -> None:
    a, b = result("1111100"), result("1110010")
    found = flips(a, b)[0]
    assert (found.num_items, found.right_a, found.right_b) == (7, 5, 4)
    assert (found.lost, found.gained, found.p) == (2, 1, 1.0)


def test_changes_are_differences_of_paired_windows() -> None:
    bits, accepted = changes(result("1"), result("1", nats=110.0, accepted=63))
    assert bits.difference.value == pytest.approx(40 / math.log(2) / sum(range(400, 404)))
    assert bits.difference.excludes_zero  # every window lost the same
    assert accepted.difference.value == pytest.approx(3 / 90)


def test_items_of_one_side_only_are_counted() -> None:
    assert unpaired(result("111"), result("11")) == 1


def test_runs_without_a_common_item_are_refused() -> None:
    other = result("1")
    other.outcomes = [Outcome(part="json", item="x", is_right=True, is_valid=True)]
    with pytest.raises(ConfigError, match="share no item"):
        flips(result("1"), other)


def test_figures_have_the_promised_names() -> None:
    told = figures(result("1101"))
    assert set(told) >= {
        "bits_per_byte", "needle", "tool_call", "json", "picture", "mtp_acceptance", "seconds",
    }  # fmt: skip
    assert told["needle"] == {"1024": 0.75}
    bits = sum(100 + i for i in range(4)) / math.log(2) / sum(range(400, 404))
    assert told["bits_per_byte"] == {"code": pytest.approx(bits, abs=1e-4)}
    assert told["mtp_acceptance"] == 0.7  # self-generated, where it was run
    assert told["mtp"]["teacher_forced_code"] == {"accepted": round(60 / 90, 4), "drafted": 360}
    json.dumps(told, allow_nan=False)


def test_result_reads_back_equal(tmp_path: Path) -> None:
    first = result("1101")
    save_result(first, tmp_path / "r.json")
    assert load_result(tmp_path / "r.json") == first


@pytest.mark.parametrize(
    "content", ["", "{}", '{"version": 1}', '{"version": 1, "outcomes": [{}]}']
)
def test_file_that_is_no_result_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ConfigError):
        load_result(tmp_path / "r.json")


def test_item_names_tell_other_questions_apart() -> None:
    name = item_name(3, ["how?"], "so")
    assert name == item_name(3, ["how?"], "so")
    assert len({name, item_name(3, ["how?"], "no"), item_name(3, ["who?"], "so")}) == 3
