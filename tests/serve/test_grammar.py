"""Enforced answers: whatever is drawn, the answer is what was asked for."""

import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxplow.errors import RequestError
from oxplow.serve.engine_port import GrammarSpec
from oxplow.serve.formats.answer import AnswerParser, CallArguments, CallBegan
from oxplow.serve.formats.markup import Mark, Piece
from oxplow.serve.grammar import AnswerRule, ToolShape, answer_grammar, call_grammar
from oxplow.serve.mask import LateMask, MaskFactory, grammar_fault
from oxplow.serve.prepare.jobs import prepare
from oxplow.serve.prepare.prepared import PrepareSettings
from oxplow.serve.text import Vocabulary, load_text
from tests.serve.model_dir import EOS, ID, VOCAB_SIZE

WEATHER = ToolShape(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Ro/me"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "code": {"type": "string", "pattern": "^[a-c]{2}/x$"},
            "where": {"$ref": "#/$defs/Where"},
            "note": {"type": "string", "maxLength": 3},
        },
        "required": ["city", "days", "code", "where"],
        "$defs": {
            "Where": {
                "type": "object",
                "properties": {"far": {"type": "boolean"}},
                "required": ["far"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = ToolShape(name="now")
SCHEMA = {
    "type": "object",
    "title": "Answer",
    "description": "what llguidance need not know",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "maybe": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Two"}]},
    },
    "required": ["kind", "count", "maybe"],
    "additionalProperties": False,
    "$defs": {"Two": {"const": 2}},
}


@lru_cache
def vocabulary(folder: Path) -> Vocabulary:
    return load_text(folder).vocabulary


def draw(folder: Path, rule: AnswerRule, seed: int, most: int = 400) -> list[int]:
    """Draw evenly among the allowed tokens until the grammar is complete."""
    control = vocabulary(folder).control
    factory = MaskFactory(folder / "tokenizer.json", VOCAB_SIZE, EOS)
    mask = factory.make(answer_grammar(rule, control)).copy()
    rng = random.Random(seed)
    drawn: list[int] = []
    while not mask.is_complete() and len(drawn) < most:
        words = np.asarray(mask.allowed_words()).view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[:VOCAB_SIZE]).tolist()
        assert allowed, "the grammar is stuck"
        token = rng.choice(allowed)
        if token in EOS:
            break
        mask.advance(token)
        drawn.append(token)
    return drawn


def said(folder: Path, ids: list[int]) -> str:
    return vocabulary(folder).decode(ids, skip_special=False)


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_is_kept_after_bounded_thinking(model_dir: Path, seed: int) -> None:
    drawn = draw(model_dir, AnswerRule(schema=SCHEMA, thinking_tokens=8), seed)
    assert ID["</think>"] in drawn[:9]
    answer = json.loads(said(model_dir, drawn[drawn.index(ID["</think>"]) + 1 :]))
    assert answer["kind"] in ("a", "b")
    assert 1 <= answer["count"] <= 20
    assert answer["maybe"] in (None, 2)


@pytest.mark.parametrize("seed", range(6))
def test_enforced_calls_parse_to_declared_functions(model_dir: Path, seed: int) -> None:
    drawn = draw(model_dir, AnswerRule(calls=(WEATHER, NOW), thinking_tokens=4), seed)
    tools = {t.name: t.parameters for t in (WEATHER, NOW)}
    parser = AnswerParser(tools, lambda: "id", starts_in_reasoning=True)
    marks = {ID[m.value]: m for m in Mark}
    events = []
    for token in drawn:
        mark = marks.get(token)
        text = "" if mark else said(model_dir, [token])
        events += parser.push(Piece(text, mark))
    events += parser.finish(is_cut=False)
    names = [e.name for e in events if isinstance(e, CallBegan)]
    assert names
    for number, name in enumerate(names):
        pieces = [e.text for e in events if isinstance(e, CallArguments) and e.number == number]
        arguments = json.loads("".join(pieces))
        if name == "now":
            assert arguments == {}
            continue
        assert arguments["city"] in ("Paris", "Ro/me")
        assert arguments["days"] in range(10)
        assert re.fullmatch("[a-c]{2}/x", arguments["code"])
        assert isinstance(arguments["where"]["far"], bool)


def test_one_call_is_enough_where_calls_may_not_be_parallel(model_dir: Path) -> None:
    for seed in range(8):
        drawn = draw(model_dir, AnswerRule(calls=(NOW,), is_parallel=False), seed)
        assert drawn.count(ID["<tool_call>"]) == 1


@pytest.mark.parametrize("seed", range(4))
def test_schema_beside_tools_gives_either(model_dir: Path, seed: int) -> None:
    drawn = draw(model_dir, AnswerRule(schema=SCHEMA, calls=(NOW,)), seed)
    text = said(model_dir, drawn)
    assert text.startswith("<tool_call>now</tool_call>") or json.loads(text)["kind"]


@pytest.mark.parametrize("seed", range(3))
def test_patterns_and_grammars_are_kept(model_dir: Path, seed: int) -> None:
    pattern = "a/b[0-9]{3}\n?"
    assert re.fullmatch(pattern, said(model_dir, draw(model_dir, AnswerRule(regex=pattern), seed)))
    lark = 'start: "x" tail\ntail: /[0-9]{2}/'
    drawn = draw(model_dir, AnswerRule(lark=lark, thinking_tokens=2), seed)
    assert re.search("</think>x[0-9]{2}$", said(model_dir, drawn))


@pytest.mark.parametrize(
    "rule",
    [
        AnswerRule(schema={"type": "banana"}),
        AnswerRule(schema={"type": "integer", "minimum": 2, "maximum": 1}),
        AnswerRule(regex="(a+"),
        AnswerRule(lark="start: missing"),
        AnswerRule(lark="%%%"),
        AnswerRule(schema={"type": "string", "format": "no-such"}, is_lenient=False),
    ],
    ids=["type", "range", "regex", "lark", "lark-syntax", "strict"],
)
def test_what_cannot_be_enforced_is_said(model_dir: Path, rule: AnswerRule) -> None:
    control = vocabulary(model_dir).control
    grammar = answer_grammar(rule, control)
    factory = MaskFactory(model_dir / "tokenizer.json", VOCAB_SIZE, EOS)
    fault = grammar_fault(grammar)
    with pytest.raises(RequestError):
        factory.make(grammar)
    assert fault or rule.schema == {"type": "integer", "minimum": 2, "maximum": 1}


def test_a_model_without_call_tokens_says_so() -> None:
    with pytest.raises(RequestError, match="<tool_call>"):
        answer_grammar(AnswerRule(calls=(NOW,)), {})


def test_a_tool_s_hostile_name_stays_text(model_dir: Path) -> None:
    odd: Any = ToolShape(name='a"b\\c</tool_call>')
    text = said(model_dir, draw(model_dir, AnswerRule(calls=(odd,), is_parallel=False), 0))
    assert text == '<tool_call>a"b\\c</tool_call></tool_call>'


# Calls that the model begins by itself.

CALL, CALL_END = ID["<tool_call>"], ID["</tool_call>"]


def late(folder: Path, *tools: ToolShape, once: bool = False) -> LateMask:
    """Return the mask of an answer that may call `tools`."""
    text = call_grammar(tools, vocabulary(folder).control)
    factory = MaskFactory(folder / "tokenizer.json", VOCAB_SIZE, EOS)
    mask = factory.of(GrammarSpec(text=text, after=CALL, once=once)).copy()
    assert isinstance(mask, LateMask)
    return mask


def call(mask: LateMask, rng: random.Random) -> list[int]:
    """Open a call, draw evenly among the allowed tokens until the mask lets go."""
    mask.advance(CALL)
    drawn = [CALL]
    while (words := mask.allowed_words()) is not None and len(drawn) < 600:
        bits = np.unpackbits(np.asarray(words, dtype=np.int32).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:VOCAB_SIZE]).tolist()
        assert not set(allowed) & set(EOS), "a call that was begun is brought to its end"
        drawn.append(rng.choice(allowed))
        mask.advance(drawn[-1])
        if drawn[-1] == CALL_END:
            break
    return drawn


@pytest.mark.parametrize("seed", range(6))
def test_a_call_that_the_model_begins_is_held_to_the_schema(model_dir: Path, seed: int) -> None:
    mask = late(model_dir, WEATHER, NOW)
    tools = {t.name: t.parameters for t in (WEATHER, NOW)}
    for token in (65, ID["</think>"], 66, *EOS):
        assert mask.allowed_words() is None
        mask.advance(token)
    rng = random.Random(seed)
    drawn = [*call(mask, rng), 67, *call(mask.copy(), rng)]
    assert not mask.is_complete()
    parser = AnswerParser(tools, lambda: "id", starts_in_reasoning=False)
    marks = {ID[m.value]: m for m in Mark}
    events = []
    for token in drawn:
        text = "" if token in marks else said(model_dir, [token])
        events += parser.push(Piece(text, marks.get(token)))
    events += parser.finish(is_cut=False)
    names = [e.name for e in events if isinstance(e, CallBegan)]
    assert len(names) == 2
    for number, name in enumerate(names):
        pieces = [e.text for e in events if isinstance(e, CallArguments) and e.number == number]
        arguments = json.loads("".join(pieces))
        if name == "get_weather":
            assert arguments["city"] in ("Paris", "Ro/me")
            assert arguments["days"] in range(10)
        else:
            assert arguments == {}


def test_a_second_call_is_forbidden_where_one_is_the_most(model_dir: Path) -> None:
    mask = late(model_dir, NOW, once=True)
    call(mask, random.Random(0))
    words = mask.allowed_words()
    assert words is not None
    bits = np.unpackbits(np.asarray(words, dtype=np.int32).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits[:VOCAB_SIZE] == 0).tolist() == [CALL]
    assert mask.copy().allowed_words() is not None


def test_a_tool_without_declared_arguments_takes_any(model_dir: Path) -> None:
    mask = late(model_dir, ToolShape(name="run", parameters={"type": "object"}))
    plain = vocabulary(model_dir).encode_plain
    key, end = ID["<arg_key>"], ID["</arg_key>"]
    for token in (CALL, *plain("run"), key, *plain("x"), end, ID["<arg_value>"]):
        words = mask.allowed_words()
        assert words is None or words[token // 32] >> (token % 32) & 1
        mask.advance(token)


@pytest.mark.parametrize("choice", ["auto", None])
def test_requests_with_tools_carry_the_late_grammar(model_dir: Path, choice: str | None) -> None:
    settings = PrepareSettings(directory=model_dir, names=("a",))
    broken = {"type": "object", "properties": {"n": {"type": "banana"}}, "required": ["n"]}
    tools = [
        {"type": "function", "function": {"name": "good", "parameters": WEATHER.parameters}},
        {"type": "function", "function": {"name": "broken", "parameters": broken}},
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    body |= {"tool_choice": choice, "parallel_tool_calls": False}
    (work,) = prepare(settings, json.dumps(body).encode(), "chat").works
    assert work.grammar is not None and work.grammar.after == CALL and work.grammar.once
    assert not grammar_fault(work.grammar.text)
    assert "Paris" in work.grammar.text and "banana" not in work.grammar.text
    (none,) = prepare(settings, json.dumps({**body, "tool_choice": "none"}).encode(), "chat").works
    assert none.grammar is None
