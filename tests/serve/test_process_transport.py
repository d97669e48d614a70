"""Commands to a child that does not listen yet: none is lost, and their order is kept."""

from __future__ import annotations

import asyncio

import zmq

from oxplow.serve.engine_port import Abort, Command, decode_command
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.link.process import ProcessTransport


class _Deaf:
    """A socket without anybody at its other end for the first few sends."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.sent: list[Command] = []

    def send(self, message: bytes, flags: int) -> None:
        assert flags & zmq.NOBLOCK
        if self.refusals:
            self.refusals -= 1
            raise zmq.Again
        self.sent.append(decode_command(message))


def test_what_is_sent_before_the_child_listens_arrives_in_order() -> None:
    async def scene() -> None:
        transport = ProcessTransport(EngineSettings(directory="unused"))
        ears = _Deaf(3)
        transport._commands = ears  # type: ignore[assignment]
        for i in range(4):
            transport.send(Abort(request_id=f"r{i}"))
        assert not ears.sent
        for _ in range(200):
            await asyncio.sleep(0.005)
            if len(ears.sent) == 4:
                break
        transport.send(Abort(request_id="r4"))
        assert [c.request_id for c in ears.sent] == ["r0", "r1", "r2", "r3", "r4"]  # type: ignore[union-attr]

    asyncio.run(scene())


def test_commands_for_a_dead_child_do_not_reach_the_next() -> None:
    async def scene() -> None:
        transport = ProcessTransport(EngineSettings(directory="unused"))
        old, new = _Deaf(1), _Deaf(0)
        transport._commands = old  # type: ignore[assignment]
        transport.send(Abort(request_id="old"))
        transport._commands = new  # type: ignore[assignment]
        transport._unsent.clear()
        transport.send(Abort(request_id="new"))
        await asyncio.sleep(0.05)
        assert [c.request_id for c in new.sent] == ["new"]  # type: ignore[union-attr]
        assert not old.sent

    asyncio.run(scene())
