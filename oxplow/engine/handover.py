"""The one way in which state leaves a request and comes back.

Owns export and adoption for preemption, sessions, prefixes and hand-over between engines. Knows no
queue.
Invariant: what is adopted equals what was exported, bit for bit, and nothing is changed before the
whole manifest was verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from oxplow.cache.blocks import SlotId
from oxplow.cache.manager import CacheManager, Hit, MissReason
from oxplow.cache.prefix import KeyChain, PictureSpan, SnapshotKind, root_key
from oxplow.cache.spec import Per
from oxplow.engine.manifest import Manifest, Point, RequestPart, entries_for, layout_name
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import Choice
from oxplow.engine.state import StateStore, component_name
from oxplow.errors import CapacityError, TransferError
from oxplow.trace import EventRing, EventType, Lane

_ADOPTER = "adopted prefix"


class HandOver:
    """Reads and writes requests' states; the scheduler's `StateMover`."""

    def __init__(
        self,
        state: StateStore,
        cache: CacheManager,
        options: MemoryOptions,
        *,
        revision: str,
        ring: EventRing | None = None,
    ) -> None:
        self._state, self._cache, self._options = state, cache, options
        self._ring = ring or EventRing(0)
        self.revision = revision
        self.layout = layout_name(state.caches.components, cache.plan.block_size)
        self._swapped: dict[str, int] = {}

    @property
    def swapped_bytes(self) -> int:
        """Bytes on the host that belong to preempted requests."""
        return sum(self._swapped.values())

    def chain(self, salt: str, pictures: Sequence[PictureSpan] = ()) -> KeyChain:
        """Start the key chain of a sequence of this model, layout and tenant."""
        root = root_key(revision=self.revision, layout=self.layout, salt=salt)
        return KeyChain(root, self._cache.plan.block_size, pictures)

    # The scheduler's mover.

    def copy_slot(self, source: SlotId, target: SlotId) -> None:
        """Restore a snapshot into a request's slot."""
        self._state.copy_slot(source, target)
        detail = {"from": int(source), "to": int(target)}
        self._ring.instant(EventType.STATE_RESTORE, Lane.CACHE, detail=detail)

    def clear_slot(self, slot: SlotId) -> None:
        """Empty a slot for a request that starts anew.

        The model never reads what is left there, but an export of the whole slot would.
        """
        self._state.clear_slot(slot)

    def save(self, choice: Choice) -> Manifest | None:
        """Swap a running choice's state out, where it is worth it and the host has room."""
        size = self._cache.plan.request_bytes(max(1, choice.computed_tokens))
        if choice.computed_tokens < max(1, self._options.swap_min_tokens):
            return None
        if self.swapped_bytes + size > self._options.swap_bytes:
            return None
        manifest = self.export(choice)
        self._swapped[choice.owner] = manifest.num_bytes
        return manifest

    def load(self, choice: Choice, saved: object) -> None:
        """Put a saved state into a choice's new memory."""
        if not isinstance(saved, Manifest):
            raise AssertionError(f"{choice.owner}: saved state of type {type(saved).__name__}")
        holding = self._cache.holdings[choice.owner]
        self._state.write(saved.tensors, holding.block_ids, holding.slot)
        detail = {"tokens": choice.computed_tokens}
        self._ring.instant(EventType.STATE_RESTORE, Lane.CACHE, request=choice.owner, detail=detail)
        self.drop(choice)

    def drop(self, choice: Choice) -> None:
        """Forget a choice's swapped state."""
        self._swapped.pop(choice.owner, None)

    # Manifests.

    def export(self, choice: Choice) -> Manifest:
        """Describe and copy a choice's state, unsealed; the choice goes on undisturbed.

        Raises TransferError where it has no state.
        """
        if isinstance(choice.saved, Manifest):
            return choice.saved
        holding = self._cache.holdings.get(choice.owner)
        if holding is None or choice.computed_tokens == 0:
            raise TransferError(
                "the request has no state to export", got=choice.status.value, where=choice.owner
            )
        tensors = self._state.read(holding.block_ids, holding.slot, choice.computed_tokens)
        return Manifest(
            revision=self.revision,
            layout=self.layout,
            block_size=self._cache.plan.block_size,
            salt=choice.request.salt,
            token_ids=tuple(choice.token_ids),
            computed_tokens=choice.computed_tokens,
            pictures=tuple(p.span for p in choice.request.pictures),
            request=RequestPart(
                request_id=choice.request.request_id,
                params=choice.request.params,
                seed=choice.seed,
                prompt_len=choice.prompt_len,
                max_len=choice.max_len,
                priority=choice.request.priority,
            ),
            components=entries_for(self._state.caches.components, tensors),
            tensors=tensors,
        )

    def export_prefix(
        self,
        token_ids: Sequence[int],
        salt: str,
        pictures: Sequence[PictureSpan] = (),
        *,
        also: Sequence[int] = (),
    ) -> Manifest:
        """Describe and copy the longest reusable prefix of a text, unsealed.

        The states that a request of the first n tokens would start from, n in `also`, come along
        as points. Raises TransferError where nothing of the text is cached.
        """
        chain = self.chain(salt, pictures)
        chain.extend(token_ids)
        hit = self._cache.lookup(chain, len(token_ids) + 1)
        if hit.snapshot is None:
            raise TransferError("nothing of this text is cached", got=hit.miss.value)
        tensors = self._state.read(hit.block_ids, hit.snapshot.slot, hit.tokens)
        starts = {h.tokens: h.snapshot for h in (self._cache.lookup(chain, n) for n in also)}
        starts.pop(hit.tokens, None)
        points = [
            self._point(tokens, found.slot)
            for tokens, found in sorted(starts.items())
            if found is not None
        ]
        return Manifest(
            revision=self.revision,
            layout=self.layout,
            block_size=self._cache.plan.block_size,
            salt=salt,
            token_ids=tuple(token_ids[: hit.tokens]),
            computed_tokens=hit.tokens,
            pictures=tuple(p for p in pictures if p.start < hit.tokens),
            points=tuple(points),
            components=entries_for(self._state.caches.components, tensors),
            tensors=tensors,
        )

    def verify(self, manifest: Manifest) -> None:
        """Raise TransferError where a manifest is damaged or not for this engine."""
        manifest.verify(
            self._state.caches.components,
            revision=self.revision,
            layout=self.layout,
            block_size=self._cache.plan.block_size,
        )

    def adopt_prefix(self, manifest: Manifest) -> int:
        """Make a verified prefix findable, with its points; return its tokens.

        Raises CapacityError where blocks, a slot or snapshots are missing, TransferError where the
        prefix or a point does not end at a whole block.
        """
        plan, tokens = self._cache.plan, manifest.computed_tokens
        ends = [*(p.tokens for p in manifest.points), tokens]
        for end in ends:
            if end % plan.block_size:
                raise TransferError(
                    "a prefix must end at a whole block",
                    got=end,
                    wanted=f"a multiple of {plan.block_size}",
                )
        chain = self.chain(manifest.salt, manifest.pictures)
        chain.extend(manifest.token_ids[:tokens])
        if all(self._cache.lookup(chain, end + 1).tokens == end for end in ends):
            return tokens
        hit = Hit(0, 0, (), None, MissReason.COLD)
        if not (self._cache.reuses_prefixes and self._cache.fits(hit, tokens)):
            raise CapacityError(
                "no room for the prefix",
                got=f"{self._cache.blocks.num_available} blocks, {self._cache.slots.num_available}"
                f" slots, {self._cache.snapshots.capacity} snapshots",
                wanted=f"{tokens} tokens of blocks, a slot and a snapshot",
            )
        holding = self._cache.admit(_ADOPTER, hit, tokens)
        self._cache.grow(_ADOPTER, tokens)
        self._state.write(manifest.tensors, holding.block_ids, holding.slot)
        self._cache.publish(_ADOPTER, chain, tokens)
        for end, part in [*((p.tokens, p.tensors) for p in manifest.points), (tokens, None)]:
            self._state.write_slot(manifest.tensors if part is None else part, holding.slot)
            copy = self._cache.snapshot(_ADOPTER, chain, end, SnapshotKind.ADOPTED)
            if copy is not None:
                self._state.copy_slot(*copy)
        self._cache.release(_ADOPTER)
        if self._cache.lookup(chain, tokens + 1).tokens != tokens:
            raise CapacityError(
                "every snapshot that is kept is worth more than the prefix",
                got=f"{self._cache.snapshots.capacity} snapshots",
            )
        return tokens

    def _point(self, tokens: int, slot: SlotId) -> Point:
        tensors = self._state.read((), slot, 0)
        slots = [c for c in self._state.caches.components if c.per is Per.SLOT]
        kept = {component_name(c): tensors[component_name(c)] for c in slots}
        return Point(tokens=tokens, components=entries_for(slots, kept), tensors=kept)
