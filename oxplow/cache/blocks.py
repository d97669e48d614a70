"""Blocks and slots as numbers: who holds them, which are free, which hold reusable content.

Owns the free lists, the reference counts and the map from content key to block. Knows no tensor,
no request and no policy beyond "the least recently released content goes first".
Invariant: every block is in exactly one of three states: free (no content), held (referenced at
least once) or idle (unreferenced, content still findable); every slot is either free or held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NewType

from oxplow.errors import CapacityError

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)


class BlockPool:
    """Cache blocks with reference counts, findable by content key once published."""

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes], None] | None = None) -> None:
        """Make `num_blocks` free blocks; `on_evict` hears each key whose content is given up."""
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._references = [0] * num_blocks
        self._idle: OrderedDict[BlockId, None] = OrderedDict()  # the first goes first
        self._key_of: dict[BlockId, bytes] = {}
        self._block_of: dict[bytes, BlockId] = {}
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out now, idle content included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Unreferenced blocks whose content can still be found."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Blocks that someone references."""
        return self.num_blocks - self.num_available

    def take(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks with one reference each, giving up idle content if it must.

        Raises CapacityError, and hands out nothing, where there are fewer.
        """
        if count > self.num_available:
            raise CapacityError("not enough cache blocks", got=self.num_available, wanted=count)
        while len(self._free) < count:
            self._give_up(next(iter(self._idle)))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each block that holds content, idle or held."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference of each block; the last ones go first when content must go.

        A prefix is worth nothing without its beginning, so the end of a sequence is given up first.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def publish(self, block: BlockId, key: bytes) -> bool:
        """Make a held block findable by its content; False where another holder's block is already.

        An idle block of the same content is freed in its favour: one copy is enough.
        """
        if self._references[block] < 1 or block in self._key_of:
            raise AssertionError(f"block {block} cannot be published")
        known = self._block_of.get(key)
        if known is not None:
            if self._references[known]:
                return False
            del self._idle[known], self._key_of[known]
            self._free.append(known)
        self._block_of[key], self._key_of[block] = block, key
        return True

    def find(self, key: bytes) -> BlockId | None:
        """Return the block that holds this content, None where nobody kept it."""
        return self._block_of.get(key)

    def key_of(self, block: BlockId) -> bytes | None:
        """Return the content key of a published block."""
        return self._key_of.get(block)

    def is_private(self, block: BlockId) -> bool:
        """Tell whether exactly one holder has the block and nobody can find it."""
        return self._references[block] == 1 and block not in self._key_of

    def forget(self, keys: Iterable[bytes]) -> None:
        """Make content unfindable; its blocks stay with their holders."""
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                continue
            if self._references[block] == 0:
                self._give_up(block)
            else:
                self._drop_key(block)

    def drop_idle(self) -> int:
        """Give up all idle content; return how many blocks that freed."""
        idle = list(self._idle)
        for block in idle:
            self._give_up(block)
        return len(idle)

    def check(self) -> None:
        """Assert the invariant; linear in the number of blocks."""
        free, idle = set(self._free), set(self._idle)
        held = {b for b, n in enumerate(self._references) if n > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle and not free & held and not idle & held, "a block has two states"
        assert len(free) + len(idle) + len(held) == self.num_blocks, "a block has no state"
        assert min(self._references, default=0) >= 0, "a reference count is negative"
        assert idle <= set(self._key_of), "an idle block has no content key"
        assert not free & set(self._key_of), "a free block has a content key"
        assert {b: k for k, b in self._block_of.items()} == self._key_of, "the key maps disagree"

    def references(self, block: BlockId) -> int:
        """Return how many holders a block has."""
        return self._references[block]

    def _give_up(self, block: BlockId) -> None:
        del self._idle[block]
        self._drop_key(block)
        self._free.append(block)

    def _drop_key(self, block: BlockId) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        if self._on_evict is not None:
            self._on_evict(key)


class SlotPool:
    """State slots [first, first + count): each free or held by one owner."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self._free = [SlotId(i) for i in range(first + count - 1, first - 1, -1)]
        self._held: set[SlotId] = set()

    @property
    def num_available(self) -> int:
        """Slots that `take` could hand out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots in use."""
        return len(self._held)

    def take(self) -> SlotId:
        """Hand out a slot; raises CapacityError where all are held."""
        if not self._free:
            raise CapacityError("not enough state slots", got=0, wanted=1)
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def release(self, slot: SlotId) -> None:
        """Take a slot back."""
        if slot not in self._held:
            raise AssertionError(f"slot {slot} is released but nobody holds it")
        self._held.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is free or held, never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & self._held, "a slot is both free and held"
        assert free | self._held == set(range(self.first, self.first + self.count)), (
            "a slot is lost"
        )
