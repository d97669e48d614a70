"""The event ring under wrapping and threads, its file formats, and logs without secrets."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oxplow.errors import ConfigError
from oxplow.trace import (
    Event,
    EventRing,
    EventType,
    JsonlFormatter,
    Lane,
    Phase,
    Snapshot,
    bind,
    chrome_trace,
    open_log,
    read_events,
    write_chrome_trace,
    write_events,
)
from oxplow.trace.redact import REDACTED, is_secret, plain, redact_text

OP, STEP = EventType.OP, EventType.ENGINE_STEP


def mark(ring: EventRing, name: str) -> None:
    ring.instant(OP, Lane.THREAD, name)


# --- the ring ---------------------------------------------------------------------------------


def test_event_carries_request_step_lane_and_thread() -> None:
    ring = EventRing(8, rank=3)
    before = time.monotonic_ns()
    ring.instant(
        EventType.BLOCK_ALLOC, Lane.CACHE, "latent", request="r1", step=7, detail={"ids": [1]}
    )
    snapshot = ring.snapshot()
    (event,) = snapshot.events
    assert event[2:6] == (Phase.INSTANT, EventType.BLOCK_ALLOC, Lane.CACHE, "latent")
    assert event.thread_id == threading.get_ident()
    assert (event.request, event.step, event.detail, event.span) == ("r1", 7, {"ids": [1]}, None)
    assert before <= event.time_ns <= time.monotonic_ns()
    assert snapshot.rank == 3
    assert snapshot.thread_names[event.thread_id] == threading.current_thread().name


def test_span_joins_begin_and_end_also_across_threads() -> None:
    ring = EventRing(8)
    opened = ring.begin(EventType.TRANSFER, Lane.TRANSFER, "layer 0", request="r", step=1)
    closer = threading.Thread(target=ring.end, args=(opened,), kwargs={"detail": {"bytes": 4}})
    closer.start()
    closer.join()
    begin, end = ring.snapshot().events
    assert (begin.phase, end.phase) == (Phase.BEGIN, Phase.END)
    assert begin.span == end.span == begin.seq
    assert (end.kind, end.lane, end.name, end.request, end.step) == (
        begin.kind, begin.lane, begin.name, begin.request, begin.step,
    )  # fmt: skip
    assert end.thread_id != begin.thread_id
    assert end.detail == {"bytes": 4}


def test_given_stamps_are_kept() -> None:
    ring = EventRing(8)
    ring.end(ring.begin(EventType.TRANSFER, Lane.TRANSFER, time_ns=5), time_ns=9)
    assert [e.time_ns for e in ring.snapshot().events] == [5, 9]


def test_span_is_closed_when_its_body_raises() -> None:
    ring = EventRing(8)
    with pytest.raises(KeyError), ring.span(STEP, Lane.STEP, step=1):
        raise KeyError
    assert [e.phase for e in ring.snapshot().events] == [Phase.BEGIN, Phase.END]


@given(capacity=st.integers(1, 20), written=st.integers(0, 60))
def test_wrapped_ring_holds_the_newest_and_counts_the_rest(capacity: int, written: int) -> None:
    ring = EventRing(capacity)
    for number in range(written):
        mark(ring, str(number))
    snapshot = ring.snapshot()
    kept = min(capacity, written)
    assert [e.name for e in snapshot.events] == [str(n) for n in range(written - kept, written)]
    assert snapshot.dropped == written - kept


def test_ring_of_no_capacity_records_nothing() -> None:
    ring = EventRing(0)
    mark(ring, "x")
    with ring.span(OP, Lane.THREAD):
        pass
    ring.end(ring.begin(OP, Lane.THREAD))
    assert not ring.is_on
    assert ring.snapshot().events == ()


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="got -1"):
        EventRing(-1)


def test_threads_lose_no_event_and_share_no_number() -> None:
    ring, writers, each = EventRing(1 << 15), 8, 2000
    ready = threading.Barrier(writers)

    def write(writer: int) -> None:
        ready.wait()
        for number in range(each):
            ring.instant(OP, Lane.THREAD, f"{writer}", step=number)

    threads = [threading.Thread(target=write, args=(w,)) for w in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = ring.snapshot()
    assert [e.seq for e in snapshot.events] == list(range(writers * each))
    assert snapshot.dropped == 0
    for writer in range(writers):
        steps = [e.step for e in snapshot.events if e.name == str(writer)]
        assert steps == list(range(each))


def test_snapshot_while_threads_write_holds_whole_events_in_order() -> None:
    ring = EventRing(64)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            ring.instant(OP, Lane.THREAD, str(number), step=number)
            number += 1

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        last = 0
        for _ in range(300):
            snapshot = ring.snapshot()
            numbers = [e.seq for e in snapshot.events]
            assert numbers == sorted(set(numbers))
            assert all(e.name == str(e.step) for e in snapshot.events)
            assert snapshot.dropped + len(numbers) >= last
            last = snapshot.dropped + len(numbers)
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_recording_costs_microseconds_at_most(
    record_property: Callable[[str, object], None],
) -> None:
    ring, count = EventRing(1 << 12), 20_000
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter_ns()
        for step in range(count):
            ring.instant(OP, Lane.THREAD, "linear", request="r", step=step)
        best = min(best, (time.perf_counter_ns() - started) / count)
    record_property("ns_per_event", round(best))
    # About 500 ns on a 2-core machine; the bound only catches a change of kind, such as a lock.
    assert best < 10_000


# --- files ------------------------------------------------------------------------------------


def sample() -> Snapshot:
    ring = EventRing(32, rank=1)
    with ring.span(STEP, Lane.STEP, step=1):
        mark(ring, "inside")
    ring.end(ring.begin(EventType.TRANSFER, Lane.TRANSFER, "a", request="r"))
    ring.begin(EventType.TRANSFER, Lane.TRANSFER, "never ends", detail={"api_key": "s3cret"})
    return ring.snapshot()


def test_event_file_reads_back_as_it_was(tmp_path: Path) -> None:
    snapshot = sample()
    write_events(snapshot, tmp_path / "e.jsonl")
    again = read_events(tmp_path / "e.jsonl")
    assert again.events[:-1] == snapshot.events[:-1]
    assert again.events[-1].detail == {"api_key": REDACTED}
    assert (again.dropped, again.rank, again.wall_ns, again.mono_ns, again.thread_names) == (
        snapshot.dropped, 1, snapshot.wall_ns, snapshot.mono_ns, snapshot.thread_names,
    )  # fmt: skip


@given(st.data())
def test_damaged_event_file_is_refused_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "e.jsonl"
    write_events(sample(), path)
    lines = path.read_text().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    kept = data.draw(st.integers(0, len(lines[number]) - 1))
    lines[number] = lines[number][:kept]
    path.write_text("\n".join(lines))
    # A last line that is gone altogether is missed by the count, after the line before it.
    at = number if kept == 0 and number == len(lines) - 1 else number + 1
    with pytest.raises(ConfigError, match=rf"e\.jsonl:{at}\)"):
        read_events(path)


def test_empty_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    for text in ("", "{}\n", "[]\n", '{"format": "oxplow-events", "version": 2}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot read the event file"):
            read_events(path)


def rows_of(snapshot: Snapshot) -> list[dict[str, object]]:
    rows = chrome_trace(snapshot)["traceEvents"]
    assert isinstance(rows, list)
    return rows


def test_chrome_trace_draws_nested_overlapping_and_open_spans(tmp_path: Path) -> None:
    write_chrome_trace(sample(), tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    drawn = {(r["ph"], r["name"]) for r in trace["traceEvents"] if r["ph"] != "M"}
    assert drawn == {
        ("X", "engine_step"), ("i", "op inside"),
        ("b", "transfer a"), ("e", "transfer a"),
        ("b", "transfer never ends"), ("e", "transfer never ends"),
    }  # fmt: skip
    still_open = [r for r in trace["traceEvents"] if r["name"] == "transfer never ends"]
    assert still_open[0]["args"]["open"] is True
    assert {r["pid"] for r in trace["traceEvents"]} == {1}
    assert "s3cret" not in (tmp_path / "t.json").read_text()
    tracks = {r["tid"] for r in trace["traceEvents"] if r["ph"] != "M"}
    named = {r["tid"] for r in trace["traceEvents"] if r["name"] == "thread_name"}
    assert tracks == named


def test_span_closed_by_another_thread_is_drawn_asynchronously() -> None:
    ring = EventRing(8)
    opened = ring.begin(EventType.WORK, Lane.THREAD)
    closer = threading.Thread(target=ring.end, args=(opened,))
    closer.start()
    closer.join()
    assert [r["ph"] for r in rows_of(ring.snapshot())][:2] == ["b", "e"]


def test_end_without_its_begin_is_counted_not_drawn() -> None:
    ring = EventRing(1)
    ring.end(ring.begin(OP, Lane.THREAD))
    trace = chrome_trace(ring.snapshot())
    assert trace["otherData"] == {
        "dropped_events": 1,
        "orphan_ends": 1,
        "wall_ns": ring.snapshot().wall_ns,
        "mono_ns": ring.snapshot().mono_ns,
    }
    assert [r["ph"] for r in rows_of(ring.snapshot())] == ["M"]


def test_threads_of_one_lane_have_their_own_tracks() -> None:
    base = sample().events[0]
    events = tuple(
        Event(n, n, Phase.INSTANT, OP, Lane.THREAD, "x", n % 2 + 1, None, None, None, None)
        for n in range(4)
    )
    snapshot = Snapshot(
        events=events, dropped=0, rank=0, wall_ns=0, mono_ns=0, thread_names={1: "engine"}
    )
    rows = rows_of(snapshot)
    assert base.lane is Lane.STEP
    assert len({r["tid"] for r in rows if r["ph"] == "i"}) == 2
    names = {r["args"]["name"] for r in rows if r["name"] == "thread_name"}  # type: ignore[index]
    assert names == {"thread engine", "thread 2"}


# --- logs -------------------------------------------------------------------------------------


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


@pytest.fixture
def logger(log_file: Path) -> logging.Logger:
    made = logging.Logger("oxplow.test", logging.DEBUG)
    made.addHandler(open_log(log_file, rank=2))
    return made


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_log_record_carries_request_step_rank_and_thread(
    logger: logging.Logger, log_file: Path
) -> None:
    bind(logger, request="r9", step=4).warning("slow step: %d ms", 12)
    logger.info("plain")
    first, second = rows(log_file)
    assert first["message"] == "slow step: 12 ms"
    assert (first["request"], first["step"], first["rank"], first["level"]) == (
        "r9", 4, 2, "warning",
    )  # fmt: skip
    assert first["thread"] == threading.get_ident()
    assert (second["request"], second["step"]) == (None, None)
    assert list(first) == list(second)


def test_extra_fields_and_exceptions_are_written(logger: logging.Logger, log_file: Path) -> None:
    try:
        raise ValueError("the cause")
    except ValueError:
        logger.exception("failed", extra={"blocks": [1, 2], "ratio": float("inf")})
    (row,) = rows(log_file)
    assert (row["blocks"], row["ratio"]) == ([1, 2], "inf")
    assert "the cause" in str(row["exception"])


def test_line_breaks_and_other_scripts_stay_in_one_line(
    logger: logging.Logger, log_file: Path
) -> None:
    logger.info("first\nsecond %s", "écrit \u2028 雪")
    (row,) = rows(log_file)
    assert row["message"] == "first\nsecond écrit \u2028 雪"


def test_no_secret_reaches_the_log(logger: logging.Logger, log_file: Path) -> None:
    secret = "hunter2-abcdef"
    logger.info("Authorization: Bearer %s", secret)
    logger.info("api_key=%s, next", secret)
    logger.info("headers %s", {"x-api-key": secret, "accept": "text"})
    logger.info("nested", extra={"headers": {"Authorization": f"Bearer {secret}"}})
    logger.info("direct", extra={"openai_api_key": secret, "num_tokens": 3})
    try:
        raise ValueError(f"password='{secret}'")
    except ValueError:
        logger.exception("failed")
    text = log_file.read_text()
    assert secret not in text
    assert all(REDACTED in line for line in text.splitlines())
    assert rows(log_file)[4]["num_tokens"] == 3


def test_log_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot open the log file"):
        open_log(tmp_path / "absent" / "log.jsonl")


def test_formatter_takes_the_record_s_own_rank() -> None:
    record = logging.makeLogRecord({"msg": "x", "rank": 5})
    assert json.loads(JsonlFormatter(rank=1).format(record))["rank"] == 5


@pytest.mark.parametrize(
    "name",
    ["api_key", "API-KEY", "X-Api-Key", "Authorization", "proxy-authorization", "Cookie",
     "client_secret", "hf_token", "access_token", "db_password", "private key"],
)  # fmt: skip
def test_secret_names_are_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["num_tokens", "token", "stop_token_ids", "key", "block_key", "secretary", "author"]
)
def test_ordinary_names_are_not_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text", ["num_tokens=3", "tokens: 5", "the key is k", "basic idea of the bearer", "sk-1"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON_LIKE)
def test_plain_gives_what_json_can_hold(value: object) -> None:
    json.dumps(plain(value), allow_nan=False)


def test_plain_survives_a_value_that_holds_itself() -> None:
    ring: list[object] = []
    ring.append(ring)
    json.dumps(plain(ring))
