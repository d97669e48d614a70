"""Grammars for answers: JSON, schemas, patterns, and the GLM form of a tool call.

Owns the text of grammars, in llguidance's Lark dialect. Knows no token mask and no HTTP.
Invariant: what a grammar lets through is what `formats.answer` reads back: a call of a declared
function with its required arguments, each of its type.

Reasoning comes first where the prompt has opened it: free text of a bounded number of tokens, then
`</think>`. Control strings are named by token id, so text cannot forge them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oxplow.errors import RequestError
from oxplow.serve.formats.markup import Mark
from oxplow.serve.formats.values import ValueKind, value_kind, with_definitions

__all__ = ["AnswerRule", "ToolShape", "answer_grammar", "call_grammar"]

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ARGUMENT = (Mark.KEY, Mark.KEY_END, Mark.VALUE, Mark.VALUE_END)
_TEXT = r"/(?s:.*)/"
_MOST_REPEATS = 4096  # larger length bounds cost more than they help


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolShape:
    """Name a function and the schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    """Say what an answer must be.

    `schema` asks for JSON (True: any object; lenient skips what llguidance cannot enforce), `regex`
    and `lark` for text, `calls` for calls of these tools; `schema` and `calls` together: either.
    `thinking_tokens` bounds reasoning; None: the prompt opens none.
    """

    schema: Mapping[str, Any] | bool | None = None
    is_lenient: bool = True
    regex: str | None = None
    lark: str | None = None
    calls: Sequence[ToolShape] = ()
    is_parallel: bool = True
    thinking_tokens: int | None = None


def answer_grammar(rule: AnswerRule, control: Mapping[str, int]) -> str:
    """Write the grammar; `control` maps control strings to token ids.

    Raises RequestError where the model lacks the tokens of tool calls.
    """
    lines: list[str] = []
    bodies: list[str] = []
    if rule.schema is not None:
        bodies.append("answer")
        lines.append(f"answer: {_json_rule(rule.schema, is_lenient=rule.is_lenient)}")
    if rule.regex is not None:
        bodies.append("answer")
        lines.append(f"answer: {_regex(rule.regex)}")
    if rule.lark is not None:
        bodies.append("@user")
    if rule.calls:
        bodies.append("calls")
        lines += _call_rules(rule, control)
    start = f"start: {_thought(rule, control)}({' | '.join(bodies)})"
    if rule.thinking_tokens is not None:
        lines.append(f"thought[max_tokens={max(1, rule.thinking_tokens)}]: {_TEXT}")
    grammars = [{"name": "answer_format", "lark_grammar": "\n".join([start, *lines])}]
    if rule.lark is not None:
        grammars.append({"name": "user", "lark_grammar": rule.lark})
    return json.dumps({"grammars": grammars})


def call_grammar(tools: Sequence[ToolShape], control: Mapping[str, int]) -> str:
    """Write the grammar of one call after its opening token, the closing token included.

    A tool without declared properties takes any arguments. Raises RequestError where the model
    lacks the tokens of tool calls.
    """
    names = " | ".join(f"tool_{i}" for i in range(len(tools)))
    lines = [f"start: ({names}) {_mark(Mark.CALL_END, control)}", f"text: {_TEXT}"]
    for i, tool in enumerate(tools):
        if _is_free(tool):
            marks = [_mark(m, control) for m in _ARGUMENT]
            lines.append(f"tool_{i}: {json.dumps(tool.name)} any_{i}*")
            lines.append(f"any_{i}: {marks[0]} text {marks[1]} {marks[2]} text {marks[3]}")
        else:
            lines += _tool_rules(i, tool, control)
    return json.dumps({"grammars": [{"name": "call", "lark_grammar": "\n".join(lines)}]})


def _is_free(tool: ToolShape) -> bool:
    """Tell whether a tool says nothing of its arguments but that there may be some."""
    return bool(tool.parameters) and "properties" not in tool.parameters


def _thought(rule: AnswerRule, control: Mapping[str, int]) -> str:
    return "" if rule.thinking_tokens is None else f"thought {_mark(Mark.THINK_END, control)} "


def _call_rules(rule: AnswerRule, control: Mapping[str, int]) -> list[str]:
    opened, closed = _mark(Mark.CALL, control), _mark(Mark.CALL_END, control)
    names = " | ".join(f"tool_{i}" for i in range(len(rule.calls)))
    lines = [
        f"calls: call{'+' if rule.is_parallel else ''}",
        f"call: {opened} ({names}) {closed}",
        f"text: {_TEXT}",
    ]
    for i, tool in enumerate(rule.calls):
        lines += _tool_rules(i, tool, control)
    return lines


def _tool_rules(number: int, tool: ToolShape, control: Mapping[str, int]) -> list[str]:
    """Write one function: its name, then its arguments in declared order."""
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required")
    required = {str(r) for r in required} if isinstance(required, list) else set()
    uses: list[str] = []
    lines: list[str] = []
    for i, (key, schema) in enumerate(properties.items()):
        name = f"arg_{number}_{i}"
        uses.append(name if key in required else f"{name}?")
        marks = [_mark(m, control) for m in _ARGUMENT]
        value = _value_rule(schema, tool.parameters)
        lines.append(
            f"{name}: {marks[0]} {json.dumps(str(key))} {marks[1]} {marks[2]} ({value}) {marks[3]}"
        )
    return [f"tool_{number}: {json.dumps(tool.name)} {' '.join(uses)}".rstrip(), *lines]


def _value_rule(schema: Any, parameters: Mapping[str, Any]) -> str:
    """Write a value: raw text where the schema is text, JSON elsewhere, both where both may be."""
    kind = value_kind(schema, parameters)
    if kind is ValueKind.TEXT:
        return _text_rule(schema)
    if kind is ValueKind.UNKNOWN:
        return "text"
    whole = _json_rule(with_definitions(schema, parameters), is_lenient=True)
    return whole if kind is ValueKind.JSON else f"{whole} | text"


def _text_rule(schema: Any) -> str:
    """Write raw text; enumerations, patterns and lengths are enforced."""
    if not isinstance(schema, Mapping):
        return "text"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return " | ".join(json.dumps(c) for c in choices)
    if isinstance(schema.get("pattern"), str):
        return _searched(schema["pattern"])
    low, high = schema.get("minLength"), schema.get("maxLength")
    if isinstance(low, int) or isinstance(high, int):
        least = min(low, _MOST_REPEATS) if isinstance(low, int) else 0
        most = str(high) if isinstance(high, int) and high <= _MOST_REPEATS else ""
        return f"/(?s:.){{{least},{most}}}/"
    return "text"


def _searched(pattern: str) -> str:
    """Write a schema's pattern, which may match anywhere unless it is anchored."""
    start = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    body = pattern[1:] if pattern.startswith("^") else pattern
    body = body[:-1] if ends else body
    return _regex(f"{start}({body}){'' if ends else '(?s:.*)'}")


def _regex(pattern: str) -> str:
    """Write a pattern as a Lark terminal; the slash ends one."""
    return "/" + pattern.replace("/", r"\/").replace("\n", r"\n") + "/"


def _json_rule(schema: Mapping[str, Any] | bool, *, is_lenient: bool) -> str:
    """Write a JSON value of one fixed form, so that white space cannot go on for ever."""
    body: dict[str, Any] = {"type": "object"} if schema is True else dict(schema or {})
    body["x-guidance"] = {**_JSON_FORM, "lenient": is_lenient}
    return f"%json {json.dumps(body)}"


def _mark(mark: Mark, control: Mapping[str, int]) -> str:
    token = control.get(mark.value)
    if token is None:
        raise RequestError(
            f"this model has no {mark.value} token, so the answer cannot be enforced",
            param="tool_choice",
            code="unsupported",
        )
    return f"<[{token}]>"
