"""Events and log records: what the engine writes about itself and the instruments read.

Owns the ring (`ring`), its file formats (`export`), structured logs (`logs`) and redaction
(`redact`). It must not know torch, the engine or the instruments.
Invariant: see `ring`: writing never blocks, and loss is counted.
"""

from oxplow.trace.export import chrome_trace, read_events, write_chrome_trace, write_events
from oxplow.trace.logs import JsonlFormatter, bind, open_log
from oxplow.trace.ring import Event, EventRing, EventType, Lane, OpenSpan, Phase, Snapshot

__all__ = [
    "Event",
    "EventRing",
    "EventType",
    "JsonlFormatter",
    "Lane",
    "OpenSpan",
    "Phase",
    "Snapshot",
    "bind",
    "chrome_trace",
    "open_log",
    "read_events",
    "write_chrome_trace",
    "write_events",
]
