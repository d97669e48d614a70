"""Who holds which blocks and slot, what a new request can reuse, and what is promised to whom.

Owns one `Holding` per running owner, admission by exact units, and the hybrid prefix look-up.
Knows no tensor, no queue and no clock; copies of state are described here and done by the engine.
Invariant: the blocks promised to admitted owners never exceed those available; what can be looked
up was published by an owner whose numbers were finite; every taken unit is given back by
`release`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from oxplow.cache.blocks import BlockId, BlockPool, SlotId, SlotPool
from oxplow.cache.plan import CachePlan, blocks_for
from oxplow.cache.prefix import KeyChain, Snapshot, SnapshotKind, SnapshotPool
from oxplow.trace import EventRing, EventType, Lane


class MissReason(Enum):
    """Why a request computes tokens that might have been found."""

    NONE = "none"  # everything that could be reused was
    SWITCHED_OFF = "switched_off"  # there are no snapshot slots, or the request asked for none
    SHORT = "short"  # the prompt has no whole block below its last token
    COLD = "cold"  # nobody has computed the first block, or its content is gone
    DIVERGED = "diverged"  # the cached path ends before the prompt does
    NO_SNAPSHOT = "no_snapshot"  # the blocks are there, no state is kept that far


@dataclass(frozen=True, slots=True)
class Hit:
    """What a look-up found: `tokens` to skip, their blocks, and the state to start from.

    `matched_tokens` is how far the blocks alone reach; the difference is lost for want of a
    snapshot.
    """

    tokens: int
    matched_tokens: int
    block_ids: tuple[BlockId, ...]
    snapshot: Snapshot | None
    miss: MissReason


@dataclass(slots=True)
class Holding:
    """What one owner has: its slot, its blocks in order, and how many blocks it may still claim."""

    slot: SlotId
    block_ids: list[BlockId]
    reserved_blocks: int
    published: int = 0
    answer_key: bytes | None = None

    @property
    def promised(self) -> int:
        """Blocks reserved but not taken yet."""
        return max(0, self.reserved_blocks - len(self.block_ids))


@dataclass(slots=True)
class PrefixCounters:
    """Totals since the start, in tokens: asked for, found, and lost for want of a snapshot."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    misses: dict[MissReason, int] = field(default_factory=dict)


class CacheManager:
    """The one keeper of blocks, slots and snapshots; owners are named by a string."""

    def __init__(self, plan: CachePlan, ring: EventRing | None = None) -> None:
        self.plan = plan
        self.counters = PrefixCounters()
        self._ring = ring or EventRing(0)
        self.snapshots = SnapshotPool(plan.num_slots, plan.num_snapshots)
        self.blocks = BlockPool(plan.num_blocks, self.snapshots.drop)
        self.slots = SlotPool(0, plan.num_slots)
        self._holdings: dict[str, Holding] = {}

    @property
    def holdings(self) -> Mapping[str, Holding]:
        """What every owner has, read-only."""
        return MappingProxyType(self._holdings)

    @property
    def reuses_prefixes(self) -> bool:
        """Tell whether prefixes can be found at all."""
        return self.snapshots.capacity > 0

    @property
    def promised_blocks(self) -> int:
        """Blocks that admitted owners may still claim."""
        return sum(h.promised for h in self._holdings.values())

    def lookup(self, chain: KeyChain, num_tokens: int, *, allowed: bool = True) -> Hit:
        """Find the longest reusable prefix of the first `num_tokens` tokens, at least one left out.

        The usable length is the deepest position that has all its blocks and a snapshot. Takes
        nothing.
        """
        limit = (num_tokens - 1) // self.plan.block_size
        if not (allowed and self.reuses_prefixes):
            return Hit(0, 0, (), None, MissReason.SWITCHED_OFF)
        found: list[BlockId] = []
        deepest: Snapshot | None = None
        usable = 0
        for key in chain.keys[:limit]:
            block = self.blocks.find(key)
            if block is None:
                break
            found.append(block)
            snapshot = self.snapshots.find(key)
            if snapshot is not None:
                deepest, usable = snapshot, len(found)
        miss = self._miss(limit, len(found), usable)
        size = self.plan.block_size
        return Hit(usable * size, len(found) * size, tuple(found[:usable]), deepest, miss)

    def fits(self, hit: Hit, reserve_tokens: int) -> bool:
        """Tell whether a slot and `reserve_tokens` worth of unpromised blocks are there."""
        return self.slots.num_available > 0 and self.missing_blocks(hit, reserve_tokens) <= 0

    def missing_blocks(self, hit: Hit, reserve_tokens: int) -> int:
        """Return how many blocks too few there are for an admission (0 or less: enough)."""
        revived = sum(self.blocks.references(b) == 0 for b in hit.block_ids)
        wanted = blocks_for(reserve_tokens, self.plan.block_size) - len(hit.block_ids)
        return wanted + revived + self.promised_blocks - self.blocks.num_available

    def admit(self, owner: str, hit: Hit, reserve_tokens: int) -> Holding:
        """Give `owner` a slot and the blocks of `hit`, and promise it blocks for `reserve_tokens`.

        The caller copies the snapshot's slot into the new slot before the next step. Raises
        CapacityError (and takes nothing) where `fits` says no.
        """
        if owner in self._holdings:
            raise AssertionError(f"{owner} is admitted twice")
        slot = self.slots.take()
        self.blocks.share(hit.block_ids)
        holding = Holding(
            slot=slot,
            block_ids=list(hit.block_ids),
            reserved_blocks=blocks_for(reserve_tokens, self.plan.block_size),
            published=len(hit.block_ids),
        )
        self._holdings[owner] = holding
        if self.promised_blocks > self.blocks.num_available:
            raise AssertionError(f"{owner} was admitted without asking `fits`")
        if hit.snapshot is not None:
            self.snapshots.hit(hit.snapshot)
        self._ring.instant(
            EventType.SLOT_ALLOC, Lane.CACHE, request=owner, detail={"slot": int(slot)}
        )
        if hit.block_ids:
            detail = {"blocks": len(hit.block_ids), "tokens": hit.tokens}
            self._ring.instant(EventType.BLOCK_REUSE, Lane.CACHE, request=owner, detail=detail)
        return holding

    def count(self, hit: Hit, num_tokens: int) -> None:
        """Add one finished look-up to the counters."""
        self.counters.queried_tokens += num_tokens
        self.counters.hit_tokens += hit.tokens
        self.counters.lost_tokens += hit.matched_tokens - hit.tokens
        self.counters.misses[hit.miss] = self.counters.misses.get(hit.miss, 0) + 1

    def grow(self, owner: str, num_tokens: int) -> bool:
        """Make the owner's blocks reach `num_tokens` tokens; False where they cannot, taking none.

        Growth inside the owner's own promise always succeeds; beyond it other promises are kept.
        """
        holding = self._holdings[owner]
        wanted = blocks_for(num_tokens, self.plan.block_size) - len(holding.block_ids)
        if wanted <= 0:
            return True
        beyond = max(0, wanted - holding.promised)
        if beyond > self.blocks.num_available - self.promised_blocks:
            return False
        taken = self.blocks.take(wanted)
        holding.block_ids += taken
        detail = {"blocks": [int(b) for b in taken]}
        self._ring.instant(EventType.BLOCK_ALLOC, Lane.CACHE, request=owner, detail=detail)
        return True

    def publish(self, owner: str, chain: KeyChain, computed_tokens: int) -> None:
        """Make the owner's whole blocks below `computed_tokens` findable; they must be finite."""
        if not self.reuses_prefixes:
            return
        holding = self._holdings[owner]
        whole = min(computed_tokens // self.plan.block_size, len(chain.keys))
        for i in range(holding.published, whole):
            self.blocks.publish(holding.block_ids[i], chain.keys[i])
        holding.published = max(holding.published, whole)

    def snapshot(
        self, owner: str, chain: KeyChain, position: int, kind: SnapshotKind
    ) -> tuple[SlotId, SlotId] | None:
        """Claim a snapshot of the owner's state at `position`; return (from slot, to slot) to copy.

        None where there is nothing to do. An owner's newest ANSWER snapshot replaces its last one
        unless somebody used that.
        """
        holding = self._holdings[owner]
        at = position // self.plan.block_size - 1
        if position % self.plan.block_size or not 0 <= at < min(holding.published, len(chain.keys)):
            return None
        key = chain.keys[at]
        if self.blocks.find(key) is None or self.snapshots.find(key) is not None:
            return None
        if kind is SnapshotKind.ANSWER:
            self._drop_unused_answer(holding)
        slot = self.snapshots.put(key, position, kind)
        if slot is None:
            return None
        if kind is SnapshotKind.ANSWER:
            holding.answer_key = key
        detail = {"position": position, "kind": kind.value, "slot": int(slot)}
        self._ring.instant(EventType.STATE_SNAPSHOT, Lane.CACHE, request=owner, detail=detail)
        return holding.slot, slot

    def private_blocks(self, owner: str) -> list[BlockId]:
        """Return the owner's blocks that nobody else has or can find: what bad numbers touch."""
        return [b for b in self._holdings[owner].block_ids if self.blocks.is_private(b)]

    def release(self, owner: str) -> None:
        """Take all back from `owner`; published blocks stay findable until room is needed."""
        holding = self._holdings.pop(owner)
        self.blocks.release(holding.block_ids)
        self.slots.release(holding.slot)
        detail = {"blocks": len(holding.block_ids), "slot": int(holding.slot)}
        self._ring.instant(EventType.BLOCK_FREE, Lane.CACHE, request=owner, detail=detail)
        self._ring.instant(EventType.SLOT_FREE, Lane.CACHE, request=owner, detail=detail)

    def check(self) -> None:
        """Assert conservation over blocks, slots, snapshots and promises."""
        self.blocks.check()
        self.slots.check()
        self.snapshots.check()
        held: dict[BlockId, int] = {}
        for holding in self._holdings.values():
            assert len(set(holding.block_ids)) == len(holding.block_ids), (
                "an owner has a block twice"
            )
            for block in holding.block_ids:
                held[block] = held.get(block, 0) + 1
        for block in map(BlockId, range(self.plan.num_blocks)):
            count = held.get(block, 0)
            assert self.blocks.references(block) == count, f"block {block} is miscounted"
        assert {h.slot for h in self._holdings.values()} <= set(range(self.plan.num_slots))
        assert self.slots.num_held == len(self._holdings), "a slot has no owner"
        assert self.promised_blocks <= self.blocks.num_available, "more is promised than there is"
        lost = [k for k in self.snapshots.keys() if self.blocks.find(k) is None]  # noqa: SIM118
        assert not lost, "a snapshot outlives its block"

    def _drop_unused_answer(self, holding: Holding) -> None:
        if holding.answer_key is None:
            return
        last = self.snapshots.find(holding.answer_key)
        if last is not None and last.kind is SnapshotKind.ANSWER and last.hits == 0:
            self.snapshots.drop(holding.answer_key)

    @staticmethod
    def _miss(limit: int, found: int, usable: int) -> MissReason:
        if limit == 0:
            return MissReason.SHORT
        if usable == limit:
            return MissReason.NONE
        if found == 0:
            return MissReason.COLD
        return MissReason.NO_SNAPSHOT if usable < found else MissReason.DIVERGED
