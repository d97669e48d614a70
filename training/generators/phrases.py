"""Phrasings made up on the spot, so that no fixed list of templates can be learnt by heart.

Owns random openings, connectors and wishes (`facts` has statements and questions). A first model
trained on 26 fixed templates copied the word after an unknown connector instead of the value; with
connectors of random words it has to find the value. Invariant: a value keeps its letters.
"""

from __future__ import annotations

from training.families import CONNECTORS, LEADS, SEPARATORS, TAILS
from training.generators.source import Source

PREPOSITIONS = [
    "to",
    "at",
    "by",
    "for",
    "from",
    "in",
    "into",
    "near",
    "of",
    "off",
    "on",
    "over",
    "past",
    "through",
    "towards",
    "under",
    "upon",
    "via",
    "with",
    "within",
    "behind",
    "beside",
    "below",
    "above",
    "across",
    "along",
    "around",
    "before",
    "after",
    "between",
    "beyond",
]


def lead(source: Source) -> str:
    """Return an opening of a sentence, often empty."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.3:
        return ""
    if draw < 0.65:
        return rng.choice(LEADS)
    if draw < 0.85:
        return " ".join(source.word() for _ in range(rng.randint(1, 3))) + rng.choice(
            (", ", " that ", ": ")
        )
    return f"{rng.choice(PREPOSITIONS)} the {source.word()}, "


def connector(source: Source, several: bool) -> str:
    """Return an argument template; made-up connectors only where several arguments show which words
    they are.
    """
    rng = source.rng
    draw = rng.random()
    if draw < 0.55 or not several:
        return "{k} " + rng.choice(CONNECTORS) + " {v}"
    words = " ".join(source.word() for _ in range(rng.choice((1, 1, 2))))
    return rng.choice(
        (
            "{k} " + words + " {v}",
            "{k} " + words + " {v}",
            words + " {k} {v}",
            "{k}" + rng.choice(SEPARATORS) + "{v}",
        )
    )


def wish(source: Source, task: str, arguments: str) -> str:
    """Phrase a wish: task and arguments in either order between made-up openings and closings."""
    rng = source.rng
    opening, closing = lead(source), rng.choice(TAILS)
    join = rng.choice((". ", ": ", "; ", ", ", "? ", " - ", "\n", " ("))
    end = ")" if join == " (" else ""
    if rng.random() < 0.25:
        # Never capitalised: a value may stand first, and values are copied to the letter.
        return f"{arguments}{rng.choice(('. ', '; ', chr(10)))}{opening}{task}{closing}"
    text = f"{opening}{task}{join}{arguments}{end}{closing}"
    return text[:1].upper() + text[1:] if rng.random() < 0.85 else text
