"""The engine's own numbers: counters since the start and gauges of the moment.

Owns the records that the metrics page and the benchmarks read. Knows no names of any metrics
format.
Invariant: counters never fall; every gauge is read, not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oxplow.cache.manager import CacheManager, MissReason
from oxplow.engine.handover import HandOver
from oxplow.engine.request import RequestStatus
from oxplow.engine.scheduler import Scheduler


def _no_endings() -> dict[RequestStatus, int]:
    return {s: 0 for s in RequestStatus if s.is_terminal}


@dataclass(slots=True)
class Counters:
    """What has happened since the start; `poisoned` counts rows that were not finite."""

    accepted: int = 0
    steps: int = 0
    stalled_steps: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    answer_tokens: int = 0
    poisoned: int = 0
    ended: dict[RequestStatus, int] = field(default_factory=_no_endings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One reading. Tokens and bytes are named so; the rest are counts."""

    accepted: int
    ended: Mapping[RequestStatus, int]
    running: int
    waiting: int
    steps: int
    stalled_steps: int
    prompt_tokens: int
    prefill_tokens: int
    answer_tokens: int
    preemptions: int
    poisoned: int
    blocks_held: int
    blocks_idle: int
    blocks_total: int
    slots_held: int
    slots_total: int
    snapshots_held: int
    snapshots_total: int
    swapped_bytes: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_lost_tokens: int
    prefix_misses: Mapping[MissReason, int]

    @classmethod
    def read(
        cls, counters: Counters, cache: CacheManager, scheduler: Scheduler, handover: HandOver
    ) -> EngineStats:
        """Take a reading."""
        return cls(
            accepted=counters.accepted,
            ended=dict(counters.ended),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=counters.steps,
            stalled_steps=counters.stalled_steps,
            prompt_tokens=counters.prompt_tokens,
            prefill_tokens=counters.prefill_tokens,
            answer_tokens=counters.answer_tokens,
            preemptions=scheduler.num_preemptions,
            poisoned=counters.poisoned,
            blocks_held=cache.blocks.num_held,
            blocks_idle=cache.blocks.num_idle,
            blocks_total=cache.plan.num_blocks,
            slots_held=cache.slots.num_held,
            slots_total=cache.plan.num_slots,
            snapshots_held=len(cache.snapshots),
            snapshots_total=cache.snapshots.capacity,
            swapped_bytes=handover.swapped_bytes,
            prefix_queried_tokens=cache.counters.queried_tokens,
            prefix_hit_tokens=cache.counters.hit_tokens,
            prefix_lost_tokens=cache.counters.lost_tokens,
            prefix_misses=dict(cache.counters.misses),
        )
