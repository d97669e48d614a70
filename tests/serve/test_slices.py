"""Long text gives the ids of one go, in bounded time and memory, and too much of it is refused."""

from __future__ import annotations

import base64
import json
import random
import time
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import oxplow
from oxplow.errors import RequestError
from oxplow.serve import slices
from oxplow.serve.slices import SlicedEncoder
from oxplow.serve.text import Vocabulary, load_text

NANO = Path(oxplow.__file__).parent / "models" / "nano"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: dict[str, object] = {
    "one digit": [_WORDS + r"|\p{N}" + _REST],
    "three digits": [_WORDS + r"|\p{N}{1,3}" + _REST],
    "words of words": [r"\p{L}+( \p{L}+){0,3}| |\p{N}+|[^\s\p{L}\p{N}]+|\s+"],
    "digits, then words": [r"\p{N}{1,3}", _WORDS + _REST],
    "as in GPT-2": [],
}


@lru_cache(maxsize=8)
def tokenizer(splits: str) -> tuple[Tokenizer, dict[str, object]]:
    """Return the nano's merges behind other splits."""
    content = json.loads((NANO / "tokenizer.json").read_text())
    content |= {"added_tokens": [], "post_processor": None}
    patterns = SPLITS[splits]
    assert isinstance(patterns, list)
    stages: list[dict[str, object]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    stages.append({**last, "use_regex": not patterns})
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": stages}
    return Tokenizer.from_str(json.dumps(content)), content


def encoder(splits: str) -> SlicedEncoder:
    return SlicedEncoder(*tokenizer(splits))


def whole(splits: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(splits)[0].encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every few hundred characters and look at few around a cut."""
    monkeypatch.setattr(slices, "_SLICE", 300)
    monkeypatch.setattr(slices, "_NEAR", 60)


BITS = (
    *("a", "Z", " ", "  ", "\n", "\r\n", "\t", "1", "23", "4567", "'s", "'ll", "é", "中", "。"),
    *("🙂", "!", "...", "_", "(", ")", " word", "the ", "x y z", "\u00a0", "\u3000", "e\u0301"),
)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("splits", SPLITS)
def test_slices_give_the_ids_of_one_go(splits: str) -> None:
    own = encoder(splits)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(BITS), st.integers(1, 40)), max_size=200))
    def check(bits: list[tuple[str, int]]) -> None:
        text = "".join(b * (n if n > 30 else 1 + n % 3) for b, n in bits)
        assert own.encode(text) == whole(splits, text)

    check()


@pytest.mark.parametrize("splits", SPLITS)
def test_a_window_may_end_anywhere(splits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces at the end of a window are shaped by that end, so no cut may follow from them."""
    own = encoder(splits)
    monkeypatch.setattr(slices, "_NEAR", 60)
    texts = ("x'll", "'ve", "!!\r\n", "12", "a \n ", "中。", "é1'LL", "ab12 ")
    for text in (t * (900 // len(t)) for t in texts):
        want = whole(splits, text)
        for size in range(300, 312):
            monkeypatch.setattr(slices, "_SLICE", size)
            assert own.encode(text) == want, (text[:8], size)


@pytest.mark.parametrize("splits", SPLITS)
def test_real_texts_give_the_ids_of_one_go(splits: str) -> None:
    root = Path(oxplow.__file__).parent
    source = "".join(p.read_text() for p in sorted(root.glob("engine/*.py")))
    noise = base64.b64encode(random.Random(0).randbytes(150_000)).decode()
    for text in (source, noise, "中文字，很长的文本没有空格。" * 8000, "12345" * 30_000):
        assert encoder(splits).encode(text) == whole(splits, text)


def test_only_the_splits_that_keep_words_apart_are_cut_between_them() -> None:
    cuts = {name: encoder(name)._cuts_words for name in SPLITS}
    assert cuts.pop("words of words") is False
    assert all(cuts.values())


def test_a_tokenizer_that_changes_text_first_is_not_cut() -> None:
    plain, content = tokenizer("one digit")
    assert not SlicedEncoder(plain, {**content, "normalizer": {"type": "NFC"}}).is_byte_level
    assert not SlicedEncoder(plain, {**content, "pre_tokenizer": None}).is_byte_level


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_text(NANO).vocabulary


@pytest.mark.parametrize(
    "text", ["ab cd " * 4_000_000, "a" * 20_000_000, " " * 20_000_000, "<|user|>" * 1_000_000]
)
def test_what_cannot_fit_is_refused_before_it_is_read(vocabulary: Vocabulary, text: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="maximum context length is 100001 ") as refused:
        vocabulary.encode_template(text, 100_000)
    assert refused.value.code == "context_length_exceeded"
    assert time.monotonic() - began < 15


def test_nothing_that_fits_is_refused(vocabulary: Vocabulary) -> None:
    for text in ("a" * 200_000, " " * 300_000, "words and more words " * 20_000, "<think>x" * 999):
        ids = vocabulary.encode_template(text)
        assert vocabulary.encode_template(text, len(ids)) == ids
        with pytest.raises(RequestError, match="context length"):
            vocabulary.encode_template(text, len(ids) - 1)


def test_marks_of_guarded_text_do_not_count(vocabulary: Vocabulary) -> None:
    guarded = vocabulary.guard("<|user|>" * 3000)
    ids = vocabulary.encode_template(guarded)
    assert vocabulary.encode_template(guarded, len(ids)) == ids


def test_text_without_any_border_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_LONGEST_PIECE", 1 << 17)
    with pytest.raises(RequestError, match="no border"):
        encoder("one digit").encode("a" * 400_000)
