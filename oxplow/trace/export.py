"""Export of an event snapshot: JSONL for the instruments, Chrome JSON for Perfetto.

Owns the two file formats and the reader of the first. It must not touch a running ring.
Invariant: every event of a snapshot appears once, secrets in details are redacted, and what is
incomplete (dropped events, open spans, ends without a begin) is said in the file.
"""

import json
from pathlib import Path

from oxplow.errors import ConfigError
from oxplow.trace.redact import plain
from oxplow.trace.ring import Event, EventType, Lane, Phase, Snapshot

__all__ = ["chrome_trace", "read_events", "write_chrome_trace", "write_events"]


def write_events(snapshot: Snapshot, path: Path) -> None:
    """Write one JSON object a line: a header, then each event; secrets in details are redacted."""
    header = {
        "format": "oxplow-events",
        "version": 1,
        "events": len(snapshot.events),
        "dropped": snapshot.dropped,
        "rank": snapshot.rank,
        "wall_ns": snapshot.wall_ns,
        "mono_ns": snapshot.mono_ns,
        "thread_names": {str(k): v for k, v in snapshot.thread_names.items()},
    }
    with path.open("w", encoding="utf-8") as out:
        for row in (header, *(event._asdict() for event in snapshot.events)):
            out.write(json.dumps(plain(row), allow_nan=False) + "\n")


def read_events(path: Path) -> Snapshot:
    """Read what `write_events` wrote. Raises ConfigError naming the line that does not fit."""
    number = 1
    try:
        with path.open(encoding="utf-8") as lines:
            header = json.loads(next(lines))
            if (header.get("format"), header.get("version")) != ("oxplow-events", 1):
                raise ValueError("not an oxplow-events file of version 1")
            events = []
            for number, line in enumerate(lines, 2):  # noqa: B007 - named in the error below
                row = json.loads(line)
                row["phase"], row["kind"] = Phase(row["phase"]), EventType(row["kind"])
                row["lane"] = Lane(row["lane"])
                events.append(Event(**row))
            if len(events) != header["events"]:
                raise ValueError(f"{len(events)} events, the header says {header['events']}")
            return Snapshot(
                events=tuple(events),
                dropped=header["dropped"],
                rank=header["rank"],
                wall_ns=header["wall_ns"],
                mono_ns=header["mono_ns"],
                thread_names={int(k): v for k, v in header["thread_names"].items()},
            )
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "cannot read the event file", got=repr(error), where=f"{path}:{number}"
        ) from error


# Spans of these lanes overlap, so the viewer needs them as asynchronous events with an id.
_OVERLAPPING = frozenset({Lane.REQUEST, Lane.TRANSFER, Lane.DEVICE})


def chrome_trace(snapshot: Snapshot) -> dict[str, object]:
    """Return the snapshot in the Chrome trace format that Perfetto opens; pid is the rank.

    A span whose end is missing is drawn up to the last event and marked open; an end whose begin
    was dropped is left out and counted in otherData.
    """
    tracks: dict[tuple[Lane, int], int] = {}
    rows: list[dict[str, object]] = []
    opened = {e.span: e for e in snapshot.events if e.phase is Phase.BEGIN}
    ends = {e.span: e for e in snapshot.events if e.phase is Phase.END}
    last_ns = max((e.time_ns for e in snapshot.events), default=0)
    for event in snapshot.events:
        if event.phase is Phase.END:
            continue
        end = ends.get(event.span) if event.phase is Phase.BEGIN else None
        rows += _draw(event, end, last_ns, snapshot.rank, tracks)
    for (lane, thread_id), track in tracks.items():
        name = lane.value
        if lane is Lane.THREAD:
            name = f"thread {snapshot.thread_names.get(thread_id, thread_id)}"
        rows.append(_meta("thread_name", name, snapshot.rank, track))
    rows.append(_meta("process_name", f"rank {snapshot.rank}", snapshot.rank, 0))
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {
            "dropped_events": snapshot.dropped,
            "orphan_ends": len(ends.keys() - opened.keys()),
            "wall_ns": snapshot.wall_ns,
            "mono_ns": snapshot.mono_ns,
        },
    }


def write_chrome_trace(snapshot: Snapshot, path: Path) -> None:
    """Write `chrome_trace` as a JSON file."""
    path.write_text(json.dumps(chrome_trace(snapshot), allow_nan=False), encoding="utf-8")


def _meta(kind: str, name: str, pid: int, tid: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _draw(
    event: Event,
    end: Event | None,
    last_ns: int,
    pid: int,
    tracks: dict[tuple[Lane, int], int],
) -> list[dict[str, object]]:
    """Turn an instant or a span into viewer rows; adds the track it needs to `tracks`."""
    # Only spans of one thread are sure to nest, so each thread has its own track in its lane.
    place = (event.lane, 0 if event.lane in _OVERLAPPING else event.thread_id)
    args: dict[str, object] = {"request": event.request, "step": event.step, "seq": event.seq}
    args |= dict(event.detail or {}) | dict((end.detail if end else None) or {})
    row: dict[str, object] = {
        "name": f"{event.kind.value} {event.name}".strip(),
        "cat": event.lane.value,
        "pid": pid,
        "tid": tracks.setdefault(place, len(tracks) + 1),
        "ts": event.time_ns / 1000,
    }
    if event.phase is Phase.INSTANT:
        return [row | {"ph": "i", "s": "t", "args": plain(args)}]
    if end is None:
        args["open"] = True
    end_ns = end.time_ns if end is not None else last_ns
    # A span that another thread closes may cross the spans of the first one.
    if event.lane in _OVERLAPPING or (end is not None and end.thread_id != event.thread_id):
        shared = row | {"id": str(event.span)}
        return [
            shared | {"ph": "b", "args": plain(args)},
            shared | {"ph": "e", "ts": end_ns / 1000},
        ]
    return [row | {"ph": "X", "dur": max(0, end_ns - event.time_ns) / 1000, "args": plain(args)}]
