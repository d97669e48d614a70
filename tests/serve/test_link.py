"""The front's view of its engine: readiness, lost engines, late events, slow readers."""

import asyncio
from collections.abc import Callable

import pytest

from oxplow.engine.request import SamplingParams
from oxplow.serve.engine_port import (
    Accepted,
    Beat,
    Command,
    Delta,
    EngineEvent,
    EngineInfo,
    EngineStats,
    Refused,
    Started,
    Step,
    Work,
    decode_command,
    decode_event,
    encode,
    pack_ids,
    unpack_ids,
)
from oxplow.serve.link.client import EngineClient

INFO = EngineInfo(max_model_len=9, vocab_size=9, eos_token_ids=(1,), lines=("x",))


class Wire:
    """A transport that the test plays."""

    restarts = True

    def __init__(self) -> None:
        self.sent: list[Command] = []

    async def start(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        self.tell, self.lose = on_event, on_lost
        on_event(Started(info=INFO))

    def send(self, command: Command) -> None:
        self.sent.append(command)

    async def close(self) -> None:
        return


def work(n: int = 1) -> Work:
    return Work(request_id="r", prompt=pack_ids([1, 2]), params=SamplingParams(n=n))


def test_readiness_follows_the_beat() -> None:
    async def check() -> None:
        wire = Wire()
        client = EngineClient(wire)
        assert "starting" in client.not_ready()
        await client.start()
        assert client.not_ready() == ""
        wire.tell(Beat(stats=EngineStats(), busy_s=4.9, predicted_s=0.1))
        assert client.not_ready() == ""
        wire.tell(Beat(stats=EngineStats(), busy_s=5.1, predicted_s=0.1))
        assert "5 s" in client.not_ready()
        wire.tell(Beat(stats=EngineStats(), busy_s=11.0, predicted_s=4.0))
        assert client.not_ready() == ""
        client._beat_at -= 60
        assert "silent" in client.not_ready()
        wire.lose("code -9")
        assert "restarting" in client.not_ready()
        wire.tell(Started(info=INFO))
        assert client.not_ready() == ""

    asyncio.run(check())


def test_a_lost_engine_ends_every_choice_once() -> None:
    async def check() -> None:
        wire = Wire()
        client = EngineClient(wire)
        await client.start()
        ticket = client.submit(work(n=3))
        wire.tell(Accepted(request_id="r"))
        wire.tell(Step(deltas=(Delta(request_id="r", index=1, finish="stop"),)))
        wire.lose("gone")
        assert isinstance(await ticket.admission, Accepted)
        deltas = await ticket.next_deltas()
        ends = [(d.index, d.finish) for d in deltas]
        assert ends == [(1, "stop"), (0, "failed"), (2, "failed")]
        assert await ticket.next_deltas() == []
        wire.tell(Step(deltas=(Delta(request_id="r", index=0, token_ids=(5,)),)))
        assert await ticket.next_deltas() == []
        late = client.submit(work())
        refusal = await late.admission
        assert isinstance(refusal, Refused) and refusal.kind == "lost"
        assert client.num_open == 0

    asyncio.run(check())


def test_counts_survive_an_engine() -> None:
    async def check() -> None:
        wire = Wire()
        client = EngineClient(wire)
        await client.start()
        wire.tell(Beat(stats=EngineStats(prompt_tokens=7, running=2)))
        wire.lose("gone")
        assert client.stats.prompt_tokens == 7
        assert client.stats.running == 0
        wire.tell(Beat(stats=EngineStats(prompt_tokens=3, running=1)))
        assert (client.stats.prompt_tokens, client.stats.running) == (10, 1)

    asyncio.run(check())


def test_a_slow_reader_gets_fewer_and_larger_pieces() -> None:
    async def check() -> None:
        wire = Wire()
        client = EngineClient(wire)
        await client.start()
        ticket = client.submit(work())
        for token in range(5):
            wire.tell(Step(deltas=(Delta(request_id="r", index=0, token_ids=(token,)),)))
        assert [d.token_ids[0] for d in await ticket.next_deltas()] == [0, 1, 2, 3, 4]

    asyncio.run(check())


@pytest.mark.parametrize(
    "message",
    [
        work(),
        Step(deltas=(Delta(request_id="r", index=0, token_ids=(1,), cached_tokens=0),)),
        Started(info=INFO),
        Beat(stats=EngineStats(cache_use=0.5)),
        Refused(request_id="r", kind="request", message="m", param="p", code="c"),
    ],
)
def test_messages_cross_unchanged(message: Command | EngineEvent) -> None:
    decode = decode_command if isinstance(message, Work) else decode_event
    assert decode(encode(message)) == message


def test_ids_cross_as_bytes() -> None:
    assert unpack_ids(pack_ids([0, 154_855, 2**31 - 1])) == [0, 154_855, 2**31 - 1]
