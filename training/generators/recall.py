"""Recall rows: facts hidden in corpus text, then many questions about them.

Owns full rows of one length. Many questions a row are what makes copying appear early. Invariant:
the row fills exactly `length` tokens; corpus text is learnt, facts (unpredictable) are not, answers
are.
"""

from __future__ import annotations

from collections.abc import Callable

from training.chat import ANSWER, CONTEXT, CORPUS, START, THINK, Segment
from training.generators.facts import Fact, draw_facts
from training.generators.source import Source

MAX_FACTS = 64
MAX_QUESTIONS = 32
# What stands between the text and a question in the same turn, and before one in a turn of its own.
GAPS = ("\n\n", "\n\n", "\n\n", "\n", " ", "\n\nQuestion: ", "\n---\n", "\n\nAnswer shortly. ")
OPENINGS = ("", "", "", "", "\n\n", "\n", "Next: ", "Q: ")


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
    count = rng.randint(4, max(5, min(MAX_FACTS, length // 40)))
    head = encode(f"{START}Max<|user|>")
    room = -1
    while room < 2 * count:
        facts = draw_facts(source, count)
        least = min(count, max(4, count // 2), MAX_QUESTIONS)
        asked = rng.sample(facts, rng.randint(least, min(count, MAX_QUESTIONS)))
        tail: list[tuple[list[int], float]] = []
        for index, fact in enumerate(asked):
            opening = rng.choice(OPENINGS if index else GAPS)
            turn = question_segments(fact, opening, rng.random() < 0.1)
            tail += [(encode(text), weight) for text, weight in turn]
        statements = [encode(fact.statement) for fact in facts]
        used = len(head) + sum(map(len, statements)) + sum(len(ids) for ids, _ in tail)
        room = length - used
        count -= max(1, count // 8)
        if room < 2 and count <= 0:
            raise ValueError(f"a row of {length} tokens has no room for a fact and its question")
    hay = source.corpus(room)
    cuts = sorted(rng.randrange(room) for _ in statements)
    row: list[Segment] = [(head, CONTEXT)]
    start = 0
    for cut, statement in zip(cuts, statements, strict=True):
        row += [(hay[start:cut], CORPUS), (statement, CONTEXT)]
        start = cut
    return [*row, (hay[start:], CORPUS), *tail]
