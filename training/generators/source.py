"""What every generator draws from: a random stream, words, values, corpus tokens.

Owns drawing. Invariant: no word of the examination is ever drawn on purpose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from oxplow.feedback.exam.families import WORDS as EXAM_WORDS
from training.chat import JsonValue
from training.lists import words

ONSETS = words("b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t tr v w z")
VOWELS = words("a e i o u ai ea oo ou ia")
CODAS = ["", "", "l", "n", "r", "s", "t", "x", "nd", "rk", "st"]
SECRET_KINDS = 9


@dataclass(frozen=True, slots=True)
class Pieces:
    """Lower-case pieces of the vocabulary: those that follow a blank (without it), and others."""

    heads: list[str]
    tails: list[str]


def word_pieces(vocabulary: Iterable[str], blank: str = "\u0120") -> Pieces:
    """Return the vocabulary's pieces that words can be made of."""
    heads: list[str] = []
    tails: list[str] = []
    for piece in sorted(vocabulary):
        bare = piece.removeprefix(blank)
        if bare.isascii() and bare.isalpha() and bare.islower() and len(bare) <= 8:
            (tails if bare == piece else heads).append(bare)
    return Pieces(heads, tails)


@dataclass(slots=True)
class Source:
    """Random stream, allowed words, corpus tokens and word pieces of one worker."""

    rng: random.Random
    words: list[str]
    tokens: np.ndarray
    pieces: Pieces = field(default_factory=lambda: Pieces([], []))

    def corpus(self, count: int) -> list[int]:
        """Return a stretch of corpus tokens."""
        start = self.rng.randrange(len(self.tokens) - count)
        return self.tokens[start : start + count].tolist()

    def pseudo(self) -> str:
        """Return an invented word of two or three syllables."""
        pick = self.rng.choice
        parts = [pick(ONSETS) + pick(VOWELS) + pick(CODAS) for _ in range(pick((2, 2, 3)))]
        return "".join(parts)

    def pieced(self) -> str:
        """Return a word of random pieces: a word is spelt with other pieces after a blank, and
        every piece must have been met.
        """
        pick = self.rng.choice
        tails = [pick(self.pieces.tails) for _ in range(pick((0, 1, 1, 1, 2)))]
        made = pick(self.pieces.heads) + "".join(tails)
        return made if len(made) <= 14 and made not in EXAM_WORDS else self.pseudo()

    def word(self) -> str:
        """Return a word: from the corpus, of pieces, or invented."""
        draw = self.rng.random()
        if draw < 0.22 and self.pieces.heads:
            return self.pieced()
        return self.pseudo() if draw < 0.45 else self.rng.choice(self.words)

    def digits(self, least: int, most: int) -> str:
        """Return a number's digits; a third have few different ones, which are easily lost in
        copying.
        """
        rng = self.rng
        count = rng.randint(least, most)
        few = rng.sample("123456789", 1) + rng.sample("0123456789", rng.choice((1, 2)))
        some = few if rng.random() < 0.33 else "0123456789"
        return rng.choice("123456789") + "".join(rng.choice(some) for _ in range(count - 1))

    def secret(self, kind: int | None = None) -> str:
        """Return a value that nothing foretells, of a kind below SECRET_KINDS or any."""
        rng = self.rng
        kind = rng.randrange(SECRET_KINDS) if kind is None else kind
        if kind == 0:
            return self.digits(3, 6)
        if kind == 1:
            return self.digits(5, 8)
        if kind == 2:
            return f"{rng.getrandbits(rng.choice((16, 24, 28, 32))):x}"
        if kind == 3:
            return f"{self.word()}-{self.word()}"
        if kind == 4:
            return f"{self.word()}-{rng.randint(1, 999)}"
        if kind == 5:
            return self.word()
        if kind == 6:
            return f"{self.word().title()} {self.word().title()}"
        if kind == 7:
            return self.date()
        return f"{self.word()}{rng.choice('/_.:')}{self.word()}{rng.randint(0, 99)}"

    def date(self) -> str:
        """Return an ISO date."""
        rng = self.rng
        return f"{rng.randint(1990, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"

    def argument(self) -> tuple[JsonValue, str]:
        """Return a typed value and its JSON type."""
        rng = self.rng
        kind = rng.randrange(13)
        if kind < 3:
            return rng.randint(0, rng.choice((9, 99, 999, 9_999))), "integer"
        if kind < 5:
            return rng.randint(1, 9_999) / rng.choice((10, 100)), "number"
        if kind < 7:
            return rng.random() < 0.5, "boolean"
        if kind == 7:
            return str(rng.randint(0, 99_999)), "string"
        if kind == 8:
            return f"{self.word()} {self.word()}", "string"
        if kind == 9:
            return self.secret(), "string"
        if kind == 10:
            return rng.choice(
                (
                    self.date(),
                    f"/{self.word()}/{self.word()}.txt",
                    f"{self.word()}@{self.word()}.org",
                )
            ), "string"
        if kind == 11:
            return self.word().title() if rng.random() < 0.5 else self.word(), "string"
        if rng.random() < 0.5:
            return [self.word() for _ in range(rng.randint(1, 3))], "array"
        return self.word(), "string"


def spell(value: JsonValue) -> str:
    """Write a value as a person would: strings bare, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def schema_type(value: JsonValue, kind: str) -> dict[str, object]:
    """Return the property schema of a value."""
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": kind}
