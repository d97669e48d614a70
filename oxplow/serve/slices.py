"""Long text, tokenised slice by slice: the ids of one go, in bounded memory, with an early end.

Owns where a text may be cut. Knows the tokenizer's two stages (pieces first, then merges inside
each piece), no template and no request.
Invariant: the ids are those of encoding the whole text. A cut lies where a piece ends whatever
stands far from it; where no such place is known, the text is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from oxplow.engine.admission import CONTEXT_LENGTH_EXCEEDED
from oxplow.errors import RequestError

__all__ = ["SlicedEncoder", "too_long"]

_SLICE = 1 << 16  # characters of one call
_LONGEST_PIECE = 1 << 22  # characters without any border; a call takes about 200 bytes for each
_NEAR = 256  # characters around a cut that are looked at
_LOST = 3  # last pieces of a window: the window's end may have shaped them

_BETWEEN_WORDS = re.compile(r"[A-Za-z](?= [A-Za-z])")
_SAMPLE = (
    "a b c dd ee fff I I am am here here we'll we've they're it's 1 2 33 444 4444 a1 b22 c\n"
    "end of line\n\n  indented text here\t\ttabs here ... dots !! and (brackets [x] {y}) x_y z\r\n"
    "longer longerword andaverylongwordthatdoesnotend ok ok ok Ok OK oK i j k l m n o p q r s t"
)


class SlicedEncoder:
    """Encodes outside text with `plain`, a tokenizer without added tokens.

    Texts are cut only where `content`, its JSON, promises that pieces follow from the text around
    them: no normaliser, and splits that keep every character.
    """

    def __init__(self, plain: Tokenizer, content: Mapping[str, Any]) -> None:
        self._plain = plain
        self._names: tuple[str, ...] = tuple(plain.get_vocab())
        self.longest_token = max(map(len, self._names), default=1)
        """Most bytes of one token; a byte-level name has one character for each byte."""
        self.is_byte_level = _is_byte_level(content)
        self._cuts_words = self.is_byte_level and self._has_borders_between_words()

    def encode(self, text: str, most: int | None = None, before: int = 0) -> list[int]:
        """Return the ids of `text`, which follows `before` other tokens.

        Raises RequestError as soon as there must be more than `most` in all, and for text without
        any border between pieces for longer than 4 MiB.
        """
        ids: list[int] = []
        is_cut = len(text) > _SLICE and self.is_byte_level
        start = 0
        while start < len(text):
            room = None if most is None else max(0, most - before - len(ids))
            end = self._cut(text, start, room) if is_cut else len(text)
            if end is None:
                raise too_long(most or 0, before + len(ids) + (room or 0) + 1)
            ids += self._ids(text[start:end])
            if most is not None and before + len(ids) > most:
                raise too_long(most, before + len(ids))
            start = end
        return ids

    def _ids(self, text: str) -> list[int]:
        # The batch call, because it lets other threads run; `fast` keeps no offsets.
        return list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _cut(self, text: str, start: int, room: int | None) -> int | None:
        """Return where the slice that begins at a border ends; None where it must exceed `room`."""
        size = _SLICE
        while start + size < len(text):
            end = start + size
            found = self._word_cut(text, end) if self._cuts_words else None
            if found is None:
                found = self._scanned_cut(text[start:end])
                found = None if found is None else start + found
            if found is not None:
                return found
            if room is not None and size > room * self._longest_made_of(text[start:end]):
                return None
            if size >= _LONGEST_PIECE:
                raise RequestError(
                    "a text has no border between words for too long",
                    got=f"more than {size} characters",
                    wanted=f"at most {_LONGEST_PIECE}",
                    code="invalid_value",
                )
            size *= 2
        return len(text)

    def _word_cut(self, text: str, end: int) -> int | None:
        """Find the last place between two words near `end` that is a border on both views."""
        low = end - _NEAR
        places = [m.end() for m in _BETWEEN_WORDS.finditer(text, low, end)]
        for at in reversed(places[-4:]):
            first = at - _NEAR
            borders = self._borders(text[first : at + _NEAR])
            after = self._borders(text[at : at + _NEAR])
            if _NEAR in borders and [b - _NEAR for b in borders if b >= _NEAR] == after:
                return at
        return None

    def _scanned_cut(self, window: str) -> int | None:
        """Find a border of a window that begins at one, away from the window's end."""
        borders = self._borders(window)
        for at in reversed(borders[:-_LOST]):
            if at > 0 and not window[at:].isspace():
                return at
        return None

    def _borders(self, text: str) -> list[int]:
        pre = self._plain.pre_tokenizer
        return [start for _, (start, _) in pre.pre_tokenize_str(text)]

    def _longest_made_of(self, text: str) -> int:
        """Return the most bytes of one token that holds no other bytes than the characters of
        `text`.
        """
        pre = self._plain.pre_tokenizer
        spelt = pre.pre_tokenize_str("".join(sorted(set(text))))
        alphabet = {c for piece, _ in spelt for c in piece}
        return max((len(n) for n in self._names if alphabet.issuperset(n)), default=1)

    def _has_borders_between_words(self) -> bool:
        """Tell whether every place between two words of a sample is a border, in every phase."""
        for shift in range(12):
            text = _SAMPLE[shift:] + " " + _SAMPLE
            borders = set(self._borders(text))
            if any(m.end() not in borders for m in _BETWEEN_WORDS.finditer(text)):
                return False
        return True


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    """Tell whether pieces depend on the text around them only, and cover it byte by byte."""
    pre, model = content.get("pre_tokenizer"), content.get("model") or {}
    if content.get("normalizer") is not None or pre is None or model.get("type") != "BPE":
        return False
    stages = pre.get("pretokenizers") if pre.get("type") == "Sequence" else [pre]
    *splits, last = stages or [{}]
    return (
        all(s.get("type") == "Split" and s.get("behavior") == "Isolated" for s in splits)
        and last.get("type") == "ByteLevel"
        and not last.get("add_prefix_space")
        and not model.get("dropout")
    )


def too_long(most: int, at_least: int) -> RequestError:
    """Return the error of a prompt that has more than `most` tokens."""
    return RequestError(
        f"this model's maximum context length is {most + 1} tokens",
        got=f"at least {at_least} in the prompt",
        wanted=f"a prompt under {most + 1} tokens",
        param="messages",
        code=CONTEXT_LENGTH_EXCEEDED,
    )
