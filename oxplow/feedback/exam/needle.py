"""Recall questions: facts hidden in held-out text, many of them asked from one prefix.

Owns where facts stand and what is asked. It does not know a tokenizer: `count_tokens` sizes the
haystack. Invariant: the texts of all questions of a haystack share the whole haystack as prefix,
and every answer stands in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from oxplow.feedback.exam.families import ADJECTIVES, FACTS, NOUNS
from oxplow.feedback.exam.held_out import read_held_out


@dataclass(frozen=True, slots=True)
class Needle:
    """One fact: the question, the exact answer, and its depth in the haystack (0 start, 1 end)."""

    question: str
    answer: str
    depth: float


@dataclass(frozen=True, slots=True)
class Haystack:
    """Text with facts in it and the questions about them."""

    text: str
    needles: tuple[Needle, ...]

    def messages(self, needle: Needle) -> list[dict[str, str]]:
        """Return the messages that ask one question; the answer is `needle.answer` alone."""
        return [{"role": "user", "content": f"{self.text}\n\n{needle.question}"}]


def draw_secret(rng: random.Random) -> str:
    """Draw a value that nothing in the text foretells."""
    return rng.choice(
        (
            str(rng.randint(100_000, 999_999)),
            f"{rng.choice(NOUNS)}-{rng.randint(10, 99)}",
            f"{rng.getrandbits(28):07x}",
        )
    )


def build_haystacks(
    length: int, count: int, count_tokens: Callable[[str], int], seed: int = 0, needles: int = 16
) -> list[Haystack]:
    """Build haystacks of about `length` tokens with facts at even depths, hay of code and prose.

    Units: tokens as counted by `count_tokens`; the text stays below `length` by up to 2% and leaves
    64 tokens for the turn.
    Raises: ValueError if the length has no room for that many facts.
    """
    rng = random.Random(f"{seed}:{length}:{count}:{needles}")
    sources = read_held_out()
    built = []
    for index in range(count):
        source = sources["code" if index % 2 == 0 else "prose"]
        built.append(_build_one(source, length - 64, count_tokens, rng, needles))
    return built


def _build_one(
    source: str, budget: int, count_tokens: Callable[[str], int], rng: random.Random, needles: int
) -> Haystack:
    keys = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], needles)
    facts = []
    for key in keys:
        template, secret = rng.choice(FACTS), draw_secret(rng)
        facts.append(
            (
                template.statement.format(key=key, value=secret),
                template.question.format(key=key),
                secret,
            )
        )
    room = budget - sum(count_tokens(statement) for statement, _, _ in facts)
    if room < 2 * needles:
        raise ValueError(f"a haystack of {budget} tokens has no room for {needles} facts")
    hay = _cut_text(source, room, count_tokens, rng)
    pieces, needle_list, start = [], [], 0
    for index, (statement, question, secret) in enumerate(facts):
        depth = (index + 0.5) / needles
        end = max(start, int(depth * len(hay)))
        pieces += [hay[start:end], statement]
        needle_list.append(Needle(question, secret, depth))
        start = end
    return Haystack("".join([*pieces, hay[start:]]), tuple(needle_list))


def _cut_text(
    source: str, room: int, count_tokens: Callable[[str], int], rng: random.Random
) -> str:
    """Cut a stretch of at most `room` tokens, within 2% of it."""
    size = room * 5
    start = rng.randrange(max(1, len(source) - size))
    low, high = 0, min(size, len(source) - start)
    while high - low > max(1, room // 64):
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if count_tokens(source[start : start + middle]) <= room
            else (low, middle - 1)
        )
    return source[start : start + low]
