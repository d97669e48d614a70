"""Log-probabilities in the two forms of the OpenAI API.

Owns these forms. Knows no request.
Invariant: values are the model's own, as the engine gave them; a token that is half a character
keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oxplow.serve.engine_port import TokenRow
from oxplow.serve.text import Vocabulary

__all__ = ["FlatLogprobs", "chat_entries"]

_LOWEST = -9999.0  # JSON has no minus infinity


def chat_entries(rows: Iterable[TokenRow], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the entries of chat answers."""
    return [
        {
            **_entry(row.token_id, row.logprob, vocabulary),
            "top_logprobs": [_entry(i, value, vocabulary) for i, value in row.top],
        }
        for row in rows
    ]


@dataclass(slots=True)
class FlatLogprobs:
    """The parallel lists of text completions; offsets count characters of the answer's text."""

    tokens: list[str] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, rows: Sequence[TokenRow], vocabulary: Vocabulary) -> None:
        """Append rows."""
        for row in rows:
            text = vocabulary.decode([row.token_id], skip_special=False)
            top = {
                vocabulary.decode([i], skip_special=False): max(_LOWEST, value)
                for i, value in row.top
            }
            self._append(text, max(_LOWEST, row.logprob), top)

    def add_first(self, text: str) -> None:
        """Append the first token of a prompt, which nothing predicts."""
        self._append(text, None, None)

    def taken(self) -> dict[str, Any]:
        """Return the lists and empty them; offsets go on."""
        told = {
            "tokens": self.tokens,
            "token_logprobs": self.values,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        }
        self.tokens, self.values, self.top, self.offsets = [], [], [], []
        return told

    def _append(self, text: str, value: float | None, top: dict[str, float] | None) -> None:
        self.tokens.append(text)
        self.values.append(value)
        self.top.append(top)
        self.offsets.append(self.length)
        self.length += len(text)


def _entry(token_id: int, value: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.decode([token_id], skip_special=False),
        "logprob": max(_LOWEST, value),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }
