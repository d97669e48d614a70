"""Reading of GLM answers: reasoning, text and calls are the same however the answer was cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxplow.serve.formats.answer import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallBegan,
    Content,
    Reasoning,
)
from oxplow.serve.formats.markup import TextLexer
from oxplow.serve.formats.values import json_of

TOOLS: dict[str, dict[str, Any]] = {
    "get": {},
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"enum": ["c", "f"]}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/Where"},
        },
        "$defs": {"Where": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
    "get_weather_hourly": {"type": "object", "properties": {"note": {"type": "string"}}},
}


def call(name: str, **arguments: str) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


THREE = (
    "let me see</think>Now:"
    + call("get_weather", city="Paris <3 </b> \n é", days="3", where='{"lat": 1.5}')
    + "\n"
    + call("get")
    + call("get_weather_hourly", note='say "1"')
)


def read(
    pieces: list[str], *, thinking: bool = True, cut: bool = False, tools: Any = TOOLS
) -> tuple[list[AnswerEvent], AnswerParser]:
    """Feed pieces of text and return all events."""
    numbers = itertools.count()
    parser = AnswerParser(tools, lambda: f"id{next(numbers)}", starts_in_reasoning=thinking)
    lexer = TextLexer()
    events: list[AnswerEvent] = []
    for piece in pieces:
        for lexed in lexer.push(piece):
            events += parser.push(lexed)
    return events + parser.finish(is_cut=cut, held=lexer.finish()), parser


def whole(events: list[AnswerEvent]) -> dict[str, Any]:
    """Put events together as a client does, checking that pieces only append."""
    calls: list[dict[str, str]] = []
    for event in events:
        if isinstance(event, CallBegan):
            assert event.number == len(calls)
            calls.append({"id": event.call_id, "name": event.name, "arguments": ""})
        elif isinstance(event, CallArguments):
            assert event.number == len(calls) - 1, "arguments of an earlier call came late"
            calls[-1]["arguments"] += event.text
    return {
        "reasoning": "".join(e.text for e in events if isinstance(e, Reasoning)),
        "content": "".join(e.text for e in events if isinstance(e, Content)),
        "calls": calls,
    }


def test_three_calls_are_told_apart_and_typed() -> None:
    told = whole(read([THREE])[0])
    assert told["reasoning"] == "let me see"
    assert told["content"] == "Now:"
    assert [c["name"] for c in told["calls"]] == ["get_weather", "get", "get_weather_hourly"]
    assert [json.loads(c["arguments"]) for c in told["calls"]] == [
        {"city": "Paris <3 </b> \n é", "days": 3, "where": {"lat": 1.5}},
        {},
        {"note": 'say "1"'},
    ]
    assert len({c["id"] for c in told["calls"]}) == 3


@pytest.mark.parametrize("size", range(1, 8))
def test_pieces_of_any_size_give_the_same_answer(size: int) -> None:
    pieces = [THREE[i : i + size] for i in range(0, len(THREE), size)]
    assert whole(read(pieces)[0]) == whole(read([THREE])[0])


@pytest.mark.parametrize("at", range(len(THREE)))
def test_a_cut_at_any_place_gives_the_same_answer(at: int) -> None:
    assert whole(read([THREE[:at], THREE[at:]])[0]) == whole(read([THREE])[0])


@given(st.lists(st.integers(0, len(THREE)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_answer(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(THREE)]
    pieces = [THREE[a:b] for a, b in itertools.pairwise(places)]
    assert whole(read(pieces)[0]) == whole(read([THREE])[0])


@pytest.mark.parametrize("end", range(len(THREE)))
def test_a_cut_answer_names_no_function_that_it_did_not_finish(end: int) -> None:
    events, _ = read([THREE[:end]], cut=True)
    full = whole(read([THREE])[0])["calls"]
    for seen, meant in zip(whole(events)["calls"], full, strict=False):
        assert seen["name"] == meant["name"]
        assert meant["arguments"].startswith(seen["arguments"])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("</think><tool_call>get</tool_call>", {}),
        ("</think><tool_call>get\n</tool_call>", {}),
        ("</think><tool_call>get", {}),
        ("</think><tool_call>\nget\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", {"a": 1}),
        ("</think><tool_call>get<arg_key>a</arg_key><arg_value>{bad", {"a": "{bad"}),
        ("</think><tool_call>get<arg_key>a</arg_key></tool_call>", {}),
    ],
)
def test_short_and_unclosed_calls_are_completed(text: str, arguments: dict[str, object]) -> None:
    (only,) = whole(read([text])[0])["calls"]
    assert only["name"] == "get"
    assert json.loads(only["arguments"]) == arguments


@pytest.mark.parametrize("name", ["", "ge", "get_", "get_weather_daily", "rm -rf", "GET"])
def test_an_undeclared_function_never_leaves_as_a_call(name: str) -> None:
    events, parser = read(["</think>A" + call(name, x="1") + call("get")])
    told = whole(events)
    assert [c["name"] for c in told["calls"]] == ["get"]
    assert told["content"] == "A"
    assert parser.num_dropped == 1


# P20: (text, starts in thinking) -> (thinking, content, calls)
@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("a" + call("get"), True, ("a", "", 1)),
        ("a" + call("get") + "</think>b", True, ("a", "b", 1)),
        ("a</think>b<think>c</think>d", True, ("ac", "bd", 0)),
        ("a", True, ("a", "", 0)),
        ("a", False, ("", "a", 0)),
        (call("get"), False, ("", "", 1)),
        (call("get") + call("get"), False, ("", "", 2)),
        (call("get") + "\n\n" + call("get") + "\n", False, ("", "", 2)),
        (call("get") + " then", False, ("", " then", 1)),
        ("</think>", True, ("", "", 0)),
        ("x</arg_key><arg_value>y", False, ("", "xy", 0)),
        ("a < b </ c <tool", False, ("", "a < b </ c <tool", 0)),
    ],
)
def test_thinking_ends_where_the_rule_says(
    text: str, thinking: bool, expected: tuple[str, str, int]
) -> None:
    for pieces in ([text], list(text)):
        told = whole(read(pieces, thinking=thinking)[0])
        assert (told["reasoning"], told["content"], len(told["calls"])) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, '"1"', '"1"'),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "1", 1),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", "True"),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": "b"}', {"a": "b"}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "7", "7"),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "x"}, "x", "x"),
        ({}, "7", 7),
        ({}, "seven", "seven"),
        (True, "7", 7),
        ({"type": "number"}, "NaN", "NaN"),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"$ref": "#/nowhere"}, "7", 7),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, expected: object) -> None:
    root = {"$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}
    assert json.loads(json_of(text, schema, root)) == expected
