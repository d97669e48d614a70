"""Recall rows: facts hidden in corpus text, then many questions about them.

Owns full rows of one length. Many questions a row are what makes copying appear early. Invariant:
the row fills exactly `length` tokens; corpus text is learnt, facts (unpredictable) are not, answers
are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.chat import ANSWER, CONTEXT, CORPUS, START, THINK, Segment
from training.families import FACTS, SINGLE_FACTS
from training.generators.phrases import random_fact
from training.generators.source import Source

MAX_FACTS = 64
MAX_QUESTIONS = 24


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its key in words, statement, question, value."""

    key: str
    statement: str
    question: str
    value: str


def draw_facts(source: Source, count: int) -> list[Fact]:
    """Draw facts whose keys share words, so that half a key is never enough."""
    rng = source.rng
    firsts = [source.word() for _ in range(max(3, count // 2))]
    seconds = [source.word() for _ in range(max(3, count // 2))]
    style, facts, seen = rng.randrange(len(FACTS)), [], set()
    made_up = rng.choice((0.3, 0.8, 1.0))
    while len(facts) < count:
        value = source.secret()
        template = FACTS[style] if rng.random() < 0.4 else rng.choice(FACTS)
        first, second = rng.choice(firsts), rng.choice(seconds)
        if rng.random() < 0.1:
            template, first, second = rng.choice(SINGLE_FACTS), "", source.word()
        key = f"{first} {second}".strip()
        if key in seen:
            firsts.append(source.word())
            continue
        seen.add(key)
        if rng.random() < made_up:
            statement, question = random_fact(source, key, value)
        else:
            names = {"a": first, "n": second, "v": value}
            statement, question = (part.format(**names) for part in template)
        facts.append(Fact(key, statement, question, value))
    return facts


def question_segments(fact: Fact, lead: str, thinking: bool) -> list[Segment]:
    """Return one question turn, answered with the value alone."""
    ask: Segment = (f"{lead}{fact.question}<|assistant|><think>", CONTEXT)
    think: Segment = (
        (f"{fact.key}: {fact.value}</think>", THINK) if thinking else ("</think>", CONTEXT)
    )
    return [ask, think, (f"{fact.value}<|user|>", ANSWER)]


def recall_row(source: Source, length: int, encode: Callable[[str], list[int]]) -> list[Segment]:
    """Return a row of `length` tokens: hay with facts, then questions in several turns."""
    rng = source.rng
    count = rng.randint(4, max(5, min(MAX_FACTS, length // 48)))
    head = encode(f"{START}Max<|user|>")
    room = -1
    while room < 2 * count:
        facts = draw_facts(source, count)
        asked = rng.sample(facts, rng.randint(min(count, 4), min(count, MAX_QUESTIONS)))
        tail: list[tuple[list[int], float]] = []
        for index, fact in enumerate(asked):
            turn = question_segments(fact, "" if index else "\n\n", rng.random() < 0.2)
            tail += [(encode(text), weight) for text, weight in turn]
        statements = [encode(fact.statement) for fact in facts]
        used = len(head) + sum(map(len, statements)) + sum(len(ids) for ids, _ in tail)
        room = length - used
        count -= 1
        if count == 0:
            raise ValueError(f"a row of {length} tokens has no room for a fact and its question")
    hay = source.corpus(room)
    cuts = sorted(rng.randrange(room) for _ in statements)
    row: list[Segment] = [(head, CONTEXT)]
    start = 0
    for cut, statement in zip(cuts, statements, strict=True):
        row += [(hay[start:cut], CORPUS), (statement, CONTEXT)]
        start = cut
    return [*row, (hay[start:], CORPUS), *tail]
