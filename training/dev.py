"""A small examination of training's own, for decisions between and during runs.

Owns words, phrasings and tools that neither training nor the product's examination uses, and rows
made of them, so that the examination is asked only once, at the end. Invariant: training draws no
word of `WORDS` on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from training.chat import ANSWER, Call, Conversation, JsonValue, Turn, segments_of, write_call
from training.lists import words

if TYPE_CHECKING:
    from training.evaluate import Judge

ADJECTIVES = words(
    "amber brittle cobalt drowsy feathery gleaming humid jagged knitted lilac marbled nimble "
    "ochre pebbly quilted rusty silken tarnished umber vaulted waxen zigzag"
)
NOUNS = words(
    "anvil bagpipe candelabra dulcimer easel ferris gondola harpsichord igloo jukebox kettle "
    "lantern mandolin nutcracker ottoman parasol quiver rowboat saddle tambourine unicycle viaduct "
    "weathervane zeppelin"
)
STACKS = {1024: 8, 4096: 6, 8192: 4}
WORDS = frozenset(ADJECTIVES) | frozenset(NOUNS)
FACTS: tuple[tuple[str, str], ...] = (
    (" It is said that the {k} was lent to {v}. ", "To whom was the {k} lent?"),
    ("\n+ {k}, stored inside {v}\n", "Inside what is the {k} stored?"),
    ('\nINVENTORY["{k}"] := "{v}"\n', 'What does INVENTORY say of "{k}"?'),
    (" Everyone agrees that the {k} hails from {v}. ", "From where does the {k} hail?"),
    ("\n;; {k} resolves through {v}\n", "Through what does the {k} resolve?"),
    (" On the shelf, {k} sits behind {v}. ", "Behind which shelf thing sits {k}?"),
)
# (name, description, fields with their kinds)
TOOLS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("inflate_balloon", "inflate the balloon", (("helium_grade", "word"), ("puffs", "integer"))),
    ("grill.ignite", "ignite the grill", (("charcoal", "phrase"), ("sear_temp", "integer"))),
    ("piano.retune", "retune the piano", (("octave_span", "number"), ("parlour", "word"))),
    ("moorYacht", "moor the yacht", (("pontoon", "word"), ("overnight", "boolean"))),
    ("bake-loaf", "bake a loaf", (("flour_kind", "word"), ("minutes_oven", "integer"))),
    ("museum__book_guide", "book a museum guide", (("dialect", "word"), ("visitors", "integer"))),
    ("trim_hedge", "trim the hedge", (("shears", "phrase"), ("inches", "number"))),
    ("sauna.vent", "vent the sauna", (("flap", "word"), ("quietly", "boolean"))),
)
WISHES = (
    "It would be lovely if you could {t}. {a}.",
    "{T}, will you? {a}.",
    "Let somebody {t}: {a}.",
)


def draw_value(rng: random.Random, kind: str) -> JsonValue:
    """Return a value of a tool's field."""
    if kind == "word":
        return rng.choice(NOUNS)
    if kind == "phrase":
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if kind == "integer":
        return rng.randint(2, 480)
    if kind == "number":
        return rng.randint(11, 999) / 10
    return rng.random() < 0.5


def needle_rows(
    tokens: np.ndarray, encode: Callable[[str], list[int]], length: int, count: int
) -> list[list[tuple[list[int], float]]]:
    """Return 16 rows for each of `count` haystacks: the haystack and one question."""
    rng = random.Random(f"dev:{length}")
    rows = []
    for _ in range(count):
        keys = rng.sample([f"{a} {n}" for a in ADJECTIVES for n in NOUNS], 16)
        facts = []
        for key in keys:
            statement, question = rng.choice(FACTS)
            value = rng.choice(
                (
                    str(rng.randint(100_000, 999_999)),
                    f"{rng.choice(NOUNS)}-{rng.randint(10, 99)}",
                    f"{rng.getrandbits(28):07x}",
                )
            )
            ids = encode(statement.format(k=key, v=value))
            facts.append((ids, question.format(k=key), value))
        room = length - 90 - sum(len(ids) for ids, _, _ in facts)
        start = rng.randrange(len(tokens) - room)
        hay = tokens[start : start + room].tolist()
        text: list[int] = []
        for index, (ids, _, _) in enumerate(facts):
            text += hay[index * room // 16 : (index + 1) * room // 16] + ids
        for _, question, value in facts:
            turn = Turn([text, f"\n\n{question}"], value)
            row = segments_of(Conversation((turn,)))
            rows.append([(encode(s) if isinstance(s, str) else list(s), w) for s, w in row])
    return rows


def tool_rows(
    encode: Callable[[str], list[int]], count: int
) -> list[list[tuple[list[int], float]]]:
    """Return rows that end in the right tool call."""
    rng, rows = random.Random("dev:tools"), []
    for _ in range(count):
        offered = rng.sample(TOOLS, rng.randint(2, 4))
        forms: list[dict[str, object]] = []
        for name, told, fields in offered:
            kinds = {"integer": "integer", "number": "number", "boolean": "boolean"}
            properties = {field: {"type": kinds.get(kind, "string")} for field, kind in fields}
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            function = {"name": name, "description": told.capitalize() + ".", "parameters": schema}
            forms.append({"type": "function", "function": function})
        name, told, fields = rng.choice(offered)
        values = {field: draw_value(rng, kind) for field, kind in fields}
        listed = ", ".join(f"{k} ought to read {str(v).lower()}" for k, v in values.items())
        wish = rng.choice(WISHES).format(t=told, T=told.capitalize(), a=listed)
        head = segments_of(Conversation((Turn(wish, ""),), tuple(forms)))[:-1]
        call = (write_call(Call(name, values)) + "<|observation|>", ANSWER)
        rows.append([(encode(s) if isinstance(s, str) else list(s), w) for s, w in [*head, call]])
    return rows


def examine(judge: Judge, tokens: np.ndarray) -> dict[str, object]:
    """Return the figures of the small examination, sparse and dense."""
    judge.model.eval()
    out: dict[str, object] = {}
    calls = tool_rows(judge.encode, 128)
    for sparse in (True, False):
        name = "sparse" if sparse else "dense"
        out[f"dev_tools_{name}"] = judge.run(calls, 1024, sparse).summary()
        for length, count in STACKS.items():
            rows = needle_rows(tokens, judge.encode, length, count)
            out[f"dev_needle_{length}_{name}"] = judge.run(rows, length, sparse).summary()
    judge.model.train()
    return out
