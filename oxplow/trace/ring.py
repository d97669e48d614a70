"""The event ring: what happened, when, on which thread, for which request and step.

Owns the closed set of event types, the lanes, the ring and its snapshot. It must not know torch,
the engine or the instruments: the engine writes, feedback reads.
Invariant: writing never blocks and keeps one tuple; when the ring wraps, the oldest events go and
are counted.

The ring relies on the interpreter lock (Python 3.11 and 3.12 always have it): `next` on a counter
and a store into a list are each one step that no other thread can split.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from oxplow.errors import ConfigError

__all__ = ["Event", "EventRing", "EventType", "Lane", "OpenSpan", "Phase", "Snapshot"]


class EventType(StrEnum):
    """Name everything that may be recorded; readers match exhaustively."""

    REQUEST_ACCEPTED = "request_accepted"
    REQUEST_SCHEDULED = "request_scheduled"
    REQUEST_PREEMPTED = "request_preempted"
    REQUEST_FINISHED = "request_finished"
    REQUEST_ABORTED = "request_aborted"
    REQUEST_FAILED = "request_failed"
    ENGINE_STEP = "engine_step"
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    OP = "op"
    SAMPLER_DRAW = "sampler_draw"
    EXPERT_MOVE = "expert_move"
    ROUTE_DECISION = "route_decision"
    BLOCK_ALLOC = "block_alloc"
    BLOCK_WRITE = "block_write"
    BLOCK_REUSE = "block_reuse"
    BLOCK_FREE = "block_free"
    SLOT_ALLOC = "slot_alloc"
    SLOT_FREE = "slot_free"
    STATE_SNAPSHOT = "state_snapshot"
    STATE_RESTORE = "state_restore"
    GRAPH_CAPTURE = "graph_capture"
    GRAPH_REPLAY = "graph_replay"
    TRANSFER = "transfer"
    TRANSFER_ACKNOWLEDGED = "transfer_acknowledged"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_EXPIRED = "transfer_expired"
    GIL_WAIT = "gil_wait"
    GC_PAUSE = "gc_pause"
    WORK = "work"


class Lane(StrEnum):
    """Name the rows of a timeline. Spans of REQUEST and TRANSFER may overlap, others nest."""

    STEP = "step"
    THREAD = "thread"
    REQUEST = "request"
    CACHE = "cache"
    TRANSFER = "transfer"
    GIL = "gil"
    GC = "gc"
    DEVICE = "device"


class Phase(StrEnum):
    """Say whether an event opens a span, closes one, or stands alone."""

    BEGIN = "begin"
    END = "end"
    INSTANT = "instant"


class Event(NamedTuple):
    """One record of the ring.

    `seq` counts events of the ring from 0. `time_ns` is monotonic. `span` joins a BEGIN and its END
    and is None for an INSTANT. `detail` holds small plain values, such as block ids or a hash.
    """

    seq: int
    time_ns: int
    phase: Phase
    kind: EventType
    lane: Lane
    name: str
    thread_id: int
    span: int | None
    request: str | None
    step: int | None
    detail: Mapping[str, object] | None


# The tuple of a BEGIN, in the order of Event's fields; a plain tuple costs half of a named one.
OpenSpan: TypeAlias = tuple[
    int, int, Phase, EventType, Lane, str, int, int | None, str | None, int | None,
    Mapping[str, object] | None,
]  # fmt: skip
_NO_SPAN: OpenSpan = (
    -1, 0, Phase.BEGIN, EventType.WORK, Lane.THREAD, "", 0, -1, None, None, None,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Hold what the ring held at one moment, oldest first.

    `dropped` counts events lost to wrapping. `wall_ns` and `mono_ns` were read together when the
    ring was made: add their difference to place `time_ns` on the wall clock or beside other ranks.
    """

    events: tuple[Event, ...]
    dropped: int
    rank: int
    wall_ns: int
    mono_ns: int
    thread_names: Mapping[int, str]


class EventRing:
    """Keep the last `capacity` events of one process; any thread may write, any may read.

    Capacity 0 switches recording off: every call returns at once.
    """

    __slots__ = ("_capacity", "_count", "_ident", "_mono_ns", "_now", "_slots", "_wall_ns", "rank")

    def __init__(self, capacity: int = 65536, *, rank: int = 0) -> None:
        """Reserve the slots. Raises ConfigError for a negative capacity."""
        if capacity < 0:
            raise ConfigError("an event ring cannot be this small", got=capacity, wanted=">= 0")
        self.rank = rank
        self._capacity = capacity
        self._slots: list[OpenSpan | None] = [None] * capacity
        self._count = itertools.count()
        # Bound once: the write path is a few hundred nanoseconds, look-ups would show in it.
        self._now = time.monotonic_ns
        self._ident = threading.get_ident
        self._wall_ns, self._mono_ns = time.time_ns(), time.monotonic_ns()

    @property
    def is_on(self) -> bool:
        """Tell whether events are kept."""
        return self._capacity > 0

    def instant(
        self,
        kind: EventType,
        lane: Lane,
        name: str = "",
        *,
        request: str | None = None,
        step: int | None = None,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        """Record one event without duration. `detail` is kept by reference: do not change it."""
        if self._capacity:
            seq = next(self._count)
            self._slots[seq % self._capacity] = (
                seq, self._now(), Phase.INSTANT, kind, lane, name, self._ident(), None, request,
                step, detail,
            )  # fmt: skip

    def begin(
        self,
        kind: EventType,
        lane: Lane,
        name: str = "",
        *,
        request: str | None = None,
        step: int | None = None,
        detail: Mapping[str, object] | None = None,
        time_ns: int | None = None,
    ) -> OpenSpan:
        """Open a span and return what `end` needs; `time_ns` gives a stamp taken earlier."""
        if not self._capacity:
            return _NO_SPAN
        seq = next(self._count)
        stamp = self._now() if time_ns is None else time_ns
        opened = (
            seq, stamp, Phase.BEGIN, kind, lane, name, self._ident(), seq, request, step, detail,
        )  # fmt: skip
        self._slots[seq % self._capacity] = opened
        return opened

    def end(
        self,
        opened: OpenSpan,
        *,
        detail: Mapping[str, object] | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Close the span that `begin` returned; any thread may. `detail` adds what is known now."""
        if self._capacity:
            span, _, _, kind, lane, name, _, _, request, step, _ = opened
            seq = next(self._count)
            stamp = self._now() if time_ns is None else time_ns
            self._slots[seq % self._capacity] = (
                seq, stamp, Phase.END, kind, lane, name, self._ident(), span, request, step, detail,
            )  # fmt: skip

    @contextmanager
    def span(
        self,
        kind: EventType,
        lane: Lane,
        name: str = "",
        *,
        request: str | None = None,
        step: int | None = None,
        detail: Mapping[str, object] | None = None,
    ) -> Iterator[None]:
        """Record the body as a span, closed also when the body raises."""
        opened = self.begin(kind, lane, name, request=request, step=step, detail=detail)
        try:
            yield
        finally:
            self.end(opened)

    def snapshot(self) -> Snapshot:
        """Copy the ring, oldest first, without stopping the writers.

        An event that is being written at this moment may be absent; it is then counted as dropped.
        """
        # list() of a list is one step under the interpreter lock: no slot is seen half written.
        held = [slot for slot in list(self._slots) if slot is not None]
        events = sorted(Event._make(slot) for slot in held)  # seq comes first and is unique
        last = events[-1].seq + 1 if events else 0
        return Snapshot(
            events=tuple(events),
            dropped=last - len(events),
            rank=self.rank,
            wall_ns=self._wall_ns,
            mono_ns=self._mono_ns,
            thread_names={t.ident: t.name for t in threading.enumerate() if t.ident is not None},
        )
