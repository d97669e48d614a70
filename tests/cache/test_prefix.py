"""Content keys are equal exactly if all that shapes the content is; snapshots go by value."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from oxplow.cache.prefix import (
    KeyChain,
    PictureSpan,
    SnapshotKind,
    SnapshotPool,
    root_key,
)

BLOCK = 4
EXPECTED_KEY = "d1852521d0f06f5655aa83c8b86b69c9"
tokens = st.lists(st.integers(0, 2), max_size=17)


def keys_of(
    token_ids: list[int],
    pictures: tuple[PictureSpan, ...] = (),
    *,
    revision: str = "r1",
    layout: str = "l1",
    salt: str = "",
) -> list[bytes]:
    chain = KeyChain(root_key(revision=revision, layout=layout, salt=salt), BLOCK, pictures)
    chain.extend(token_ids)
    return chain.keys


@given(tokens, tokens)
def test_keys_are_equal_exactly_as_far_as_whole_blocks_of_the_texts_are(
    left: list[int], right: list[int]
) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    mine, theirs = keys_of(left), keys_of(right)
    same = sum(a == b for a, b in zip(mine, theirs, strict=False))
    assert same == common // BLOCK
    assert mine[:same] == theirs[:same]
    assert len(mine) == len(left) // BLOCK


@given(tokens, st.integers(0, 17))
def test_keys_do_not_depend_on_how_a_text_grew(text: list[int], cut: int) -> None:
    chain = KeyChain(root_key(revision="r1", layout="l1"), BLOCK)
    chain.extend(text[:cut])
    chain.extend(text)
    assert chain.keys == keys_of(text)


def test_roots_part_revisions_layouts_and_tenants() -> None:
    text = list(range(8))
    variants = [
        keys_of(text),
        keys_of(text, revision="r2"),
        keys_of(text, layout="l2"),
        keys_of(text, salt="tenant"),
        keys_of(text, revision="r1l", layout="1"),  # parts are delimited, not glued
    ]
    assert len({keys[0] for keys in variants}) == len(variants)
    assert keys_of(text, salt="tenant") == keys_of(text, salt="tenant")


def test_a_picture_changes_the_keys_from_its_first_block_on() -> None:
    text = [7] * 16
    cat = keys_of(text, (PictureSpan(5, 6, "cat"),))
    dog = keys_of(text, (PictureSpan(5, 6, "dog"),))
    moved = keys_of(text, (PictureSpan(6, 6, "cat"),))
    assert cat[0] == dog[0] == keys_of(text)[0]
    longer = keys_of(text, (PictureSpan(5, 7, "cat"),))
    assert len({cat[1], dog[1], moved[1], longer[1], keys_of(text)[1]}) == 5
    assert len({cat[3], dog[3], moved[3]}) == 3


def test_the_key_of_a_fixed_text_never_changes() -> None:
    # A change of this constant makes every stored prefix unfindable: bump the format name with it.
    assert keys_of([1, 2, 3, 4])[0].hex() == EXPECTED_KEY


def test_keys_are_equal_in_another_process() -> None:
    script = (
        "from oxplow.cache.prefix import KeyChain, root_key\n"
        "chain = KeyChain(root_key(revision='r1', layout='l1'), 4)\n"
        "chain.extend([1, 2, 3, 4])\n"
        "print(chain.keys[0].hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == EXPECTED_KEY


def test_a_full_pool_gives_up_guesses_before_proven_snapshots() -> None:
    pool = SnapshotPool(10, 3)
    pool.put(b"guess", 64, SnapshotKind.SPACED)
    pool.put(b"end", 64, SnapshotKind.PROMPT_END)
    pool.put(b"newer guess", 128, SnapshotKind.SPACED)
    assert pool.put(b"end 2", 64, SnapshotKind.PROMPT_END) is not None
    assert pool.keys() == {b"end", b"newer guess", b"end 2"}
    pool.put(b"end 3", 64, SnapshotKind.PROMPT_END)
    assert pool.keys() == {b"end", b"end 2", b"end 3"}
    pool.check()


def test_an_old_favourite_goes_when_a_pool_of_new_ones_came() -> None:
    pool = SnapshotPool(0, 2)
    pool.put(b"old", 64, SnapshotKind.SPACED)
    kept = pool.find(b"old")
    assert kept is not None
    pool.hit(kept)
    for i in range(6):
        pool.put(b"%d" % i, 64, SnapshotKind.PROMPT_END)
        pool.check()
    assert pool.find(b"old") is None


def test_a_pool_without_slots_keeps_nothing() -> None:
    pool = SnapshotPool(0, 0)
    assert pool.put(b"a", 64, SnapshotKind.SPACED) is None
    assert len(pool) == 0


def test_a_known_snapshot_is_not_taken_twice() -> None:
    pool = SnapshotPool(0, 2)
    assert pool.put(b"a", 64, SnapshotKind.SPACED) is not None
    assert pool.put(b"a", 64, SnapshotKind.BRANCH) is None
