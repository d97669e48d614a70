"""What every generator draws from: a random stream, words, values, corpus tokens.

Owns drawing. Invariant: no word of the examination is ever drawn on purpose.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import numpy as np

from training.chat import JsonValue
from training.lists import words

ONSETS = words("b br c ch d dr f fl g gr h j k l m n p pr qu r s sh st t tr v w z")
VOWELS = words("a e i o u ai ea oo ou ia")
CODAS = ["", "", "l", "n", "r", "s", "t", "x", "nd", "rk", "st"]


@dataclass(slots=True)
class Source:
    """Random stream, allowed words and corpus tokens of one worker."""

    rng: random.Random
    words: list[str]
    tokens: np.ndarray

    def corpus(self, count: int) -> list[int]:
        """Return a stretch of corpus tokens."""
        start = self.rng.randrange(len(self.tokens) - count)
        return self.tokens[start : start + count].tolist()

    def pseudo(self) -> str:
        """Return an invented word of two or three syllables."""
        pick = self.rng.choice
        parts = [pick(ONSETS) + pick(VOWELS) + pick(CODAS) for _ in range(pick((2, 2, 3)))]
        return "".join(parts)

    def word(self) -> str:
        """Return a word: mostly from the vocabulary, else invented."""
        return self.pseudo() if self.rng.random() < 0.35 else self.rng.choice(self.words)

    def secret(self) -> str:
        """Return a value that nothing foretells."""
        rng = self.rng
        kind = rng.randrange(9)
        if kind == 0:
            return str(rng.randint(100, 9_999))
        if kind == 1:
            return str(rng.randint(10_000, 99_999_999))
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
