"""How a byte budget becomes blocks, slots and snapshots, in exact numbers.

Owns the arithmetic and its wording. Knows no tensor and no device: the caller names the budget.
Invariant: the planned bytes are the bytes of the pools that the engine allocates, and a plan that
cannot hold one request of the longest allowed length is refused with numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oxplow.cache.spec import Component, Per, bytes_per
from oxplow.errors import ConfigError

_SHOWN_LENGTHS = (1024, 8192, 131072, 1048576)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """What may be spent.

    `total_bytes` for all pools; `num_slots` requests may run at once; `snapshot_share` of the
    bytes at most goes to state snapshots of cached prefixes (0 switches prefix reuse off);
    `max_model_len` tokens is the longest request.
    """

    total_bytes: int
    num_slots: int
    max_model_len: int
    snapshot_share: float = 0.25

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.max_model_len < 2 or not 0 <= self.snapshot_share < 1:
            raise ConfigError(
                "a cache budget is out of range",
                got=f"{self.num_slots} slots, {self.max_model_len} tokens, {self.snapshot_share}",
                wanted="1 slot, 2 tokens or more, a share from 0 to under 1",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """How many units of each kind there are, and the bytes that one weighs."""

    block_size: int
    num_blocks: int
    num_slots: int
    num_snapshots: int
    block_bytes: int
    slot_bytes: int
    max_model_len: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return (
            self.num_blocks * self.block_bytes
            + (self.num_slots + self.num_snapshots) * self.slot_bytes
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks together hold."""
        return self.num_blocks * self.block_size

    def requests_of(self, num_tokens: int) -> int:
        """Return how many requests of this length fit at once."""
        return min(self.num_slots, self.num_blocks // blocks_for(num_tokens, self.block_size))

    def request_bytes(self, num_tokens: int) -> int:
        """Return what one request of this length occupies."""
        return self.slot_bytes + blocks_for(num_tokens, self.block_size) * self.block_bytes

    def lines(self) -> list[str]:
        """Return the plan in words, one fact a line."""
        fits = ", ".join(
            f"{self.requests_of(n)} of {n}"
            for n in (*(s for s in _SHOWN_LENGTHS if s < self.max_model_len), self.max_model_len)
        )
        return [
            f"cache: {_mib(self.total_bytes)} in all",
            f"  {self.num_blocks} blocks of {self.block_size} tokens, {self.block_bytes} B each:"
            f" {_mib(self.num_blocks * self.block_bytes)}, {self.num_tokens} tokens",
            f"  {self.num_slots} request slots, {self.slot_bytes} B each:"
            f" {_mib(self.num_slots * self.slot_bytes)}",
            f"  {self.num_snapshots} prefix snapshots, {self.slot_bytes} B each:"
            f" {_mib(self.num_snapshots * self.slot_bytes)}",
            f"  requests of that many tokens that fit at once: {fits}",
        ]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def plan_cache(components: Sequence[Component], block_size: int, budget: CacheBudget) -> CachePlan:
    """Divide `budget`: slots first, then snapshots up to their share, blocks take the rest.

    Raises ConfigError with every number where one request of the longest length does not fit.
    """
    block_bytes, slot_bytes = bytes_per(components, Per.BLOCK), bytes_per(components, Per.SLOT)
    longest = blocks_for(budget.max_model_len, block_size)
    left = budget.total_bytes - budget.num_slots * slot_bytes - longest * block_bytes
    if left < 0:
        raise ConfigError(
            "the cache budget cannot hold one request of the longest length",
            got=f"{budget.total_bytes} B",
            wanted=f"{budget.num_slots} slots x {slot_bytes} B + {longest} blocks x {block_bytes} B"
            f" = {budget.total_bytes - left} B for {budget.max_model_len} tokens",
            where="cache budget",
        )
    wished = int(budget.total_bytes * budget.snapshot_share) // slot_bytes if slot_bytes else 0
    snapshots = min(wished, left // slot_bytes) if slot_bytes else 0
    left -= snapshots * slot_bytes
    blocks = longest + (left // block_bytes if block_bytes else 0)
    return CachePlan(
        block_size=block_size,
        num_blocks=blocks,
        num_slots=budget.num_slots,
        num_snapshots=snapshots,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        max_model_len=budget.max_model_len,
    )


def exact_plan(
    components: Sequence[Component],
    block_size: int,
    *,
    num_blocks: int,
    num_slots: int,
    num_snapshots: int,
    max_model_len: int | None = None,
) -> CachePlan:
    """Return a plan of exactly these counts; the longest request defaults to what all blocks hold.

    Raises ConfigError where one request of the longest length does not fit.
    """
    longest = max_model_len or num_blocks * block_size
    if blocks_for(longest, block_size) > num_blocks or num_slots < 1 or num_snapshots < 0:
        raise ConfigError(
            "the cache plan cannot hold one request of the longest length",
            got=f"{num_blocks} blocks, {num_slots} slots, {num_snapshots} snapshots",
            wanted=f"{blocks_for(longest, block_size)} blocks, a slot",
        )
    return CachePlan(
        block_size=block_size,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_snapshots=num_snapshots,
        block_bytes=bytes_per(components, Per.BLOCK),
        slot_bytes=bytes_per(components, Per.SLOT),
        max_model_len=longest,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
