"""Who holds the interpreter lock: a canary that waits for it, and an audit of native calls.

Owns the canary thread, its samples of other threads' places and the measurement of one native call.
Knows no engine. Invariant: nothing is patched and no thread is stopped; a place is blamed for a
delay only if it stood there when the canary got the lock back, and a call is called a holder only
after it was measured alone.

The canary sleeps for a short time and notes how late it wakes. A call that keeps the lock makes it
late by the length of the call; a call that gives the lock up does not.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType

__all__ = ["Canary", "Delay", "HoldTime", "Place", "audit_calls", "hold_time"]

_SLEEP_S = 0.0005
_LATE_S = 0.002  # over the jitter of a sleep on a busy machine
_WAITS = ("wait", "get", "acquire", "join", "select", "poll")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread stood: its name, function, file and line."""

    thread: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.thread}: {self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class Delay:
    """One late waking: when (monotonic seconds), by how much, and where the others stood."""

    at_s: float
    late_s: float
    places: tuple[Place, ...]


@dataclass(slots=True)
class Canary:
    """A thread that sleeps and wakes while the context is open; `delays` holds the late wakings.

    `watches` restricts the places to threads with these names (empty: all but this module's own).
    """

    watches: tuple[str, ...] = ()
    delays: list[Delay] = field(default_factory=list)
    wakings: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Canary:
        self._thread = threading.Thread(target=self._sing, name="gil-canary", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sing(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(_SLEEP_S)
            late = time.monotonic() - began - _SLEEP_S
            self.wakings += 1
            if late > _LATE_S:
                self.delays.append(Delay(began, late, self._places()))

    def _places(self) -> tuple[Place, ...]:
        names = {t.ident: t.name for t in threading.enumerate()}
        me = threading.get_ident()
        found = []
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, "")
            if ident != me and (not self.watches or name in self.watches):
                found.append(_place(name, frame))
        return tuple(found)

    @property
    def worst_s(self) -> float:
        """Return the longest delay, 0 where there was none."""
        return max((d.late_s for d in self.delays), default=0.0)

    def blame(self) -> list[tuple[Place, float]]:
        """Return places with the seconds of delay that passed while they stood there, most first.

        Places that wait (for a queue, a lock, a thread) hold nothing and are left out.
        """
        seconds: Counter[Place] = Counter()
        for delay in self.delays:
            for place in delay.places:
                if place.function not in _WAITS:
                    seconds[place] += delay.late_s  # type: ignore[assignment]
        return [(place, float(s)) for place, s in seconds.most_common()]


def _place(name: str, frame: FrameType) -> Place:
    code = frame.f_code
    return Place(name, code.co_name, code.co_filename, frame.f_lineno)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTime:
    """One native call measured alone: how long it took and how long the lock was kept in it."""

    name: str
    took_s: float
    held_s: float

    @property
    def holds(self) -> bool:
        """True where the lock is kept for most of the call."""
        return self.held_s > 0.5 * self.took_s


def hold_time(name: str, call: Callable[[], object], repeats: int = 5) -> HoldTime:
    """Run `call` alone beside a canary; return the medians over `repeats`."""
    took, held = [], []
    for _ in range(repeats):
        with Canary() as canary:
            time.sleep(4 * _SLEEP_S)  # the canary is on its way
            canary.delays.clear()
            began = time.monotonic()
            call()
            ended = time.monotonic()
            time.sleep(4 * _SLEEP_S)
        took.append(ended - began)
        inside = [d.late_s for d in canary.delays if began - _SLEEP_S <= d.at_s + d.late_s]
        held.append(min(max(inside, default=0.0), ended - began))
    return HoldTime(name=name, took_s=sorted(took)[repeats // 2], held_s=sorted(held)[repeats // 2])


def audit_calls(calls: Mapping[str, Callable[[], object]], repeats: int = 5) -> list[HoldTime]:
    """Measure every call alone, longest hold first: siblings stand beside each other."""
    found = [hold_time(name, call, repeats) for name, call in calls.items()]
    return sorted(found, key=lambda h: -h.held_s)
