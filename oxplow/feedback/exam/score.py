"""Whether an answer is right: one judge per family of questions.

Owns the rules. Knows no model and no template: it sees what an API client would see.
Invariant: nothing is forgiven but white space around an answer; 1, 1.0, true and "1" are told
apart as the schema tells them apart, and a number is right where its value is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from oxplow.feedback.exam.outcomes import Outcome
from oxplow.feedback.exam.structured import JsonItem
from oxplow.feedback.exam.tools import ToolItem
from oxplow.feedback.exam.values import JsonValue

__all__ = ["Answer", "ToolCall", "judge_call", "judge_json", "judge_text"]

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the API delivers it: `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one question. `end` is stop, tool_calls, length, failed or refused."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    end: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __str__(self) -> str:
        calls = "".join(f" {c.name}({c.arguments})" for c in self.calls)
        return f"{self.text}{calls} [{self.end}]"


def judge_text(part: str, item: str, group: str, answer: Answer, wanted: str) -> Outcome:
    """Judge a short answer: the wanted text and nothing else."""
    is_right = answer.text.strip() == wanted and not answer.calls
    return _outcome(part, item, group, answer, is_right, is_right, wanted)


def judge_call(part: str, item: str, answer: Answer, question: ToolItem) -> Outcome:
    """Judge a tool call: one call, the right name, exactly the right arguments of the right types.

    `is_valid` means one call of an offered tool whose arguments are an object.
    """
    wanted = f"{question.name}({json.dumps(question.arguments)})"
    arguments = _parsed(answer.calls[0].arguments) if len(answer.calls) == 1 else None
    is_valid = isinstance(arguments, dict)
    is_right = is_valid and answer.calls[0].name == question.name
    is_right = is_right and _same_object(arguments, question.arguments)
    return _outcome(part, item, question.name, answer, is_right, is_valid, wanted)


def judge_json(part: str, item: str, answer: Answer, question: JsonItem) -> Outcome:
    """Judge a JSON answer: valid by keys and types, right where every value is the wanted one."""
    found = _parsed(answer.text)
    is_valid = isinstance(found, dict) and _fits(found, question.schema)
    is_right = is_valid and _same_object(found, question.expected)
    wanted = json.dumps(question.expected)
    return _outcome(part, item, "", answer, is_right, is_valid, wanted)


def _outcome(
    part: str, item: str, group: str, answer: Answer, is_right: bool, is_valid: bool, wanted: str
) -> Outcome:
    return Outcome(
        part=part,
        item=item,
        group=group,
        is_right=is_right,
        is_valid=is_valid,
        got="" if is_right else str(answer)[:_SHOWN],
        wanted="" if is_right else wanted[:_SHOWN],
    )


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _same_object(found: object, wanted: Mapping[str, JsonValue]) -> bool:
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        return False
    return all(_same_value(found[key], value) for key, value in wanted.items())


def _same_value(found: object, wanted: JsonValue) -> bool:
    """Compare by type and value; a whole number serves where any number is wanted."""
    if isinstance(wanted, float):
        return _is_number(found) and found == wanted
    return type(found) is type(wanted) and found == wanted


def _fits(found: Mapping[str, object], schema: Mapping[str, object]) -> bool:
    properties = schema["properties"]
    if not isinstance(properties, Mapping) or found.keys() != properties.keys():
        return False
    return all(_has_type(found[key], properties[key]["type"]) for key in properties)


def _has_type(value: object, name: str) -> bool:
    match name:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return _is_number(value)
        case _:
            return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
