"""The examination itself: what is asked, in which order and how much of it.

Owns the two plans and the run. Knows no engine: the examinee is given by the caller and sees chat
requests as an API client writes them.
Invariant: a plan asks the same items of every examinee with the same tokenizer; nothing is asked
twice, and what could not be asked is named with its reason.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from PIL import Image

from oxplow.errors import ConfigError
from oxplow.feedback.exam.families import HELD_OUT_CODE, HELD_OUT_PROSE
from oxplow.feedback.exam.held_out import read_held_out
from oxplow.feedback.exam.needle import Haystack, Needle, build_haystacks
from oxplow.feedback.exam.outcomes import DraftRun, ExamResult, Outcome, TextWindow, item_name
from oxplow.feedback.exam.pictures import build_pictures
from oxplow.feedback.exam.score import Answer, judge_call, judge_json, judge_text
from oxplow.feedback.exam.structured import build_json_items
from oxplow.feedback.exam.tools import build_tool_items

__all__ = [
    "FULL",
    "PARTS",
    "PICTURE_CHANCE",
    "QUICK",
    "Chat",
    "ExamPlan",
    "Examinee",
    "run_exam",
]

Chat = Mapping[str, Any]
"""The body of a chat request: `messages`, `max_tokens`, and `tools` where some are offered."""

Tell = Callable[[str, float], None]
"""Told after each piece of work: the part, and the share of the whole run that it was."""

PARTS = ("text", "needle", "tool_call", "json", "picture", "draft")
"""What a run consists of, in its order."""

PICTURE_CHANCE = (1 / 10 + 1 / 8 + 1 / 8) / 3
"""Accuracy of an answer drawn blindly: ten digits, eight shapes, eight colours, a third each."""

_NEEDLE_TOKENS, _CALL_TOKENS, _JSON_TOKENS, _PICTURE_TOKENS = 24, 112, 128, 8
_BATCH = 32  # questions handed over at once
_KINDS = ("code", "prose")
_SWAP = 3  # pictures move by whole rounds of the three kinds, so that a question still makes sense
# Rough cost of one question beside its prompt, in prompt tokens; it moves the progress bar only.
_CALL_COST, _JSON_COST, _PICTURE_COST, _NEEDLE_COST = 420, 190, 90, 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamPlan:
    """How much is asked.

    `haystacks` maps a length in tokens to a number of haystacks, each with 16 needles; `windows` of
    `window_tokens` are read of either kind of text; `drafts` continuations of `draft_tokens` tokens
    are written after `draft_prompt` tokens of either kind. `budget_s` is how long it may take.
    """

    name: str
    haystacks: Mapping[int, int]
    windows: int
    window_tokens: int
    calls: int
    json: int
    pictures: int
    swapped: int
    drafts: int
    draft_prompt: int
    draft_tokens: int
    budget_s: float

    def cost(self, part: str) -> float:
        """Work of one of `PARTS` in prompt tokens, roughly."""
        match part:
            case "text":
                return len(_KINDS) * self.windows * self.window_tokens
            case "needle":
                return sum((n + 16 * _NEEDLE_COST) * c for n, c in self.haystacks.items())
            case "tool_call":
                return self.calls * _CALL_COST
            case "json":
                return self.json * _JSON_COST
            case "picture":
                return (self.pictures + self.swapped) * _PICTURE_COST
            case _:
                return len(_KINDS) * self.drafts * (self.draft_prompt + 4 * self.draft_tokens)


QUICK = ExamPlan(
    name="quick",
    haystacks={1024: 4, 2048: 4, 4096: 4, 8192: 4},
    windows=6,
    window_tokens=2048,
    calls=96,
    json=96,
    pictures=96,
    swapped=96,
    drafts=8,
    draft_prompt=256,
    draft_tokens=64,
    budget_s=300.0,
)
"""Under five minutes on two cores for the nano model."""

FULL = ExamPlan(
    name="full",
    haystacks={1024: 12, 2048: 12, 4096: 12, 8192: 12, 16384: 4, 32768: 4},
    windows=24,
    window_tokens=2048,
    calls=384,
    json=384,
    pictures=600,
    swapped=192,
    drafts=24,
    draft_prompt=256,
    draft_tokens=96,
    budget_s=2400.0,
)
"""What a published figure rests on; 16K and 32K are reported as they are."""


class Examinee(Protocol):
    """A model that can be examined."""

    @property
    def max_tokens(self) -> int:
        """The longest prompt and answer together."""
        ...

    @property
    def sees_pictures(self) -> bool:
        """Tell whether questions may hold pictures."""
        ...

    @property
    def drafts(self) -> bool:
        """Tell whether there is a draft block."""
        ...

    def count_tokens(self, text: str) -> int:
        """Return the tokens of plain text."""
        ...

    def ask(self, chats: Sequence[Chat]) -> list[Answer]:
        """Answer greedily, thinking off where the template can; in the order of the chats."""
        ...

    def read(self, kind: str, text: str, count: int, num_tokens: int) -> Iterator[TextWindow]:
        """Read `count` windows spread evenly over the text, by teacher forcing."""
        ...

    def write(
        self, kind: str, text: str, count: int, prompt_tokens: int, new_tokens: int
    ) -> Iterator[DraftRun]:
        """Continue `count` stretches of the text greedily, guessing ahead with the draft block."""
        ...


def run_exam(
    examinee: Examinee, plan: ExamPlan, tell: Tell, parts: Sequence[str] = PARTS
) -> ExamResult:
    """Ask what `plan` holds of the named parts and return what was found, item by item.

    Raises ConfigError for an unknown part, and what the examinee raises when it cannot work at all;
    a single failed question counts as wrong and is counted in `failures`.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise ConfigError("unknown part of the examination", got=unknown, wanted=", ".join(PARTS))
    result = ExamResult(sources={"code": list(HELD_OUT_CODE), "prose": list(HELD_OUT_PROSE)})
    run = _Run(examinee, plan, tell, result, sum(plan.cost(part) for part in parts))
    for part in PARTS:
        if part in parts:
            began = time.perf_counter()
            run.part(part)
            result.seconds[part] = round(time.perf_counter() - began, 2)
    return result


class _Run:
    """One examination under way."""

    def __init__(
        self, examinee: Examinee, plan: ExamPlan, tell: Tell, result: ExamResult, cost: float
    ) -> None:
        self._examinee, self._plan, self._result = examinee, plan, result
        self._tell, self._cost = tell, cost
        self._texts = read_held_out()

    def part(self, name: str) -> None:
        match name:
            case "text":
                self.texts()
            case "needle":
                self.needles()
            case "tool_call":
                self.tool_calls()
            case "json":
                self.json_answers()
            case "picture":
                self.pictures()
            case _:
                self.continuations()

    def texts(self) -> None:
        plan = self._plan
        for kind in _KINDS:
            text = self._texts[kind]
            for window in self._examinee.read(kind, text, plan.windows, plan.window_tokens):
                self._result.windows.append(window)
                self._note(kind, plan.window_tokens)

    def needles(self) -> None:
        for length, count in self._plan.haystacks.items():
            part = f"needle_{length}"
            if length + _NEEDLE_TOKENS > self._examinee.max_tokens:
                reason = f"the model takes {self._examinee.max_tokens} tokens at most"
                self._result.skipped[part] = reason
                self._note(part, (length + 16 * _NEEDLE_COST) * count)
                continue
            stacks = build_haystacks(length, count, self._examinee.count_tokens)
            for index, stack in enumerate(stacks):
                self._haystack(part, index, stack)
                self._note(part, length + len(stack.needles) * _NEEDLE_COST)

    def _haystack(self, part: str, index: int, stack: Haystack) -> None:
        """Ask all questions of one haystack together, so that they share its prefix."""
        answers = self._ask([_chat(stack.messages(n), _NEEDLE_TOKENS) for n in stack.needles])
        for number, (needle, answer) in enumerate(zip(stack.needles, answers, strict=True)):
            asked = [stack.messages(needle)[0]["content"]]
            item = item_name(index * len(stack.needles) + number, asked, needle.answer)
            self._add(judge_text(part, item, _depth(needle), answer, needle.answer))

    def tool_calls(self) -> None:
        items = build_tool_items(self._plan.calls)
        for part in _batches(items):
            chats = [_chat(i.messages, _CALL_TOKENS) | {"tools": i.tools} for _, i in part]
            for (index, item), answer in zip(part, self._ask(chats), strict=True):
                name = item_name(index, [item.messages, item.tools], [item.name, item.arguments])
                self._add(judge_call("tool_call", name, answer, item))
            self._note("tool_call", len(part) * _CALL_COST)

    def json_answers(self) -> None:
        for part in _batches(build_json_items(self._plan.json)):
            answers = self._ask([_chat(item.messages, _JSON_TOKENS) for _, item in part])
            for (index, item), answer in zip(part, answers, strict=True):
                name = item_name(index, item.messages, item.expected)
                self._add(judge_json("json", name, answer, item))
            self._note("json", len(part) * _JSON_COST)

    def pictures(self) -> None:
        plan = self._plan
        if not self._examinee.sees_pictures:
            self._result.skipped["picture"] = "the model has no vision tower"
            self._note("picture", (plan.pictures + plan.swapped) * _PICTURE_COST)
            return
        self._shown("picture", plan.pictures, 0)
        self._shown("picture_swapped", plan.swapped, _SWAP)

    def _shown(self, name: str, count: int, shift: int) -> None:
        """Ask about pictures; with a shift every question is shown another question's picture."""
        items = build_pictures(count)
        urls = [_data_url(item.image) for item in items]
        for part in _batches(items):
            chats = []
            for index, item in part:
                shown = {"type": "image_url", "image_url": {"url": urls[(index + shift) % count]}}
                content = [shown, {"type": "text", "text": item.question}]
                chats.append(_chat([{"role": "user", "content": content}], _PICTURE_TOKENS))
            for (index, item), answer in zip(part, self._ask(chats), strict=True):
                asked = [item.question, _pixels(items[(index + shift) % count].image)]
                label = item_name(index, asked, item.answer)
                self._add(judge_text(name, label, item.kind, answer, item.answer))
            self._note(name, len(part) * _PICTURE_COST)

    def continuations(self) -> None:
        plan, examinee = self._plan, self._examinee
        cost = plan.draft_prompt + 4 * plan.draft_tokens
        if not examinee.drafts:
            self._result.skipped["draft"] = "the model has no draft block"
            self._note("draft", len(_KINDS) * plan.drafts * cost)
            return
        for kind in _KINDS:
            sizes = (plan.drafts, plan.draft_prompt, plan.draft_tokens)
            for run in examinee.write(kind, self._texts[kind], *sizes):
                self._result.drafts.append(run)
                self._note("draft", cost)

    def _ask(self, chats: Sequence[Chat]) -> list[Answer]:
        answers = self._examinee.ask(chats)
        for answer in answers:
            self._result.failures += answer.end in ("failed", "refused")
            self._result.prompt_tokens += answer.prompt_tokens
            self._result.cached_tokens += answer.cached_tokens
        return answers

    def _add(self, outcome: Outcome) -> None:
        self._result.outcomes.append(outcome)

    def _note(self, part: str, cost: float) -> None:
        self._tell(part, cost / self._cost)


def _chat(messages: Sequence[Mapping[str, Any]], max_tokens: int) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": max_tokens}


def _batches(items: Sequence[Any]) -> Iterator[list[tuple[int, Any]]]:
    numbered = list(enumerate(items))
    for start in range(0, len(numbered), _BATCH):
        yield numbered[start : start + _BATCH]


def _depth(needle: Needle) -> str:
    """Name the quarter of the haystack where the needle lies."""
    quarter = min(3, int(needle.depth * 4))
    return f"{25 * quarter}-{25 * (quarter + 1)}%"


def _pixels(image: Image.Image) -> str:
    """Name a picture by its pixels: how a file packs them differs between machines."""
    return f"{image.size} {blake2b(image.tobytes(), digest_size=8).hexdigest()}"


def _data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
