"""What every endpoint works with: the engine, the workers, the limits, the counts.

Owns no behaviour beyond wiring. Knows no endpoint.
Invariant: one `Service` per application; after the start only the state of this moment changes:
whether the server is leaving, what is being read and answered.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from oxplow.serve.api.metrics import Metrics
from oxplow.serve.link.client import EngineClient
from oxplow.serve.prepare.prepared import PrepareSettings
from oxplow.serve.sessions import Sessions
from oxplow.serve.text import ChatText
from oxplow.serve.workers import WorkerPool

__all__ = ["Limits", "Service"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bound what a client may cost, and all bodies that are read at once. Bytes and seconds."""

    max_body_bytes: int = 64 << 20
    max_bodies_bytes: int = 1 << 30
    body_timeout_s: float = 60.0
    keep_alive_s: float = 10.0
    grace_s: float = 30.0
    api_key: str | None = None
    allow_origins: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Service:
    """Hold the parts of a running server."""

    engine: EngineClient
    workers: WorkerPool
    text: ChatText
    prepare: PrepareSettings
    limits: Limits
    metrics: Metrics
    started_at: int
    sessions: Sessions | None = None  # None: there is no folder for them
    is_leaving: bool = False
    body_bytes: int = 0  # of requests that are being read
    open_answers: set[str] = field(default_factory=set)

    async def until_answered(self) -> None:
        """Wait, five seconds at most, until the answers that ended were told."""
        for _ in range(100):
            if not self.open_answers:
                return
            await asyncio.sleep(0.05)
