"""Statements and questions made up on the spot, and the facts of one haystack.

Owns phrasings (a statement and a question with places for key and value) and the choice of keys and
values that are easily mistaken for each other. It must not know rows or tokens. Invariants: a
question repeats its key; a value has a boundary that can be seen (a mark, a quote, the end or the
beginning of its clause); several facts of a haystack share one phrasing, so that only the key tells
them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.families import FACTS, SEPARATORS, SINGLE_FACTS
from training.generators.phrases import PREPOSITIONS, lead
from training.generators.source import SECRET_KINDS, Source

# Places of a phrasing: the key's two words and the value. No text holds these characters.
FIRST, SECOND, VALUE = "\x01", "\x02", "\x03"
PUNCTUATION = "#/*-+=<>|~!:%&;.([{"
MIRROR = str.maketrans("<([{", ">)]}")


@dataclass(frozen=True, slots=True)
class Phrasing:
    """A statement and its question; both hold places, to be filled by `fill`."""

    statement: str
    question: str

    def fill(self, first: str, second: str, value: str) -> tuple[str, str]:
        """Return statement and question of one fact."""
        filled = []
        for text in (self.statement, self.question):
            text = text.replace(FIRST, first).replace(SECOND, second)
            filled.append(text.replace(VALUE, value))
        return filled[0], filled[1]


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its key in words, statement, question, value."""

    key: str
    statement: str
    question: str
    value: str


def verb_phrase(source: Source) -> tuple[str, str, str]:
    """Return (finite form, auxiliary of a question, what is left behind the subject)."""
    rng, verb = source.rng, source.word()
    kind = rng.randrange(6)
    if kind == 0:
        return f"{verb}s", "does", verb
    if kind == 1:
        return f"{verb}ed", "did", verb
    if kind == 2:
        aux = rng.choice(("can", "may", "must", "will", "should", "might"))
        return f"{aux} {verb}", aux, verb
    if kind == 3:
        aux = rng.choice(("is", "is", "was", "gets", "stays"))
        return f"{aux} {verb}ed", "is" if aux in {"gets", "stays"} else aux, f"{verb}ed"
    if kind == 4:
        first, then = rng.choice((("has", "been"), ("will", "be"), ("can", "be"), ("must", "be")))
        return f"{first} {then} {verb}ed", first, f"{then} {verb}ed"
    aux = rng.choice(("is", "was"))
    return f"{aux} {verb}", aux, verb


def asked(source: Source, thing: str, phrase: tuple[str, str, str], prep: str, noun: str) -> str:
    """Return a question about the object of "`thing` `phrase` `prep` the `noun` ...".

    `prep` and `noun` may be empty.
    """
    rng = source.rng
    finite, aux, rest = phrase
    behind = f" {prep}" if prep else ""
    kind_of = noun or rng.choice(("thing", "word", "one", "item", "name", source.word()))
    who = rng.choice(("What", "What", "Where", "How", "Who", "When"))
    ahead = prep.capitalize() if prep else "So"
    frames = (
        f"What {aux} {thing} {rest}{behind}?",
        f"{who} {aux} {thing} {rest}{behind}?",
        f"Which {kind_of} {aux} {thing} {rest}{behind}?",
        f"{ahead} what {aux} {thing} {rest}?",
        f"{ahead} which {kind_of} {aux} {thing} {rest}?",
        f"{who} {finite} {thing}{behind}?",
        f"Which {kind_of} {finite}{behind} {thing}?",
        f"{thing} {finite}{behind} what?",
        f"Tell me what {thing} {finite}{behind}.",
        f"Name the {kind_of} that {thing} {finite}{behind}.",
        f"{lead(source)}what {aux} {thing} {rest}{behind}?",
        f"{rest}{behind}, {thing}?",
        f"I forgot {prep or 'just'} what {thing} {finite}.",
    )
    return rng.choice(frames)


def bare_question(source: Source, key: str) -> str:
    """Return a question that shares nothing with the statement but the key."""
    rng = source.rng
    word, noun = source.word(), source.word()
    the = rng.choice(("the ", "the ", "our ", "this ", ""))
    quote = rng.choice(("", "", "'", '"', "`"))
    frames = (
        f"{key}?",
        f"What about {the}{key}?",
        f"What is listed for {quote}{key}{quote}?",
        f"Which {noun} is given for {the}{key}?",
        f"Look up {quote}{key}{quote}.",
        f"And {the}{key}?",
        f"{the.capitalize()}{key}: which {noun}?",
        f"Find the {noun} of {the}{key}.",
        f"What does the text say about {the}{key}?",
        f"Which {noun} {rng.choice(PREPOSITIONS)} {the}{key}?",
        f"Copy the {noun} {rng.choice(PREPOSITIONS)} {the}{key}.",
        f"{word} {quote}{key}{quote}",
        f"{word.capitalize()} {noun} {the}{key}!",
    )
    return rng.choice(frames)


def sentence_phrasing(source: Source, key: str) -> Phrasing:
    """Return a prose statement with a made-up predicate, and a question about it."""
    rng = source.rng
    phrase, prep = verb_phrase(source), rng.choice((*PREPOSITIONS, *[""] * 8))
    noun = source.word() if rng.random() < 0.45 else ""
    the = rng.choice(("the ", "the ", "the ", "our ", "that ", ""))
    thing = f"{the}{key}"
    behind = f" {prep}" if prep else ""
    draw = rng.random()
    if draw < 0.62:
        named = f"{rng.choice((' the', ' the', '', ' a'))} {noun}" if noun else ""
        adverb = f" {source.word()}" if rng.random() < 0.12 else ""
        clause = f"{thing} {phrase[0]}{adverb}{behind}{named} {VALUE}"
        question = asked(source, thing, phrase, prep, noun)
    elif draw < 0.76:
        noun, prep = noun or source.word(), prep or "of"
        clause = f"the {noun} {prep} {thing} {rng.choice(('is', 'is', 'was', phrase[0]))} {VALUE}"
        question = rng.choice(
            (
                f"What is the {noun} {prep} {thing}?",
                f"Which {noun} {prep} {thing}?",
                f"Give me the {noun} {prep} {thing}.",
                f"{rng.choice(PREPOSITIONS).capitalize()} {thing}, which {noun}?",
            )
        )
    elif draw < 0.88:
        clause = f"{VALUE} {phrase[0]}{behind} {thing}"
        question = asked(source, thing, phrase, prep, noun)
    else:
        noun = noun or source.word()
        own = rng.choice(("has", "had", "holds", "keeps", "takes", f"{source.word()}s"))
        clause = f"{thing} {own} {VALUE} {prep or 'as'} its {noun}"
        question = f"What {own} {thing} {prep or 'as'} its {noun}?"
    if rng.random() < 0.3:
        question = bare_question(source, key)
    opening = lead(source) + clause
    if rng.random() < 0.7:
        opening = opening[:1].upper() + opening[1:]
    if rng.random() < 0.5:
        question = question[:1].upper() + question[1:]
    return Phrasing(f" {opening}{rng.choice(('.', '.', '.', ';', '!'))} ", question)


def wrapper(source: Source) -> tuple[str, str]:
    """Return an opening and a closing mark of random punctuation, as around a comment."""
    rng = source.rng
    marks = "".join(rng.choice(PUNCTUATION) for _ in range(rng.choice((1, 2, 2, 3))))
    closing = marks[::-1].translate(MIRROR) if rng.random() < 0.6 else ""
    return f"{marks} ", f" {closing}" if closing else ""


def listed_phrasing(source: Source, key: str) -> Phrasing:
    """Return a statement in the manner of code, lists and comments, and a question about it."""
    rng = source.rng
    word, noun, mark = source.word(), source.word(), rng.choice(SEPARATORS)
    phrase, prep = verb_phrase(source), rng.choice((*PREPOSITIONS, *[""] * 8))
    behind = f" {prep}" if prep else ""
    joined = key.replace(" ", rng.choice(("_", "_", "-", ".")))
    quote = rng.choice(("'", '"', "`", ""))
    name = rng.choice((word, word.upper(), word.title()))
    bullet = rng.choice(("- ", "* ", "+ ", "> ", "", "  ", f"{rng.randint(1, 99)}. "))
    opening, closing = wrapper(source)
    value = f"{quote}{VALUE}{quote}"
    forms = (
        f"{name}[{quote}{key}{quote}] = {value}",
        f"{name}({quote}{key}{quote}, {value})",
        f"{name}.{joined} = {value}",
        f"{name}[{quote}{joined}{quote}]{mark}{value}",
        f"{bullet}{key}{mark}{VALUE}",
        f"{bullet}{key}{mark}{word} {VALUE}",
        f"{bullet}{key} {phrase[0]}{behind} {VALUE}",
        f"{bullet}{key}{mark}{phrase[0]}{behind} {VALUE}",
        f"{opening}{key} {phrase[0]}{behind} {VALUE}{closing}",
        f"{opening}{key}{mark}{VALUE}{closing}",
        f"{opening}{name} {key} {phrase[0]}{behind} {VALUE}{closing}",
        f"{joined}{mark}{value}",
        f"{name}: {key}{mark}{VALUE}",
        f"{VALUE}{mark}{key}",
    )
    draw = rng.random()
    if draw < 0.45:
        question = asked(source, f"{rng.choice(('the ', 'the ', ''))}{key}", phrase, prep, "")
    elif draw < 0.65:
        question = rng.choice(
            (
                f"Which {noun} has {name} got {prep or 'for'} {quote}{key}{quote}?",
                f"Under which {noun} do I find {key}?",
                f"What {word} {prep or 'of'} {key}?",
                f"What is {name}[{quote}{key}{quote}]?",
                f"What is {joined}?",
                f"{name} {key}?",
            )
        )
    else:
        question = bare_question(source, key)
    return Phrasing(f"\n{rng.choice(('', '', '    '))}{rng.choice(forms)}\n", question)


def random_phrasing(source: Source, key: str = f"{FIRST} {SECOND}") -> Phrasing:
    """Return a made-up phrasing with places for the key's words and the value."""
    make = sentence_phrasing if source.rng.random() < 0.6 else listed_phrasing
    return make(source, key)


def fixed_phrasing(source: Source) -> Phrasing:
    """Return one of the written phrasings."""
    statement, question = source.rng.choice(FACTS)
    places = {"a": FIRST, "n": SECOND, "v": VALUE}
    return Phrasing(statement.format(**places), question.format(**places))


def alike_words(source: Source, count: int) -> list[str]:
    """Return `count` words, some of which begin alike."""
    rng = source.rng
    found = [source.word()]
    while len(found) < count:
        if rng.random() < 0.15:
            found.append(rng.choice(found)[: rng.choice((2, 3, 4))] + source.pseudo())
        else:
            found.append(source.word())
    return found


def draw_value(source: Source, kinds: list[int], pool: list[str], earlier: list[str]) -> str:
    """Return a value; sometimes made of words that stand in keys, or like an earlier value."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.2:
        return f"{rng.choice(pool)}-{rng.randint(1, 999)}"
    if draw < 0.28 and earlier:
        like = rng.choice(earlier)
        made = like[: rng.randint(1, len(like))].rstrip(" -/_.:") + str(rng.randint(0, 999))
        return made if made not in earlier else source.secret()
    return source.secret(rng.choice(kinds))


def draw_facts(source: Source, count: int) -> list[Fact]:
    """Draw facts that differ by their keys: the keys share words, several share a phrasing."""
    rng = source.rng
    sizes = (2, 3, count // 4, count // 2, count)
    firsts = alike_words(source, max(2, rng.choice(sizes)))
    seconds = alike_words(source, max(2, rng.choice(sizes)))
    if rng.random() < 0.1:
        seconds = firsts  # "a b" beside "b a"
    made_up = rng.choice((0.5, 0.9, 1.0))
    phrasings = [
        random_phrasing(source) if rng.random() < made_up else fixed_phrasing(source)
        for _ in range(rng.choice((1, 2, 3, 4, 6, 8, count)))
    ]
    some = [rng.randrange(SECRET_KINDS) for _ in range(rng.choice((1, 2, 3)))]
    kinds = some if rng.random() < 0.5 else list(range(SECRET_KINDS))
    facts: list[Fact] = []
    seen: set[str] = set()
    while len(facts) < count:
        first, second, phrasing = rng.choice(firsts), rng.choice(seconds), rng.choice(phrasings)
        if rng.random() < 0.06:
            first, second = "", source.word()
            made = SECOND if rng.random() < made_up else ""
            statement, question = rng.choice(SINGLE_FACTS)
            places = {"n": SECOND, "v": VALUE}
            fixed = Phrasing(statement.format(**places), question.format(**places))
            phrasing = random_phrasing(source, made) if made else fixed
        key = f"{first} {second}".strip()
        if key in seen:
            (firsts if rng.random() < 0.5 else seconds).append(source.word())
            continue
        seen.add(key)
        value = draw_value(source, kinds, seconds, [fact.value for fact in facts])
        statement, question = phrasing.fill(first, second, value)
        facts.append(Fact(key, statement, question, value))
    return facts
