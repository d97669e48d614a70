"""A request that stops the engine is found and refused; the others go on."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from oxplow.engine.request import SamplingParams
from oxplow.errors import OxplowError
from oxplow.serve.api.errors import overloaded
from oxplow.serve.engine_port import (
    Accepted,
    Command,
    Delta,
    EngineEvent,
    EngineInfo,
    Refused,
    Started,
    Step,
    WirePicture,
    Work,
    pack_ids,
)
from oxplow.serve.link.client import EngineClient, Ticket
from oxplow.serve.link.quarantine import fingerprint
from oxplow.serve.server import run_server
from tests.serve.model_dir import write_model_files
from tests.serve.running import options, running

INFO = EngineInfo(max_model_len=100, vocab_size=10, eos_token_ids=(1,))


def work(name: str, prompt: int, **more: object) -> Work:
    fields = {"params": SamplingParams(max_tokens=4), **more}
    return Work(request_id=name, prompt=pack_ids([prompt]), **fields)  # type: ignore[arg-type]


class Wire:
    """An engine that dies as soon as it holds a work with a poisoned prompt, when asked."""

    restarts = True

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def start(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        self.tell, self._lose = on_event, on_lost
        self.tell(Started(info=INFO))

    def send(self, command: Command) -> None:
        if isinstance(command, Work):
            self.sent.append(command.request_id)
            self.tell(Accepted(request_id=command.request_id))

    def die(self) -> None:
        self._lose("killed")
        self.sent.clear()
        self.tell(Started(info=INFO))

    async def close(self) -> None:
        """End."""


def finish(wire: Wire, client: EngineClient, ticket: Ticket) -> None:
    name = ticket.request_id
    wire.tell(Step(deltas=(Delta(request_id=name, index=0, finish="stop"),)))
    client.close_ticket(ticket)


def with_client(check: Callable[[Wire, EngineClient], None]) -> None:
    async def go() -> None:
        wire = Wire()
        client = EngineClient(wire)
        await client.start()
        check(wire, client)

    asyncio.run(go())


def test_the_second_death_names_its_cause_and_spares_the_others() -> None:
    def check(wire: Wire, client: EngineClient) -> None:
        for name, prompt in (("a", 1), ("poison", 2), ("b", 3)):
            client.submit(work(name, prompt))
        wire.die()
        tickets = [client.submit(work(n, p)) for n, p in (("a2", 1), ("poison2", 2), ("b2", 3))]
        client.submit(work("new", 9))
        assert wire.sent == ["a2", "new"], "one suspect at a time; others run beside it"
        finish(wire, client, tickets[0])
        assert wire.sent == ["a2", "new", "poison2"]
        wire.die()
        refused = client.submit(work("poison3", 2)).admission.result()
        assert isinstance(refused, Refused)
        assert (refused.kind, refused.code) == ("request", "quarantined")
        assert wire.sent == []
        client.submit(work("b3", 3))
        client.submit(work("new2", 9))
        assert wire.sent == ["b3", "new2"]

    with_client(check)


def test_what_was_lost_is_never_sent_again() -> None:
    """P29: whatever the client does next, the front runs a request once or not at all."""

    def check(wire: Wire, client: EngineClient) -> None:
        tickets = [client.submit(work(name, 1)) for name in "ab"]
        wire.die()
        assert wire.sent == []
        for ticket in tickets:
            assert ticket.is_finished
            client.close_ticket(ticket)
        assert client.num_open == 0 and wire.sent == []

    with_client(check)


def test_a_first_token_clears_a_suspect_after_one_death_only() -> None:
    def check(wire: Wire, client: EngineClient) -> None:
        def submit() -> None:
            for name, prompt in (("a", 1), ("b", 2)):
                client.submit(work(name, prompt))

        submit()
        wire.die()
        submit()
        assert wire.sent == ["a"]
        wire.tell(Step(deltas=(Delta(request_id="a", index=0, token_ids=(5,)),)))
        assert wire.sent == ["a", "b"]
        wire.tell(Step(deltas=(Delta(request_id="b", index=0, token_ids=(5,)),)))
        wire.die()
        submit()
        assert wire.sent == ["a"], "cleared too early: both are suspects again"
        wire.tell(Step(deltas=(Delta(request_id="a", index=0, token_ids=(5,)),)))
        assert wire.sent == ["a"], "after two deaths only its end proves a request harmless"
        wire.die()
        assert isinstance(client.submit(work("a", 1)).admission.result(), Refused)

    with_client(check)


def test_a_suspect_whose_client_leaves_makes_room() -> None:
    def check(wire: Wire, client: EngineClient) -> None:
        for name in "abc":
            client.submit(work(name, ord(name)))
        wire.die()
        tickets = {name: client.submit(work(name, ord(name))) for name in "abc"}
        client.close_ticket(tickets["b"])
        client.close_ticket(tickets["a"])
        assert wire.sent == ["a", "c"], "what was only held never reaches the engine"
        assert client.num_open == 1

    with_client(check)


def test_a_fingerprint_is_the_content_and_needs_no_pixels() -> None:
    picture = WirePicture(
        start=0, num_tokens=1, content_hash="h", pixels=b"12", row_width=1, grid=(1, 1, 1)
    )
    one = work("a", 1, pictures=(picture,))
    assert fingerprint(one) == fingerprint(work("b", 1, pictures=(picture,), priority=3, salt="x"))
    assert fingerprint(one) != fingerprint(work("a", 1))
    assert fingerprint(one) != fingerprint(work("a", 2, pictures=(picture,)))
    other = SamplingParams(max_tokens=5)
    assert fingerprint(one) != fingerprint(work("a", 1, pictures=(picture,), params=other))


@pytest.mark.parametrize(("poison", "tries"), [("@die@", {2}), ("</think>half@die@", {2, 3})])
def test_a_poison_stops_the_engine_only_so_often(
    tmp_path: Path, poison: str, tries: set[int]
) -> None:
    """Twice; one that gives tokens first may pass its trial by them, and gets a third."""
    folder = write_model_files(tmp_path)
    with running(options(folder, is_inprocess=False)) as server:
        deaths = 0
        while (answer := server.chat(poison)).status_code == 503:
            deaths += 1
            assert deaths <= max(tries)
            while server.client.get("/ready").status_code != 200:
                pass
        assert deaths in tries
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "quarantined")
        assert server.chat("</think>fine").status_code == 200


def fails(settings: object) -> object:
    """Build an engine that fails in its first step; a factory named by the test."""
    from tests.serve.scripted_core import build

    core = build(settings)  # type: ignore[arg-type]

    def step() -> None:
        raise RuntimeError("a fault of the engine")

    core.step = step  # type: ignore[assignment,method-assign]
    return core


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_engine_in_one_process_says_so_and_ends_the_server(tmp_path: Path) -> None:
    folder = write_model_files(tmp_path)
    chosen = options(folder, factory="tests.serve.test_quarantine:fails")
    with running(chosen) as server:
        assert server.chat("</think>hi").status_code == 503
        told = server.client.get("/health").json()
        assert told == {"status": "ok", "engine": "failed"}
        reason = server.client.get("/ready").json()["reason"]
        assert "a fault of the engine" in reason and "nothing restarts it" in reason
        assert server.service.engine.is_gone.is_set()

    async def serve() -> None:
        await run_server(options_on_any_port(chosen), lambda *ready: None)

    with pytest.raises(OxplowError, match="cannot be restarted"):
        asyncio.run(serve())


def options_on_any_port(chosen: object) -> object:
    from dataclasses import replace

    return replace(chosen, port=0)  # type: ignore[type-var]


def test_those_who_are_refused_together_come_back_apart() -> None:
    told = {int(overloaded("full", 40.0).headers["Retry-After"]) for _ in range(200)}
    assert len(told) > 3
    assert min(told) >= 40 and max(told) <= math.ceil(50)
