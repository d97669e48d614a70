"""The front's side of the engine: who waits for what, and how the engine is.

Owns the tickets of open requests and the last beat. Knows no HTTP; a `Transport` moves messages.
Invariant: every ticket gets an `Accepted` or a `Refused`, and a final delta for each of its
choices, also when the engine dies; everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from oxplow.serve.engine_port import (
    Abort,
    Accepted,
    Beat,
    Command,
    Delta,
    Drain,
    EndChoice,
    EngineEvent,
    EngineInfo,
    EngineStats,
    LoadSession,
    Refused,
    SaveSession,
    SessionDone,
    Started,
    Step,
    Work,
)
from oxplow.serve.link.quarantine import Quarantine

__all__ = ["EngineClient", "Ticket", "Transport"]

log = logging.getLogger(__name__)

_LOST = "the engine stopped; the request was lost"
_SLOWEST_STEP_S = 5.0
_SILENCE_S = 8.0  # beats come every second


class Transport(Protocol):
    """Moves commands to an engine, and its events to `on_event`, on the event loop's thread."""

    @property
    def restarts(self) -> bool:
        """Tell whether an engine that stops by itself is replaced."""
        ...

    async def start(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Bring the engine up; `on_lost` is called each time that it stops by itself."""
        ...

    def send(self, command: Command) -> None:
        """Send a command; it is dropped where no engine lives."""
        ...

    async def close(self) -> None:
        """Wait for the engine to leave, or end it."""
        ...


class Ticket:
    """One request on its way: its events in order.

    `deltas` holds what came and was not read yet; consecutive steps are handed over together, so a
    slow reader gets fewer and larger pieces.
    """

    def __init__(self, request_id: str, num_choices: int) -> None:
        self.request_id = request_id
        self._open = set(range(num_choices))
        self._deltas: list[Delta] = []
        self._has_news = asyncio.Event()
        self.admission: asyncio.Future[Accepted | Refused] = (
            asyncio.get_running_loop().create_future()
        )

    @property
    def is_finished(self) -> bool:
        """Tell whether every choice has ended."""
        return not self._open

    async def next_deltas(self) -> list[Delta]:
        """Wait for something new and return all of it; empty when every choice has ended."""
        while not self._deltas and self._open:
            self._has_news.clear()
            await self._has_news.wait()
        taken, self._deltas = self._deltas, []
        return taken

    def put(self, delta: Delta) -> None:
        """Add a delta; what comes after a choice's end is dropped."""
        if delta.index not in self._open:
            return
        if delta.finish is not None:
            self._open.discard(delta.index)
        self._deltas.append(delta)
        self._has_news.set()

    def fail(self, reason: str) -> None:
        """End what is open."""
        if not self.admission.done():
            refusal = Refused(request_id=self.request_id, kind="lost", message=reason)
            self.admission.set_result(refusal)
        for index in sorted(self._open):
            self.put(
                Delta(request_id=self.request_id, index=index, finish="failed", failure=reason)
            )


class EngineClient:
    """Submits work and hands out what comes back."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._tickets: dict[str, Ticket] = {}
        self._jobs: dict[str, asyncio.Future[SessionDone]] = {}
        self.num_starts = 0  # of engines so far; an engine's caches go with it
        self._started = asyncio.Event()
        self._info: EngineInfo | None = None
        self._beat = Beat(stats=EngineStats())
        self._beat_at = 0.0
        self._failure = "the engine is starting"
        self.on_restart: Callable[[], None] = lambda: None
        self._before = EngineStats()  # counts of engines that died
        self.is_alive = False
        self.is_gone = asyncio.Event()  # the engine stopped and nothing replaces it
        self._quarantine = Quarantine()
        self._held: dict[str, Work] = {}  # suspects that wait for the one on trial

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it takes work. Raises what the transport raises."""
        await self._transport.start(self._on_event, self._on_lost)
        await self._started.wait()
        return self.info

    @property
    def info(self) -> EngineInfo:
        """Describe the engine; only after `start`."""
        if self._info is None:
            raise AssertionError("the engine was not started")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Return the counts of the last beat; those of engines that died are added."""
        return _added(self._before, self._beat.stats)

    @property
    def num_open(self) -> int:
        """How many requests are on their way."""
        return len(self._tickets)

    def not_ready(self) -> str:
        """Say why the engine cannot be relied on at this moment; empty: it can."""
        if not self.is_alive:
            return self._failure
        silence = time.monotonic() - self._beat_at
        if silence > _SILENCE_S:
            return f"the engine has been silent for {silence:.0f} s"
        limit = max(_SLOWEST_STEP_S, 3 * self._beat.predicted_s)
        if self._beat.busy_s > limit:
            return f"a step has taken {self._beat.busy_s:.0f} s; at most {limit:.0f} s is healthy"
        return ""

    def submit(self, work: Work) -> Ticket:
        """Send a request; its fate comes through the ticket."""
        ticket = Ticket(work.request_id, work.params.n)
        if not self.is_alive:
            ticket.fail(self._failure)
            return ticket
        if self._quarantine.is_convicted(work):
            ticket.admission.set_result(
                Refused(
                    request_id=work.request_id,
                    kind="request",
                    message="this very request has stopped the engine before; it is not tried"
                    " again, and the server's log says what happened",
                    code="quarantined",
                )
            )
            return ticket
        self._tickets[work.request_id] = ticket
        self._begin(work)
        return ticket

    def abort(self, request_id: str) -> None:
        """Give a request up; nothing more comes through its ticket."""
        if self._tickets.pop(request_id, None) is None:
            return
        if self._held.pop(request_id, None) is None:
            self._transport.send(Abort(request_id=request_id))
            self._end_trial(request_id, is_harmless=False)

    def end_choice(self, request_id: str, index: int) -> None:
        """Tell the engine that a choice is complete."""
        if request_id in self._tickets:
            self._transport.send(EndChoice(request_id=request_id, index=index))

    def close_ticket(self, ticket: Ticket) -> None:
        """Forget a ticket; what still runs of it is aborted."""
        if ticket.is_finished:
            self._tickets.pop(ticket.request_id, None)
            self._end_trial(ticket.request_id, is_harmless=True)
        else:
            self.abort(ticket.request_id)

    async def session(self, command: SaveSession | LoadSession) -> SessionDone:
        """Have a session saved or loaded; what went wrong is told in the answer."""
        if not self.is_alive:
            return SessionDone(job_id=command.job_id, kind="lost", failure=self._failure)
        job: asyncio.Future[SessionDone] = asyncio.get_running_loop().create_future()
        self._jobs[command.job_id] = job
        try:
            self._transport.send(command)
            return await job
        finally:
            self._jobs.pop(command.job_id, None)

    async def drain(
        self,
        grace_s: float,
        wait: Callable[[], Awaitable[None]],
        last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Let what runs finish for `grace_s` seconds, cut the rest, and stop the engine.

        `wait` returns when no client is being answered any more; `last` is what the engine still
        has to do then.
        """
        if self._tickets and grace_s > 0:
            deadline = time.monotonic() + grace_s
            while self._tickets and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        for ticket in list(self._tickets.values()):
            ticket.fail("the server is shutting down")
        if last is not None:
            await wait()
            await last()
        self._transport.send(Drain(abort_running=True))
        await wait()
        self.is_alive = False
        self._failure = "the server is shutting down"
        await self._transport.close()

    async def abandon(self) -> None:
        """Stop an engine whose start did not succeed."""
        self._transport.send(Drain(abort_running=True))
        await self._transport.close()

    def _on_event(self, event: EngineEvent) -> None:
        match event:
            case Step():
                for delta in event.deltas:
                    ticket = self._tickets.get(delta.request_id)
                    if ticket is not None:
                        ticket.put(delta)
                        if delta.token_ids and self._quarantine.note_token(delta.request_id):
                            self._release()
            case Accepted() | Refused():
                ticket = self._tickets.get(event.request_id)
                if ticket is not None and not ticket.admission.done():
                    ticket.admission.set_result(event)
                    if isinstance(event, Refused):
                        self._tickets.pop(event.request_id)
                        self._end_trial(event.request_id, is_harmless=True)
            case Beat():
                self._beat, self._beat_at = event, time.monotonic()
            case SessionDone():
                job = self._jobs.get(event.job_id)
                if job is not None and not job.done():
                    job.set_result(event)
            case Started():
                self._info, self.is_alive = event.info, True
                self.num_starts += 1
                self._beat_at = time.monotonic()
                self._started.set()

    def _on_lost(self, reason: str) -> None:
        """Fail everything that was open; the transport brings a new engine up if it can."""
        log.error("the engine was lost: %s; %s requests fail", reason, len(self._tickets))
        self._quarantine.death()
        self._held.clear()
        self.is_alive = False
        self._before = self.stats
        self._beat = Beat(stats=EngineStats())
        if self._transport.restarts:
            self.on_restart()
            self._failure = f"the engine is restarting: {reason}"
        else:
            self._failure = f"the engine failed and nothing restarts it: {reason}"
            self.is_gone.set()
        lost, self._tickets = self._tickets, {}
        for ticket in lost.values():
            ticket.fail(_LOST)
        for job_id, job in self._jobs.items():
            if not job.done():
                job.set_result(SessionDone(job_id=job_id, kind="lost", failure=reason))

    def _begin(self, work: Work) -> None:
        """Send a request to the engine, or hold a suspect until the one on trial is through."""
        if self._quarantine.may_start(work):
            self._quarantine.start(work)
            self._transport.send(work)
        else:
            self._held[work.request_id] = work

    def _end_trial(self, request_id: str, *, is_harmless: bool) -> None:
        if self._quarantine.end(request_id, is_harmless=is_harmless):
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, {}
        for work in held.values():
            self._begin(work)


def _added(before: EngineStats, now: EngineStats) -> EngineStats:
    """Add counters; gauges are those of now."""
    counters = (
        "steps",
        "prompt_tokens",
        "generated_tokens",
        "prefix_queries_tokens",
        "prefix_hits_tokens",
        "preemptions",
    )
    sums = {name: getattr(before, name) + getattr(now, name) for name in counters}
    return msgspec.structs.replace(now, **sums)
