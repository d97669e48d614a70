"""Phrasings made up on the spot, so that no fixed list of templates can be learnt by heart.

Owns random statements, questions, connectors and wishes. A first model trained on 26 fixed
templates copied the word after an unknown connector instead of the value; with connectors of random
words it has to find the value. Invariant: the value closes its clause, and a question repeats the
key.
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


def sentence_fact(source: Source, key: str, value: str) -> tuple[str, str]:
    """Return a prose statement with a made-up predicate, and a question about it."""
    rng = source.rng
    verb, noun, prep = source.word(), source.word(), rng.choice(PREPOSITIONS)
    the = rng.choice(("the ", "the ", "our ", "that ", ""))
    thing = f"{the}{key}"
    kind = rng.randrange(8)
    if kind == 0:
        clause, question = f"{thing} {verb}s {prep} {value}", f"What does {thing} {verb} {prep}?"
    elif kind == 1:
        clause, question = (
            f"{thing} {verb}s {prep} {value}",
            f"{prep.title()} what does {thing} {verb}?",
        )
    elif kind == 2:
        clause, question = (
            f"{thing} is {verb}ed {prep} {value}",
            f"{prep.title()} which {noun} is {thing} {verb}ed?",
        )
    elif kind == 3:
        clause, question = f"{thing} is {verb}ed as {value}", f"How is {thing} {verb}ed?"
    elif kind == 4:
        clause, question = (
            f"{thing} was {verb} {prep} the {noun} {value}",
            f"Which {noun} was {thing} {verb} {prep}?",
        )
    elif kind == 5:
        clause, question = (
            f"the {noun} {prep} {thing} is {value}",
            f"What is the {noun} {prep} {thing}?",
        )
    elif kind == 6:
        clause, question = f"{thing} {verb} {prep} {value}", f"Which {noun} {verb} {prep} {thing}?"
    else:
        clause, question = (
            f"{thing} has {value} {prep} its {noun}",
            f"What has {thing} {prep} its {noun}?",
        )
    opening = lead(source) + clause
    if rng.random() < 0.7:
        opening = opening[:1].upper() + opening[1:]
    return f" {opening}{rng.choice(('.', '.', '.', ';', '!'))} ", question


def listed_fact(source: Source, key: str, value: str) -> tuple[str, str]:
    """Return a statement in the manner of code, lists and comments, and a question about it."""
    rng = source.rng
    word, noun, mark = source.word(), source.word(), rng.choice(SEPARATORS)
    joined = key.replace(" ", rng.choice(("_", "_", "-", ".")))
    quote = rng.choice(("'", '"', "`", ""))
    name = rng.choice((word, word.upper(), word.title()))
    bullet = rng.choice(("- ", "* ", "+ ", "> ", "", "  ", f"{rng.randint(1, 99)}. "))
    forms = (
        f"{name}[{quote}{key}{quote}] = {quote}{value}{quote}",
        f"{name}({quote}{key}{quote}, {quote}{value}{quote})",
        f"{name}.{joined} = {quote}{value}{quote}",
        f"{bullet}{key}{mark}{value}",
        f"{bullet}{key}{mark}{word} {value}",
        f"{bullet}{key} {word} {noun} {value}",
        f"{bullet}{key}{mark}{word}ed {rng.choice(PREPOSITIONS)} {value}",
        f"// {key} {word} {rng.choice(PREPOSITIONS)} {value}",
        f"-- {name} {key} {word}s {rng.choice(PREPOSITIONS)} {value}",
        f"<!-- {key}{mark}{value} -->",
        f"# {key} {word} {value}",
        f"{joined}{mark}{quote}{value}{quote}",
        f"{name}: {key}{mark}{value}",
    )
    questions = (
        f"Which {noun} has {name} got {rng.choice(PREPOSITIONS)} {quote}{key}{quote}?",
        f"Under which {noun} do I find {key}?",
        f"What is listed for {key}?",
        f"{key}?",
        f"Which {word} is given for {key}?",
        f"What {word} {rng.choice(PREPOSITIONS)} {key}?",
        f"Look up {key}.",
        f"What does {key} {word}?",
        f"{rng.choice(PREPOSITIONS).title()} what does {key} {word}?",
        f"{word.title()} {key}.",
    )
    return f"\n{rng.choice(('', '', '    '))}{rng.choice(forms)}\n", rng.choice(questions)


def random_fact(source: Source, key: str, value: str) -> tuple[str, str]:
    """Return a statement and its question in a made-up phrasing."""
    return (sentence_fact if source.rng.random() < 0.6 else listed_fact)(source, key, value)


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
