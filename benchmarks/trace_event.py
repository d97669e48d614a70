"""Measure what one event costs the thread that records it.

    python benchmarks/trace_event.py

Owns the figure that docs quote for the ring. Arms are interleaved round by round, so that a busy
machine slows all of them alike. Invariant: the baseline arm calls an empty function of the same
shape, so the difference is the ring's own work.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable

from oxplow.trace import EventRing, EventType, Lane

ROUNDS, CALLS = 41, 5_000


def _nothing(
    kind: EventType, lane: Lane, name: str = "", *, request: str | None = None, step: int = 0
) -> None:
    return None


def _time_ns(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - started) / CALLS


def main() -> None:
    """Print a table and the JSON line; times are nanoseconds a call."""
    on, off = EventRing(1 << 16), EventRing(0)
    kind, lane = EventType.OP, Lane.THREAD
    arms: dict[str, Callable[[], object]] = {
        "empty call": lambda: _nothing(kind, lane, "linear", request="r", step=1),
        "instant, ring off": lambda: off.instant(kind, lane, "linear", request="r", step=1),
        "instant": lambda: on.instant(kind, lane, "linear", request="r", step=1),
        "begin and end": lambda: on.end(on.begin(kind, lane, "linear", request="r", step=1)),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, call in arms.items():
            times[name].append(_time_ns(call))
    found = {}
    print(f"{'arm':<20}{'median ns':>10}{'p10':>8}{'p90':>8}")
    for name, values in times.items():
        tenths = statistics.quantiles(values, n=10)
        found[name] = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
        print(f"{name:<20}{found[name]['median']:>10.0f}{tenths[0]:>8.0f}{tenths[-1]:>8.0f}")
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"ns_per_call": found, "rounds": ROUNDS, "calls": CALLS, "machine": machine}))


if __name__ == "__main__":
    main()
