"""What the model wrote, read as reasoning, text and tool calls.

Owns the state machine of the GLM answer format; streamed and whole answers go through it alike.
Knows no tokenizer and no HTTP.
Invariant: the events do not depend on how the answer was split; no mark and no undeclared call is
in them; the argument pieces of a call join to one JSON object unless the answer was cut.

Rules: thinking ends at `</think>` or where a tool call begins; a second `<think>` opens it again;
an answer that never closes its thinking is all reasoning. White space between and after calls is
dropped. A call to a function that was not declared is dropped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from oxplow.serve.formats.markup import Mark, Piece
from oxplow.serve.formats.values import ValueKind, json_of, property_schema, value_kind

__all__ = ["AnswerEvent", "AnswerParser", "CallArguments", "CallBegan", "Content", "Reasoning"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A stretch of thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A stretch of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call to a declared function, named whole. `number` counts calls of the answer from 0."""

    number: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


AnswerEvent = Reasoning | Content | CallBegan | CallArguments


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    NAME = auto()
    BETWEEN = auto()  # inside a call, outside keys and values
    KEY = auto()
    VALUE = auto()
    SKIPPING = auto()  # inside a call that is not delivered


class AnswerParser:
    """Reads one answer piece by piece.

    `tools` maps each declared function to its parameter schema. `new_id` makes call ids.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        starts_in_reasoning: bool,
    ) -> None:
        self._tools, self._new_id = tools, new_id
        self._state = _State.REASONING if starts_in_reasoning else _State.CONTENT
        self._text = ""  # a name, a key or a value so far
        self._spaces = ""  # white space after a call, dropped unless text follows
        self._name = ""
        self._key = ""
        self._num_arguments = 0
        self._streams_value = False
        self.num_calls = 0
        self.num_dropped = 0

    @property
    def is_reasoning(self) -> bool:
        """Tell whether the next text would be thinking."""
        return self._state is _State.REASONING

    @property
    def is_content(self) -> bool:
        """Tell whether the next text would be visible."""
        return self._state is _State.CONTENT

    def push(self, piece: Piece) -> list[AnswerEvent]:
        """Take a piece of the answer."""
        if piece.mark is None:
            return self._take_text(piece.text)
        return self._take_mark(piece.mark)

    def finish(self, *, is_cut: bool, held: Sequence[Piece] = ()) -> list[AnswerEvent]:
        """End the answer. A call that is open is completed, unless the answer was cut short.

        `held` is what a lexer withheld: inside a call that was cut, it may be half a mark.
        """
        is_outside = self._state in (_State.REASONING, _State.CONTENT, _State.SKIPPING)
        if is_cut and not is_outside:
            return []  # a name that was cut may be the start of a longer one
        events = [event for piece in held for event in self.push(piece)]
        return events if is_outside else events + self._end_call()

    def _take_text(self, text: str) -> list[AnswerEvent]:
        match self._state:
            case _State.REASONING:
                return [Reasoning(text)] if text else []
            case _State.CONTENT:
                return self._content(text)
            case _State.VALUE if self._streams_value:
                return [self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])] if text else []
            case _State.NAME | _State.KEY | _State.VALUE:
                self._text += text
        return []

    def _content(self, text: str) -> list[AnswerEvent]:
        if self.num_calls or self.num_dropped:
            text = self._spaces + text
            self._spaces = text if not text.strip() else ""
            text = "" if self._spaces else text
        return [Content(text)] if text else []

    def _take_mark(self, mark: Mark) -> list[AnswerEvent]:
        match mark:
            case Mark.THINK:
                return self._leave_call(_State.REASONING)
            case Mark.THINK_END:
                if self._state is _State.REASONING:
                    self._state = _State.CONTENT
                return []
            case Mark.CALL:
                events = self._leave_call(_State.NAME)
                self._text, self._num_arguments, self._spaces = "", 0, ""
                return events
            case Mark.CALL_END:
                return self._leave_call(_State.CONTENT)
            case _:
                return self._take_argument_mark(mark)

    def _take_argument_mark(self, mark: Mark) -> list[AnswerEvent]:
        if self._state in (_State.REASONING, _State.CONTENT, _State.SKIPPING):
            return []
        events: list[AnswerEvent] = []
        if self._state is _State.NAME:
            if not self._is_declared():
                self._drop_call()
                return []
            events += self._begin_call()
        if self._state is _State.VALUE:
            events += self._end_value()
        elif self._state is _State.KEY:
            self._key = self._text.strip()
            self._state = _State.BETWEEN
        self._text = ""
        if mark is Mark.KEY:
            self._state, self._key = _State.KEY, ""
        elif mark is Mark.VALUE and self._key:
            events += self._begin_value()
        return events

    def _leave_call(self, state: _State) -> list[AnswerEvent]:
        """Go to `state`; a call that is open ends here."""
        events: list[AnswerEvent] = []
        if self._state not in (_State.REASONING, _State.CONTENT, _State.SKIPPING):
            events = self._end_call()
        self._state = state
        return events

    def _end_call(self) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        if self._state is _State.NAME:
            if not self._is_declared():
                self._drop_call()
                return []
            events += self._begin_call()
        if self._state is _State.VALUE:
            events += self._end_value()
        events.append(self._arguments("}" if self._num_arguments else "{}"))
        self._state = _State.CONTENT
        return events

    def _is_declared(self) -> bool:
        return self._text.strip() in self._tools

    def _drop_call(self) -> None:
        self.num_dropped += 1
        self._state = _State.SKIPPING

    def _begin_call(self) -> list[AnswerEvent]:
        self._name, self._state, self._text = self._text.strip(), _State.BETWEEN, ""
        self.num_calls += 1
        return [CallBegan(self.num_calls - 1, self._new_id(), self._name)]

    def _begin_value(self) -> list[AnswerEvent]:
        schema = self._tools[self._name]
        kind = value_kind(property_schema(schema, self._key), schema)
        self._streams_value = kind is ValueKind.TEXT
        self._state = _State.VALUE
        lead = "{" if self._num_arguments == 0 else ", "
        self._num_arguments += 1
        key = json.dumps(self._key, ensure_ascii=False)
        return [self._arguments(f"{lead}{key}: {chr(34) if self._streams_value else ''}")]

    def _end_value(self) -> list[AnswerEvent]:
        self._state = _State.BETWEEN
        if self._streams_value:
            return [self._arguments('"')]
        schema = self._tools[self._name]
        text, self._text = self._text, ""
        return [self._arguments(json_of(text, property_schema(schema, self._key), schema))]

    def _arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_calls - 1, text)
