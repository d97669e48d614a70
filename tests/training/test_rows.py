"""Rows have their length, answers stand in their prompts, picture tokens match picture slots."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from oxplow.feedback.exam import families as exam
from training.chat import ANSWER, CONTEXT, segments_of
from training.corpus import Seen, html_to_text, is_plain, mix_to_share
from training.families import training_words
from training.generators.facts import FIRST, SECOND, VALUE, draw_facts, random_phrasing
from training.generators.mix import LONG_ROW, Mix, Mixer
from training.generators.names import tool_name
from training.generators.recall import recall_row
from training.generators.source import Pieces, Source
from training.generators.talk import strip_turn
from training.generators.tools import draw_tools, json_conversation, tool_conversation
from training.render import SHAPE_NAMES
from training.vision import MAX_BLOCKS

TOKENIZER = Path(__file__).parents[2] / "oxplow" / "models" / "nano" / "tokenizer.json"
WORDS = training_words("river mountain paper copy table winter simple letter under garden " * 3)
ATLAS = [*"0123456789", *SHAPE_NAMES]


@pytest.fixture(scope="module")
def mixer() -> Mixer:
    tokens = np.random.default_rng(0).integers(0, 8000, 60_000).astype(np.uint16)
    return Mixer(str(TOKENIZER), tokens, WORDS, ATLAS, seed=11)


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_recall_rows_fill_their_length(mixer: Mixer, length: int) -> None:
    for _ in range(10):
        row = mixer.encode_all(recall_row(mixer.source, length, mixer.encode))
        assert sum(len(ids) for ids, _ in row) == length
        text = mixer.tokenizer.decode([i for ids, w in row if w != ANSWER for i in ids])
        for ids, weight in row:
            if weight == ANSWER:
                answer = mixer.tokenizer.decode(ids, skip_special_tokens=True)
                assert answer in text


def test_long_recall_rows_may_be_several_short_ones(mixer: Mixer) -> None:
    starts = set()
    for _ in range(12):
        row = mixer.recall(LONG_ROW + 2)
        ids = [i for part, _ in row for i in part]
        assert len(ids) == LONG_ROW + 2
        starts.add(ids.count(mixer.tokenizer.token_to_id("[gMASK]")))
    assert 1 in starts
    assert len(starts) > 1


def test_a_phrasing_has_its_places_once_and_a_question_about_the_key(mixer: Mixer) -> None:
    for _ in range(2000):
        phrasing = random_phrasing(mixer.source)
        assert phrasing.statement.count(VALUE) == 1
        for place in (FIRST, SECOND):
            assert phrasing.statement.count(place) == 1
            assert phrasing.question.count(place) == 1
        assert VALUE not in phrasing.question
        text = " ".join(phrasing.fill("oak", "tub", "v7"))
        assert not set(text) & {FIRST, SECOND, VALUE}


def test_facts_of_a_haystack_are_easily_mistaken_but_told_apart_by_key(mixer: Mixer) -> None:
    shared_words, shared_phrasings = 0, 0
    for _ in range(50):
        facts = draw_facts(mixer.source, 12)
        assert len({fact.key for fact in facts}) == 12
        for fact in facts:
            assert fact.value in fact.statement
            assert fact.value
        words = [set(fact.key.split()) for fact in facts]
        shared_words += any(a & b for i, a in enumerate(words) for b in words[:i])
        bare = {
            " ".join(w for w in fact.statement.replace(fact.value, "").split() if w not in key)
            for fact, key in zip(facts, words, strict=True)
        }
        shared_phrasings += len(bare) < 12
    assert shared_words > 40
    assert shared_phrasings > 25


def test_tool_names_come_in_many_shapes(mixer: Mixer) -> None:
    names = [tool_name(mixer.source, "heat", "stove") for _ in range(600)]
    for mark in ("_", ".", "-", "__", "::"):
        assert any(mark in name for name in names), mark
    assert any(name[1:] != name[1:].lower() for name in names)
    assert any(name.isdigit() or name[-1].isdigit() for name in names)
    both = [n.lower() for n in names if "heat" in n.lower() and "stove" in n.lower()]
    first = sum(name.index("heat") < name.index("stove") for name in both)
    assert 0.35 < first / len(both) < 0.65
    tools = draw_tools(mixer.source, 5)
    assert len(tools) == len({tool.task for tool in tools.values()}) == 5


def test_words_to_be_rewritten_stand_in_the_question(mixer: Mixer) -> None:
    for _ in range(500):
        ask, answer, _ = strip_turn(mixer.source)
        letters = "".join(filter(str.isalnum, ask))
        assert answer
        assert all(c in letters for c in answer if c.isalnum())


def test_no_word_of_the_examination_is_made_of_pieces(mixer: Mixer) -> None:
    assert len(mixer.source.pieces.heads) > 1000 < len(mixer.source.pieces.tails)
    bad = Source(random.Random(0), [], np.zeros(0, np.uint16), Pieces(["vel"], ["vet"]))
    made = {bad.pieced() for _ in range(200)}
    assert "vel" in made
    assert not made & exam.WORDS


def test_a_row_without_room_is_refused(mixer: Mixer) -> None:
    with pytest.raises(ValueError, match="no room"):
        recall_row(mixer.source, 8, mixer.encode)


def test_batches_have_fixed_shapes_and_matching_pictures(mixer: Mixer) -> None:
    mix = Mix(0.2, 0.3, 0.5, 0.6, 24)
    for _ in range(5):
        batch = mixer.batch(4, 512, mix)
        assert batch.ids.shape == batch.weights.shape == (4, 514)
        live = batch.places[batch.places < 4 * 513]
        shown = np.flatnonzero((batch.ids[:, :-1] == mixer.image_token).reshape(-1))
        assert np.array_equal(live, shown)
        rows = batch.pictures[:, 14] * batch.pictures[:, 15]
        per_slot = (batch.places.reshape(-1, MAX_BLOCKS) < 4 * 513).sum(1)
        used = per_slot > 0
        assert np.array_equal(per_slot[used], rows[used])


def test_arguments_stand_in_the_prompt(mixer: Mixer) -> None:
    for maker in (tool_conversation, json_conversation):
        for _ in range(200):
            conversation = maker(mixer.source)
            turn = conversation.turns[0]
            values = [v for call in turn.calls for v in call.arguments.values()]
            if maker is json_conversation:
                values = list(json.loads(turn.answer).values())
            prompt = "".join(s for s, w in segments_of(conversation)[:2] if w == CONTEXT)
            for value in values:
                assert (value if isinstance(value, str) else json.dumps(value)) in prompt


def test_drawing_is_repeatable() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    first, second = (Mixer(str(TOKENIZER), tokens, WORDS, ATLAS, seed=5) for _ in range(2))
    mix = Mix(0.3, 0.3, 0.4, 0.5, 8)
    assert np.array_equal(first.batch(3, 256, mix).ids, second.batch(3, 256, mix).ids)


def test_the_corpus_drops_copies_tables_and_markup() -> None:
    seen = Seen()
    text = "\n".join(f"a line of this document that is long enough {i}" for i in range(20))
    assert seen.fresh(text)
    assert not seen.fresh(text)
    assert not seen.fresh(text + "\none more line that nobody has seen before")
    assert not is_plain("0123456789 " * 100)
    assert html_to_text("<p>one</p><script>two()</script><p>a &lt; b</p>") == "one\n\na < b"
    rng = random.Random(0)
    code, docs = ([c * rng.randint(50, 150) for _ in range(99)] for c in "xy")
    kept = mix_to_share(code, docs, 0.25)
    share = sum(len(t) for t in kept if t[0] == "y") / sum(map(len, kept))
    assert sum(map(len, kept)) < sum(map(len, code + docs))
    assert 0.2 < share < 0.5
