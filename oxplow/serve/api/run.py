"""One request from its admission to its last event.

Owns tickets, readers and times of a request that was prepared. Knows no wire form.
Invariant: whatever happens to the client or the engine, nothing of a closed run stays in the
engine; choices of several prompts are numbered prompt by prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import msgspec

from oxplow.serve.answers import AnswerReader, ChoiceEvent, Ended, Usage
from oxplow.serve.api.errors import failure_of, refusal_of, unavailable
from oxplow.serve.api.service import Service
from oxplow.serve.engine_port import Refused, Work
from oxplow.serve.link.client import Ticket
from oxplow.serve.prepare.prepared import Prepared

__all__ = ["Run"]

log = logging.getLogger(__name__)

Told = list[tuple[int, ChoiceEvent]]


class Run:
    """A request on its way through the engine: `admit`, read `events`, `close`."""

    def __init__(
        self, service: Service, prepared: Prepared, request_id: str, *, session: str | None = None
    ) -> None:
        """Take a prepared request; `session` names the conversation that it is a turn of."""
        self._service, self.prepared, self.request_id = service, prepared, request_id
        self._session, self._answer_ids = session, array("i")
        self._tickets: list[Ticket] = []
        self._readers: list[AnswerReader] = []
        self._began = time.monotonic()
        self._last_told = 0.0
        self._works = prepared.works
        self._is_closed = False
        self.num_choices = sum(w.params.n for w in prepared.works)

    async def admit(self) -> None:
        """Submit and wait for admission; raises ApiError, after which nothing is left behind."""
        is_admitted = False
        try:
            await self._submit()
            is_admitted = True
        finally:
            if not is_admitted:
                self.close()

    def close(self) -> None:
        """Leave nothing in the engine; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        metrics = self._service.metrics
        self._service.open_answers.discard(self.request_id)
        # A request that gave no token says nothing about its conversation.
        if self._session is not None and self._service.sessions is not None and self._answer_ids:
            self._service.sessions.note(self._session, self._works[0], self._answer_ids)
        for ticket in self._tickets:
            self._service.engine.close_ticket(ticket)
        for reader in self._readers:
            if reader.queued_s is not None:
                metrics.queue_time.observe(reader.queued_s)
            metrics.dropped_calls.inc(reader.num_dropped_calls)
            if reader.usage.miss:
                metrics.misses.labels(reader.usage.miss).inc()
        took_s = time.monotonic() - self._began
        metrics.duration.observe(took_s)
        usage = self.usage
        log.info(
            "request %s: %s prompt tokens, %s of them cached, %s generated, %.2f s",
            self.request_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            took_s,
        )

    @property
    def usage(self) -> Usage:
        """Return the counts of all prompts and choices so far."""
        total = Usage()
        for work, reader in zip(self._works, self._readers, strict=False):
            total.prompt_tokens += len(work.prompt) // 4
            total.cached_tokens += reader.usage.cached_tokens
            total.completion_tokens += reader.usage.completion_tokens
            total.reasoning_tokens += reader.usage.reasoning_tokens
        return total

    @property
    def readers(self) -> list[AnswerReader]:
        """Return one reader for each prompt."""
        return self._readers

    async def events(self) -> AsyncGenerator[Told, None]:
        """Yield what is new, as (choice, event) pairs; raises ApiError where a choice failed."""
        source = self._read_one(0) if len(self._tickets) == 1 else self._read_all()
        async with aclosing(source):
            async for told in source:
                if told:
                    self._measure()
                    for _, event in told:
                        self._count(event)
                    yield told

    async def _submit(self) -> None:
        service = self._service
        service.open_answers.add(self.request_id)
        if service.is_leaving:
            raise unavailable("the server is shutting down")
        self._works = tuple(
            self._fitted(msgspec.structs.replace(work, request_id=f"{self.request_id}-{number}"))
            for number, work in enumerate(self._works)
        )
        for work in self._works:
            ticket = service.engine.submit(work)
            self._tickets.append(ticket)
            self._readers.append(self._reader(work))
        for ticket in self._tickets:
            answer = await ticket.admission
            if isinstance(answer, Refused):
                raise refusal_of(answer, max(1.0, service.engine.stats.predicted_wait_s))

    def _fitted(self, work: Work) -> Work:
        """Cut a budget that cannot fit to what fits, where the API means it as a ceiling."""
        budget = work.params.max_tokens
        room = self._service.engine.info.max_model_len - len(work.prompt) // 4
        if self.prepared.shape.bounds_answer or budget is None or not 0 < room < budget:
            return work
        params = replace(work.params, max_tokens=room, min_tokens=min(work.params.min_tokens, room))
        return msgspec.structs.replace(work, params=params)

    def _reader(self, work: Work) -> AnswerReader:
        engine, request_id = self._service.engine, work.request_id
        return AnswerReader(
            self.prepared.shape,
            self._service.text.vocabulary,
            work.params.n,
            lambda index: engine.end_choice(request_id, index),
        )

    async def _read_one(self, number: int) -> AsyncGenerator[Told, None]:
        ticket, reader = self._tickets[number], self._readers[number]
        first = sum(w.params.n for w in self._works[:number])
        while not reader.is_finished:
            deltas = await ticket.next_deltas()
            if not deltas:
                return
            if self._session is not None and number == 0:
                for delta in deltas:
                    if delta.index == 0:
                        self._answer_ids.extend(delta.token_ids)
            yield [(first + index, event) for index, event in reader.read(deltas)]

    async def _read_all(self) -> AsyncGenerator[Told, None]:
        """Merge several prompts in the order in which things happen."""
        news: asyncio.Queue[Told | None] = asyncio.Queue()

        async def follow(number: int) -> None:
            async for told in self._read_one(number):
                news.put_nowait(told)
            news.put_nowait(None)

        followers = [asyncio.create_task(follow(i)) for i in range(len(self._tickets))]
        try:
            left = len(followers)
            while left:
                told = await news.get()
                if told is None:
                    left -= 1
                else:
                    yield told
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _count(self, event: ChoiceEvent) -> None:
        if isinstance(event, Ended):
            self._service.metrics.finished.labels(event.reason).inc()
            if event.reason in ("aborted", "failed"):
                raise failure_of(event.reason, event.failure)

    def _measure(self) -> None:
        now, metrics = time.monotonic(), self._service.metrics
        if self._last_told:
            metrics.between_tokens.observe(now - self._last_told)
        else:
            metrics.first_token.observe(now - self._began)
        self._last_told = now
