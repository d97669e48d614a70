"""The first answer at start: an engine that refuses it, or loses it, holds nobody up for long."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from oxplow.serve import server
from oxplow.serve.engine_port import Accepted, Refused
from oxplow.serve.link.client import Ticket


class _Engine:
    """Takes one work and says about it what the test wants."""

    def __init__(self, admission: Accepted | Refused | None) -> None:
        self._admission = admission
        self.closed: list[Ticket] = []

    def submit(self, work: Any) -> Ticket:
        ticket = Ticket(work.request_id, work.params.n)
        if self._admission is not None:
            ticket.admission.set_result(self._admission)
        return ticket

    def close_ticket(self, ticket: Ticket) -> None:
        self.closed.append(ticket)


def _seconds(admission: Accepted | Refused | None) -> float:
    async def scene() -> float:
        engine = _Engine(admission)
        began = time.monotonic()
        await server._first_answer(SimpleNamespace(engine=engine), began)  # type: ignore[arg-type]
        assert len(engine.closed) == 1
        return time.monotonic() - began

    return asyncio.run(scene())


def test_a_refusal_is_not_waited_out() -> None:
    refused = Refused(request_id="first-answer", kind="capacity", message="no room")
    assert _seconds(refused) < 5


@pytest.mark.parametrize("admission", [None, Accepted(request_id="first-answer")])
def test_an_answer_that_never_comes_is_given_up(
    monkeypatch: pytest.MonkeyPatch, admission: Accepted | None
) -> None:
    monkeypatch.setattr(server, "_FIRST_ANSWER_S", 0.05)
    assert 0.04 < _seconds(admission) < 5
