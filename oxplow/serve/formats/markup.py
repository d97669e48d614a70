"""The marks of the GLM answer format, and how text is cut at them.

Owns the list of marks and the lexer. Knows no tokenizer and no tool.
Invariant: joining the pieces gives the text back, whatever way it was split into pushes; a mark is
never cut into text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Mark", "Piece", "TextLexer"]


class Mark(Enum):
    """Name the control strings that shape an answer; a checkpoint has one token for each."""

    THINK = "<think>"
    THINK_END = "</think>"
    CALL = "<tool_call>"
    CALL_END = "</tool_call>"
    KEY = "<arg_key>"
    KEY_END = "</arg_key>"
    VALUE = "<arg_value>"
    VALUE_END = "</arg_value>"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text, or one mark."""

    text: str
    mark: Mark | None = None


_MARKS = tuple(Mark)
_LONGEST = max(len(m.value) for m in _MARKS)


class TextLexer:
    """Cuts text that arrives in any pieces; the start of a possible mark is withheld.

    For checkpoints whose marks are ordinary text. Where they are tokens, the token decides and this
    lexer is not used: then a value may contain the very characters of a mark.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is certain."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            found = _first_mark(self._held)
            if found is None:
                break
            at, mark = found
            if at:
                pieces.append(Piece(self._held[:at]))
            pieces.append(Piece("", mark))
            self._held = self._held[at + len(mark.value) :]
        split = len(self._held) - _possible_mark(self._held)
        certain, self._held = self._held[:split], self._held[split:]
        if certain:
            pieces.append(Piece(certain))
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was withheld, as text."""
        held, self._held = self._held, ""
        return [Piece(held)] if held else []


def _first_mark(text: str) -> tuple[int, Mark] | None:
    found = [(at, mark) for mark in _MARKS if (at := text.find(mark.value)) >= 0]
    return min(found, key=lambda pair: pair[0], default=None)


def _possible_mark(text: str) -> int:
    """Return how many last characters may be the start of a mark."""
    for length in range(min(_LONGEST - 1, len(text)), 0, -1):
        if any(mark.value.startswith(text[-length:]) for mark in _MARKS):
            return length
    return 0
