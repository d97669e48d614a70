"""The numbers of a running server, in Prometheus' form.

Owns the names, documented in `docs/serving.md`; a renamed one keeps its old name for a release.
Knows no request form.
Invariant: every name exists at 0 from the start, and counters never fall, also when the engine
process is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from oxplow.serve.engine_port import EngineStats

__all__ = ["FINISH_REASONS", "Metrics"]

FINISH_REASONS = ("stop", "length", "tool_calls", "aborted", "failed")
SESSION_EVENTS = ("saved", "loaded", "refused")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_COUNTERS = (
    ("oxplow_prompt_tokens", "Prompt tokens taken in.", "prompt_tokens"),
    ("oxplow_generated_tokens", "Tokens generated.", "generated_tokens"),
    ("oxplow_prefix_query_tokens", "Prompt tokens looked up.", "prefix_queries_tokens"),
    ("oxplow_prefix_hit_tokens", "Prompt tokens found in the prefix cache.", "prefix_hits_tokens"),
    ("oxplow_engine_steps", "Steps of the engine.", "steps"),
    ("oxplow_preemptions", "Requests that gave their memory up for a while.", "preemptions"),
)
_GAUGES = (
    ("oxplow_requests_running", "Choices that hold memory.", "running"),
    ("oxplow_requests_waiting", "Choices that wait for memory.", "waiting"),
    ("oxplow_cache_use_ratio", "Share of cache blocks in use, 0 to 1.", "cache_use"),
)


class Metrics:
    """Counts of one server; `stats` reads the engine's."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(stats))

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, registry=self.registry, buckets=_SECONDS)

        self.responses = counter("oxplow_http_responses", "Answers by status.", ("status",))
        self.finished = counter("oxplow_choices_finished", "Choices by their end.", ("reason",))
        self.cancelled = counter("oxplow_requests_cancelled", "Requests whose client left.")
        self.refused = counter("oxplow_requests_refused", "Requests refused by code.", ("code",))
        self.misses = counter("oxplow_prefix_misses", "Requests by miss reason.", ("reason",))
        self.dropped_calls = counter("oxplow_tool_calls_dropped", "Calls of undeclared functions.")
        self.failed_transfers = counter("oxplow_transfers_failed", "Hand-overs that failed.")
        self.session_files = counter(
            "oxplow_session_files", "Session files by what became of them.", ("event",)
        )
        self.restarts = counter("oxplow_engine_restarts", "Engine processes that were replaced.")
        self.first_token = histogram(
            "oxplow_time_to_first_token_seconds", "From the request to its first token."
        )
        self.between_tokens = histogram(
            "oxplow_time_between_tokens_seconds", "Between two readings of one answer."
        )
        self.queue_time = histogram(
            "oxplow_queue_time_seconds", "How long requests waited for memory."
        )
        self.duration = histogram("oxplow_request_seconds", "From the request to its end.")
        self.loop_lag = Gauge(
            "oxplow_front_lag_seconds", "How late the front's clock runs.", registry=self.registry
        )
        for reason in FINISH_REASONS:
            self.finished.labels(reason)
        for event in SESSION_EVENTS:
            self.session_files.labels(event)

    def page(self) -> bytes:
        """Return the metrics page."""
        return bytes(generate_latest(self.registry))


class _EngineNumbers(Collector):
    """Reads the engine's counts at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield one family for each count."""
        stats = self._stats()
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(name, text, value=getattr(stats, field))
