"""The run: what an examinee is shown, what its answers become, and which cheats do not pay."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from oxplow.errors import ConfigError
from oxplow.feedback.exam import (
    FULL,
    QUICK,
    Answer,
    Chat,
    DraftRun,
    TextWindow,
    ToolCall,
    build_haystacks,
    build_json_items,
    build_pictures,
    build_tool_items,
    run_exam,
)
from oxplow.feedback.exam.report import figures
from oxplow.feedback.exam.runner import PICTURE_CHANCE

PLAN = replace(
    QUICK, haystacks={1024: 2, 2048: 1}, windows=2, window_tokens=64, calls=40, json=40,
    pictures=48, swapped=48, drafts=2,
)  # fmt: skip
ASKED = ["needle", "tool_call", "json", "picture"]


def words(text: str) -> int:
    return len(text.split())


def quiet(part: str, share: float) -> None:
    pass


class Knowing:
    """An examinee that knows every answer by the question's text; pictures by their pixels."""

    max_tokens = 4096
    sees_pictures = True
    drafts = True
    count_tokens = staticmethod(words)

    def __init__(self) -> None:
        self.batches: list[Sequence[Chat]] = []
        self.answers: dict[str, Answer] = {}
        for length, count in PLAN.haystacks.items():
            for stack in build_haystacks(length, count, words):
                for n in stack.needles:
                    self.answers[str(stack.messages(n)[0]["content"])] = Answer(text=n.answer)
        for call in build_tool_items(PLAN.calls):
            made = ToolCall(call.name, json.dumps(call.arguments))
            self.answers[call.messages[0]["content"]] = Answer(calls=(made,))
        for item in build_json_items(PLAN.json):
            text = json.dumps(item.expected)
            self.answers[item.messages[0]["content"]] = Answer(text=text)
        self.seen = {
            (p.image.tobytes(), p.question): p.answer for p in build_pictures(PLAN.pictures)
        }
        self.pictured = {p.image.tobytes(): p.answer for p in build_pictures(PLAN.pictures)}

    def ask(self, chats: Sequence[Chat]) -> list[Answer]:
        self.batches.append(chats)
        return [self.answer(chat["messages"][0]["content"]) for chat in chats]

    def answer(self, content: Any) -> Answer:
        if isinstance(content, str):
            return self.answers[content]
        url = content[0]["image_url"]["url"].partition(",")[2]
        image = Image.open(io.BytesIO(base64.b64decode(url)))
        return Answer(text=self.look(image.tobytes(), content[1]["text"]))

    def look(self, pixels: bytes, question: str) -> str:
        return self.pictured[pixels]  # what the picture shows, whatever was asked for first

    def read(self, kind: str, text: str, count: int, num_tokens: int) -> Iterator[TextWindow]:
        for index in range(count):
            yield TextWindow(
                part=kind, item=str(index), nats=70.0, num_bytes=100, num_tokens=num_tokens
            )

    def write(
        self, kind: str, text: str, count: int, prompt_tokens: int, new_tokens: int
    ) -> Iterator[DraftRun]:
        for index in range(count):
            yield DraftRun(part=kind, item=str(index), drafted=10, accepted=6, distinct=9)


class Blind(Knowing):
    """Knows the answers of the unswapped questions by heart and never looks at the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.by_heart = iter([p.answer for p in build_pictures(PLAN.pictures)] * 2)

    def look(self, pixels: bytes, question: str) -> str:
        return next(self.by_heart)


class Failing(Knowing):
    """Refuses or fails every other question."""

    def ask(self, chats: Sequence[Chat]) -> list[Answer]:
        right = super().ask(chats)
        return [Answer(end="failed") if i % 2 else a for i, a in enumerate(right)]


def test_knowing_all_answers_gives_full_marks_and_swapped_pictures_give_chance() -> None:
    told = figures(run_exam(Knowing(), PLAN, quiet))
    assert told["needle"] == {"1024": 1.0, "2048": 1.0}
    assert (told["tool_call"], told["json"], told["picture"]) == (1.0, 1.0, 1.0)
    assert told["picture_swapped"]["at_chance"]
    assert told["picture_swapped"]["share"] < 0.3
    assert told["mtp_acceptance"] == 0.6
    assert told["bits_per_byte"] == {"code": 1.0099, "prose": 1.0099}


def test_answers_by_heart_are_betrayed_by_the_swapped_pictures() -> None:
    told = figures(run_exam(Blind(), PLAN, quiet, ["picture"]))
    assert told["picture"] == 1.0
    assert not told["picture_swapped"]["at_chance"]


def test_failed_questions_count_as_wrong_and_are_counted() -> None:
    result = run_exam(Failing(), PLAN, quiet, ["json"])
    assert figures(result)["json"] == 0.5
    assert result.failures == 20


def test_questions_of_one_haystack_come_together_and_share_it() -> None:
    model = Knowing()
    run_exam(model, PLAN, quiet, ["needle"])
    assert [len(batch) for batch in model.batches] == [16, 16, 16]
    for batch in model.batches:
        texts = [chat["messages"][0]["content"] for chat in batch]
        hay = texts[0].rpartition("\n\n")[0]
        assert all(t.startswith(hay + "\n\n") for t in texts)
        assert len(set(texts)) == 16


def test_every_length_has_64_questions_or_more_at_all_depths() -> None:
    for plan in (QUICK, FULL):
        assert all(16 * count >= 64 for count in plan.haystacks.values())
        assert {1024, 2048, 4096, 8192} <= set(plan.haystacks)
    result = run_exam(Knowing(), PLAN, quiet, ["needle"])
    assert {o.group for o in result.outcomes} == {"0-25%", "25-50%", "50-75%", "75-100%"}


def test_too_long_a_haystack_is_skipped_with_its_reason() -> None:
    model = Knowing()
    model.max_tokens = 1500
    result = run_exam(model, PLAN, quiet, ["needle"])
    assert result.parts() == ["needle_1024"]
    assert result.skipped == {"needle_2048": "the model takes 1500 tokens at most"}


def test_what_the_model_lacks_is_skipped_with_its_reason() -> None:
    model = Knowing()
    model.sees_pictures = model.drafts = False
    result = run_exam(model, PLAN, quiet, ["picture", "draft"])
    assert set(result.skipped) == {"picture", "draft"}
    assert figures(result)["picture"] is None


@pytest.mark.parametrize("lacks", [False, True])
def test_progress_adds_up_to_one(lacks: bool) -> None:
    model, shares = Knowing(), list[float]()
    if lacks:
        model.sees_pictures = model.drafts = False
        model.max_tokens = 1500
    run_exam(model, PLAN, lambda part, share: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)


def test_two_runs_ask_the_same_items() -> None:
    first, second = (run_exam(Knowing(), PLAN, quiet, ASKED).outcomes for _ in range(2))
    assert first == second
    assert len({(o.part, o.item) for o in first}) == len(first)


def test_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown part"):
        run_exam(Knowing(), PLAN, quiet, ["needles"])


def test_chance_is_that_of_uniform_answers() -> None:
    kinds = {"digit": 1 / 10, "shape": 1 / 8, "colour": 1 / 8}
    shares = [kinds[p.kind] for p in build_pictures(300)]
    assert sum(shares) / 300 == pytest.approx(PICTURE_CHANCE)
