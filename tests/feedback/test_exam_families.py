"""Training and examination share nothing that could be learnt by heart.

The two halves are plain lists in two files; these tests intersect them, the drawn items included.
"""

from __future__ import annotations

import random
import re
import string
from itertools import product

import numpy as np
import pytest

from oxplow.feedback.exam import families as exam
from oxplow.feedback.exam import read_held_out
from oxplow.feedback.exam.needle import draw_secret
from oxplow.feedback.exam.values import draw_value
from training import corpus, dev
from training import families as training
from training.generators.facts import random_phrasing
from training.generators.names import name_parts, tool_name
from training.generators.phrases import connector, wish
from training.generators.source import Source

_ENGLISH = frozenset(
    re.findall(
        r"\w+",
        """a an and answer answers are as at be by can could do does field filed find for form from
        give has hold holds how i in is it item json known me my need note now of on or our please
        read reply schema should state tell thanks that the their there they this to under up use
        was we what which who will with would you your""",
    )
)


def bare(template: str) -> str:
    """Strip a template to its words: places, case, punctuation and spaces make no difference."""
    without_places = re.sub(r"\{\w+\}", " ", template)
    return " ".join(re.findall(r"[a-z0-9_]+", without_places.lower()))


def templates(*groups: object) -> set[str]:
    """Return the bare form of every template in nested tuples."""
    found: set[str] = set()
    for group in groups:
        if isinstance(group, str):
            found.add(bare(group))
        elif isinstance(group, exam.FactTemplate):
            found |= {bare(group.statement), bare(group.question)}
        elif isinstance(group, tuple):
            found |= templates(*group)
    return found


EXAM_TEMPLATES = templates(
    exam.FACTS,
    exam.TOOL_WISHES,
    exam.TOOL_ARGUMENT,
    exam.JSON_REQUESTS,
    exam.JSON_ARGUMENT,
    exam.DIGIT_QUESTIONS,
    exam.SHAPE_QUESTIONS,
    exam.COLOUR_QUESTIONS,
)
TRAINING_TEMPLATES = templates(
    training.FACTS,
    training.SINGLE_FACTS,
    training.TOOL_WISHES,
    training.ARGUMENTS,
    training.JSON_WISHES,
    training.DIGIT_QUESTIONS,
    training.SHAPE_QUESTIONS,
    training.COLOUR_QUESTIONS,
    training.GROUND_QUESTIONS,
    training.DESCRIBE_QUESTIONS,
)


def parts_of(name: str) -> tuple[str, ...]:
    """Cut a tool's name in any casing into its lower-case words."""
    return tuple(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", name).lower()))


def test_no_template_stands_in_both_halves() -> None:
    assert len(EXAM_TEMPLATES) > 15 < len(TRAINING_TEMPLATES)
    shared = EXAM_TEMPLATES & TRAINING_TEMPLATES
    assert shared - {""} == set()


def test_no_template_is_another_s_beginning() -> None:
    long = [t for t in TRAINING_TEMPLATES if len(t.split()) >= 3]
    near = [
        (e, t) for e in EXAM_TEMPLATES for t in long if e.startswith(t) or t.startswith(e) and e
    ]
    assert near == []


def made_up() -> Source:
    """Return a source that draws from every word of the held-out text that training allows."""
    words = training.training_words(read_held_out(400_000)["prose"])
    return Source(random.Random(0), words, np.zeros(0, np.uint16))


def test_no_made_up_phrasing_is_a_template_of_the_exam() -> None:
    source = made_up()
    facts = [random_phrasing(source, "KEY").fill("", "", "VALUE") for _ in range(5000)]
    drawn = {bare(re.sub(r"KEY|VALUE", " ", part)) for fact in facts for part in fact}
    drawn |= {bare(connector(source, several=True)) for _ in range(2000)}
    drawn |= {bare(wish(source, "{task}", "{arguments}")) for _ in range(2000)}
    assert len(drawn) > 5000
    assert drawn & EXAM_TEMPLATES - {""} == set()


def test_no_tool_name_can_be_drawn_in_training() -> None:
    drawn = {parts_of(f"{v}_{o}") for v, o in product(training.TOOL_VERBS, training.TOOL_OBJECTS)}
    held_out = {parts_of(tool.name) for tool in exam.TOOLS}
    assert len(held_out) == len(exam.TOOLS)
    assert held_out & drawn == set()


def test_no_made_up_tool_name_has_the_words_of_the_exam_s() -> None:
    source = made_up()
    held_out = {frozenset(parts_of(tool.name)) for tool in exam.TOOLS}
    pairs = [tuple(parts) for parts in held_out] + [("heat", "stove")]
    drawn = [name_parts(tool_name(source, pair[0], pair[-1])) for pair in pairs for _ in range(300)]
    assert any({"heat", "stove"} <= name for name in drawn)
    assert not any(parts <= name for parts in held_out for name in drawn)


def test_the_small_examination_shares_nothing_with_the_large_one() -> None:
    templates_of_dev = templates(dev.FACTS, dev.WISHES)
    assert templates_of_dev & EXAM_TEMPLATES == set()
    assert set() == dev.WORDS & exam.WORDS
    names = {parts_of(name) for name, _, _ in dev.TOOLS}
    assert names & {parts_of(tool.name) for tool in exam.TOOLS} == set()
    fields = {field for _, _, told in dev.TOOLS for field, _ in told}
    assert (
        fields & {f.name for form in (*exam.TOOLS, *exam.JSON_FORMS) for f in form.fields} == set()
    )


def test_no_schema_or_field_stands_in_both_halves() -> None:
    fields = {f.name for form in (*exam.TOOLS, *exam.JSON_FORMS) for f in form.fields}
    topics = {form.name for form in exam.JSON_FORMS}
    assert fields & set(training.FIELDS) == set()
    assert topics & (set(training.TOOL_OBJECTS) | set(training.FIELDS)) == set()


def test_training_words_leave_out_every_value_of_the_exam() -> None:
    text = " ".join((*exam.WORDS, "river", "ordinary")) * 2
    text += " " + " ".join((*exam.WORDS, "river", "ordinary"))
    assert training.training_words(text) == ["ordinary", "river"]


def test_no_fixed_word_of_training_is_a_value_of_the_exam() -> None:
    fixed = " ".join(
        (*training.TOOL_VERBS, *training.TOOL_OBJECTS, *training.FIELDS, *TRAINING_TEMPLATES)
    )
    words = set(re.findall(r"[a-z]+", fixed.lower())) - _ENGLISH
    assert words & exam.WORDS == set()


@pytest.mark.parametrize("seed", range(40))
def test_every_drawn_value_is_made_of_exam_words_and_digits(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [draw_secret(rng)]
    drawn += [
        str(draw_value(f, rng)) for form in (*exam.TOOLS, *exam.JSON_FORMS) for f in form.fields
    ]
    allowed = exam.WORDS | {"true", "false"}
    for value in drawn:
        if not set(value) <= set(string.hexdigits):  # numbers and hexadecimal names
            words = re.findall(r"[a-z]+", value.lower())
            assert set(words) <= allowed, value


@pytest.mark.parametrize(
    "name",
    [
        "networkx/algorithms/core.py",
        "networkx-3.4.2.dist-info/entry_points.txt",
        "site-packages/pygments/lexers/python.py",
        "pip/_vendor/pygments/lexer.py",
        "pydoc_data/topics.py",
    ],
)
def test_corpus_refuses_every_held_out_source(name: str) -> None:
    assert corpus.is_held_out(name)
    assert not corpus.is_held_out("pandas/core/frame.py")


def test_every_held_out_source_is_known_to_training_and_readable() -> None:
    sources = {n.split(".")[0] for n in (*exam.HELD_OUT_CODE, *exam.HELD_OUT_PROSE)}
    assert sources <= training.HELD_OUT
    text = read_held_out()
    assert all(len(part) > 400_000 for part in text.values())


def test_picture_seeds_do_not_meet() -> None:
    # training seeds its workers from 1,000,000 on, far fewer than up to the exam's first
    assert training.PICTURE_SEED < training.PICTURE_SEED_END <= exam.PICTURE_SEED
    workers = range(training.PICTURE_SEED, training.PICTURE_SEED + 1000 * 1000)
    assert exam.PICTURE_SEED not in workers
