"""From the engine's tokens to what clients are told: text, reasoning, calls, ends, counts.

Owns decoding, stop texts and usage of one request. Knows no wire form: the rooms of `api` write it.
Invariant: the events of a request do not depend on how its tokens were grouped into steps; every
choice ends with exactly one `Ended`.

In chat answers stop texts apply to the visible text, not to reasoning and arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from oxplow.serve.engine_port import Delta, TokenRow
from oxplow.serve.formats.answer import AnswerEvent, AnswerParser, Content, Reasoning
from oxplow.serve.formats.markup import Mark, Piece, TextLexer
from oxplow.serve.prepare.prepared import AnswerShape
from oxplow.serve.stops import StopSearch
from oxplow.serve.text import TextStream, Vocabulary

__all__ = ["AnswerReader", "ChoiceEvent", "Ended", "Scored", "Usage", "new_call_id"]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of tokens of the visible answer; they belong to the text told next."""

    rows: tuple[TokenRow, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a choice: stop, length, tool_calls, aborted or failed."""

    reason: str
    stop_text: str | None = None
    failure: str = ""


ChoiceEvent = AnswerEvent | Scored | Ended


@dataclass(slots=True)
class Usage:
    """Count tokens; the prompt counts once for all choices."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    miss: str = ""


@dataclass(slots=True)
class _Choice:
    """What is known of one choice so far."""

    stream: TextStream
    lexer: TextLexer | None
    parser: AnswerParser | None
    stop: StopSearch
    has_ended: bool = False
    events: list[ChoiceEvent] = field(default_factory=list)


def new_call_id() -> str:
    """Return a fresh id of a tool call."""
    return "call_" + secrets.token_hex(12)


class AnswerReader:
    """Reads the deltas of one work and returns events by choice.

    `end_choice` is called when a stop text ends a choice before the engine does.
    """

    def __init__(
        self,
        shape: AnswerShape,
        vocabulary: Vocabulary,
        num_choices: int,
        end_choice: Callable[[int], None],
    ) -> None:
        self._shape, self._vocabulary, self._end_choice = shape, vocabulary, end_choice
        self._marks = _mark_tokens(vocabulary) if shape.is_chat else {}
        self.usage = Usage()
        self.prompt_rows: tuple[TokenRow, ...] | None = None
        self.queued_s: float | None = None
        self.num_dropped_calls = 0
        self._choices = [self._open() for _ in range(num_choices)]

    @property
    def is_finished(self) -> bool:
        """Tell whether every choice has ended."""
        return all(choice.has_ended for choice in self._choices)

    def read(self, deltas: Iterable[Delta]) -> list[tuple[int, ChoiceEvent]]:
        """Take deltas and return (choice, event) pairs; text of one kind is joined."""
        told: list[tuple[int, ChoiceEvent]] = []
        for delta in deltas:
            if delta.cached_tokens is not None:
                self.usage.cached_tokens, self.usage.miss = delta.cached_tokens, delta.miss
            if delta.queued_s is not None:
                self.queued_s = delta.queued_s
            if delta.prompt_rows is not None:
                self.prompt_rows = delta.prompt_rows
            choice = self._choices[delta.index]
            if choice.has_ended:
                continue
            self._take(choice, delta)
            told += [(delta.index, event) for event in choice.events]
            choice.events = []
        return _joined(told)

    def _open(self) -> _Choice:
        shape = self._shape
        parser = None
        if shape.is_chat:
            tools = {tool.name: tool.parameters for tool in shape.tools}
            parser = AnswerParser(tools, new_call_id, starts_in_reasoning=shape.starts_in_reasoning)
        return _Choice(
            stream=TextStream(self._vocabulary, skip_special=shape.skips_special),
            lexer=TextLexer() if shape.is_chat and not self._marks else None,
            parser=parser,
            stop=StopSearch(shape.stops, keeps_stop=shape.keeps_stop),
        )

    def _take(self, choice: _Choice, delta: Delta) -> None:
        rows = delta.rows or ()
        for number, token in enumerate(delta.token_ids):
            self.usage.completion_tokens += 1
            row = rows[number] if number < len(rows) else None
            if self._take_token(choice, token, row):
                self._end_choice(delta.index)
                return
        if delta.finish is not None:
            self._end(choice, delta)

    def _take_token(self, choice: _Choice, token: int, row: TokenRow | None) -> bool:
        """Read one token; True where a stop text is complete."""
        parser = choice.parser
        if parser is not None and parser.is_reasoning:
            self.usage.reasoning_tokens += 1
        mark = self._marks.get(token)
        is_visible = parser is None or (parser.is_content and mark is None)
        if row is not None and is_visible and token not in self._hidden():
            choice.events.append(Scored((row,)))
        if mark is None:
            return self._take_text(choice, choice.stream.push(token))
        return self._take_text(choice, choice.stream.finish()) or self._take_pieces(
            choice, [Piece("", mark)]
        )

    def _hidden(self) -> frozenset[int]:
        """Return the tokens that leave no text: their log-probabilities are not told."""
        return self._vocabulary.special_ids if self._shape.skips_special else frozenset()

    def _take_text(self, choice: _Choice, text: str) -> bool:
        if not text:
            return False
        if choice.parser is None:
            return self._tell_content(choice, text)
        pieces = [Piece(text)] if choice.lexer is None else choice.lexer.push(text)
        return self._take_pieces(choice, pieces)

    def _take_pieces(self, choice: _Choice, pieces: Sequence[Piece]) -> bool:
        if choice.parser is None:
            return False
        for piece in pieces:
            for event in choice.parser.push(piece):
                if self._tell(choice, event):
                    return True
        return False

    def _tell(self, choice: _Choice, event: AnswerEvent) -> bool:
        if isinstance(event, Content):
            return self._tell_content(choice, event.text)
        if isinstance(event, Reasoning) and self._shape.hides_reasoning:
            return False
        choice.events.append(event)
        return False

    def _tell_content(self, choice: _Choice, text: str) -> bool:
        text = choice.stop.push(text)
        if text:
            choice.events.append(Content(text))
        if choice.stop.found is None:
            return False
        choice.has_ended = True
        choice.events.append(Ended("stop", stop_text=choice.stop.found))
        return True

    def _end(self, choice: _Choice, delta: Delta) -> None:
        """Release what was withheld and tell the end."""
        reason = delta.finish or "stop"
        if self._take_text(choice, choice.stream.finish()):
            return
        parser = choice.parser
        if parser is not None:
            held = [] if choice.lexer is None else choice.lexer.finish()
            for event in parser.finish(is_cut=reason != "stop", held=held):
                if self._tell(choice, event):
                    return
            self.num_dropped_calls += parser.num_dropped
            if parser.num_calls and reason == "stop":
                reason = "tool_calls"
        rest = choice.stop.finish()
        if rest:
            choice.events.append(Content(rest))
        choice.has_ended = True
        choice.events.append(Ended(reason, failure=delta.failure))


def _mark_tokens(vocabulary: Vocabulary) -> Mapping[int, Mark]:
    """Return the token of each mark; empty where the checkpoint has none for some of them."""
    found = {vocabulary.control.get(mark.value): mark for mark in Mark}
    return {} if None in found else {i: m for i, m in found.items() if i is not None}


def _joined(told: list[tuple[int, ChoiceEvent]]) -> list[tuple[int, ChoiceEvent]]:
    """Join neighbouring text events of the same choice and kind."""
    joined: list[tuple[int, ChoiceEvent]] = []
    for index, event in told:
        if joined and joined[-1][0] == index:
            last = joined[-1][1]
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = (index, Content(last.text + event.text))
                continue
            if isinstance(event, Reasoning) and isinstance(last, Reasoning):
                joined[-1] = (index, Reasoning(last.text + event.text))
                continue
        joined.append((index, event))
    return joined
