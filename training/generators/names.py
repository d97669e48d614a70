"""Names of tools in the shapes that programs use.

Owns how words become a name: their order, what joins them, prefixes and numbers. It must not know
schemas. Invariant: no name has the words of one of the examination's, in whatever order.
"""

from __future__ import annotations

import re

from oxplow.feedback.exam import families as exam
from training.generators.source import Source

JOINTS = ("_", "_", "_", ".", ".", ".", "-", "-", "__", "::", "/", "")
SPACES = ("", "", "", "", "mcp", "api", "srv", "v2", "tools", "x")


def name_parts(name: str) -> frozenset[str]:
    """Return a name's words in lower case, whatever joins them."""
    return frozenset(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower()))


EXAM_NAMES: frozenset[frozenset[str]] = frozenset(name_parts(form.name) for form in exam.TOOLS)


def join_words(source: Source, words: list[str]) -> str:
    """Join words in one of the usual shapes: snake, dotted, dashed, camel and others."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.12:
        return words[0] + "".join(word.title() for word in words[1:])
    if draw < 0.2:
        return "".join(word.title() for word in words)
    if draw < 0.25:
        return "_".join(words).upper()
    if draw < 0.5 and len(words) > 2:
        first, second = rng.choice(JOINTS), rng.choice(JOINTS)
        return words[0] + first + second.join(words[1:])
    return rng.choice(JOINTS).join(words)


def tool_name(source: Source, verb: str, thing: str) -> str:
    """Return a name made of a tool's verb and thing in either order, or (one in six) of words that
    its description does not have, so that a name has to be looked up.
    """
    rng = source.rng
    while True:
        words = [verb, thing] if rng.random() < 0.5 else [thing, verb]
        draw = rng.random()
        if draw < 0.16:
            words = [source.word() for _ in range(rng.choice((1, 2, 2, 3)))]
        elif draw < 0.3:
            words.insert(rng.randrange(3), source.word())
        space = rng.choice(SPACES)
        if space:
            words.insert(0, space)
        name = join_words(source, words)
        if rng.random() < 0.15:
            name += rng.choice(("", "_", "-", ".", "_v", "V")) + str(rng.randint(1, 99))
        if not any(parts <= name_parts(name) for parts in EXAM_NAMES):
            return name
