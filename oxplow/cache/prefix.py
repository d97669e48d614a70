"""What a cached prefix is called, and which states of it are kept.

Owns the content keys of blocks and the pool of state snapshots with its eviction. Knows no tensor
and no request: a snapshot is a slot number, a key and a position.
Invariant: two keys are equal exactly if tokens, pictures, tenant salt, model revision and cache
layout of the whole prefix are equal (up to hash collisions), in every process and on every
machine; a snapshot belongs to the end of a whole block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from oxplow.cache.blocks import SlotId, SlotPool

_KEY_BYTES = 16
_FORMAT = b"oxplow-prefix-1"  # part of every key: a change of the rule below must change it


def root_key(*, revision: str, layout: str, salt: str = "") -> bytes:
    """Return the key before the first token.

    `revision` names the weights by content, `layout` the cache components and their formats,
    `salt` the tenant; prefixes under different roots never meet.
    """
    digest = blake2b(_FORMAT, digest_size=_KEY_BYTES)
    for part in (revision, layout, salt):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Token positions [start, start + num_tokens) that stand for a picture of this content."""

    start: int
    num_tokens: int
    content_hash: str

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.num_tokens


class KeyChain:
    """The keys of one sequence's whole blocks; it grows with the sequence and never changes."""

    def __init__(self, root: bytes, block_size: int, pictures: Sequence[PictureSpan] = ()) -> None:
        self.block_size = block_size
        self.root = root
        self.keys: list[bytes] = []
        self._pictures = sorted(pictures, key=lambda p: p.start)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the blocks that `token_ids`, the sequence from its start, completes."""
        size = self.block_size
        parent = self.keys[-1] if self.keys else self.root
        for start in range(len(self.keys) * size, len(token_ids) - size + 1, size):
            parent = self._key(parent, start, token_ids[start : start + size])
            self.keys.append(parent)

    def _key(self, parent: bytes, start: int, token_ids: Sequence[int]) -> bytes:
        raw = array("q", token_ids)
        if sys.byteorder == "big":
            raw.byteswap()
        digest = blake2b(parent, digest_size=_KEY_BYTES)
        digest.update(raw.tobytes())
        for picture in self._pictures:  # later blocks inherit it through their parent's key
            if start <= picture.start < start + self.block_size:
                name = picture.content_hash.encode()
                sizes = (picture.start - start, picture.num_tokens, len(name))
                digest.update(b"".join(n.to_bytes(8, "little") for n in sizes) + name)
        return digest.digest()


class SnapshotKind(Enum):
    """Why a snapshot was taken."""

    SPACED = "spaced"  # a regular position of a long prompt
    BRANCH = "branch"  # where a request left a cached path
    PROMPT_END = "prompt_end"  # the last whole block below a prompt's end
    ANSWER = "answer"  # the newest whole block of an answer in progress
    ADOPTED = "adopted"  # came with a manifest


@dataclass(slots=True)
class Snapshot:
    """One kept state: slot components of a prefix of `position` tokens."""

    key: bytes
    slot: SlotId
    position: int
    kind: SnapshotKind
    last_used: int
    hits: int = 0


class SnapshotPool:
    """Snapshots in slots of their own; the least valuable one makes room for a new one."""

    def __init__(self, first_slot: int, count: int) -> None:
        self._slots = SlotPool(first_slot, count)
        self._by_key: dict[bytes, Snapshot] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def capacity(self) -> int:
        """How many snapshots fit."""
        return self._slots.count

    def find(self, key: bytes) -> Snapshot | None:
        """Return the snapshot at the end of the block called `key`."""
        return self._by_key.get(key)

    def keys(self) -> set[bytes]:
        """Return the keys of all kept snapshots."""
        return set(self._by_key)

    def hit(self, snapshot: Snapshot) -> None:
        """Remember that a request started from this snapshot."""
        self._tick += 1
        snapshot.last_used, snapshot.hits = self._tick, snapshot.hits + 1

    def put(self, key: bytes, position: int, kind: SnapshotKind) -> SlotId | None:
        """Make room for a snapshot and return the slot to copy the state into.

        None where the snapshot exists already, the pool has no slots, or all that is kept is worth
        more. A guess does not age the others: a long prompt takes many.
        """
        if key in self._by_key or self.capacity == 0:
            return None
        self._tick += kind is not SnapshotKind.SPACED
        snapshot = Snapshot(key, SlotId(-1), position, kind, self._tick)
        if self._slots.num_available == 0:
            least = min(self._by_key.values(), key=self._value)
            if self._value(least) > self._value(snapshot):
                return None
            self.drop(least.key)
        snapshot.slot = self._slots.take()
        self._by_key[key] = snapshot
        return snapshot.slot

    def drop(self, key: bytes) -> None:
        """Give up a snapshot, if it is there."""
        snapshot = self._by_key.pop(key, None)
        if snapshot is not None:
            self._slots.release(snapshot.slot)

    def check(self) -> None:
        """Assert that slots and snapshots agree."""
        self._slots.check()
        assert self._slots.num_held == len(self._by_key), "a snapshot slot is lost"
        slots = {s.slot for s in self._by_key.values()}
        assert len(slots) == len(self._by_key), "two snapshots share a slot"
        assert all(k == s.key for k, s in self._by_key.items()), "a snapshot is under a wrong key"

    def _value(self, snapshot: Snapshot) -> int:
        """Age in uses of the pool; a good position, or proof of use, makes a whole pool younger.

        Spaced snapshots are guesses. Without this rank a long new prompt would push out every
        branch point that others return to; without the age, old favourites would never go.
        """
        is_proven = snapshot.hits or snapshot.kind is SnapshotKind.BRANCH  # two texts met there
        rank = 2 if is_proven else 0 if snapshot.kind is SnapshotKind.SPACED else 1
        return snapshot.last_used + rank * self.capacity
