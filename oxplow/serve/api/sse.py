"""Server-sent events: headers at once, signs of life, and an end when the client leaves.

Owns the response class and the framing. Knows no API.
Invariant: the source is closed exactly once, also when the client leaves or sending fails; between
two events at most `keep_alive_s` pass without a byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "KEEP_ALIVE", "EventStream", "client_left", "frame", "named_frame"]

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect events
}
_ENCODER = msgspec.json.Encoder()


def frame(value: Any) -> bytes:
    """Return one event without a name."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_frame(value: Mapping[str, Any]) -> bytes:
    """Return one event that is named by its `type`."""
    name = str(value["type"]).encode()
    return b"event: " + name + b"\ndata: " + _ENCODER.encode(value) + b"\n\n"


async def client_left(receive: Receive) -> None:
    """Return when the client has closed its side."""
    while (await receive())["type"] != "http.disconnect":
        continue


class EventStream(Response):
    """Sends what `source` yields.

    `on_leave` is called when the client left before the end, `on_close` in every case: a source
    that was never started does not run its own clean-up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_leave: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source, self._keep_alive_s = source, keep_alive_s
        self._on_leave, self._on_close = on_leave, on_close
        self.init_headers({**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the source ends or the client leaves."""
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                self._on_leave()
        finally:
            for task in (pump, watch):
                task.cancel()
            ends = await asyncio.gather(pump, watch, return_exceptions=True)
            await self._source.aclose()
            self._on_close()
        if isinstance(ends[0], OSError):
            self._on_leave()
        elif isinstance(ends[0], Exception):
            raise ends[0]

    async def _pump(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        # Headers travel with the first body bytes; a comment makes them leave now.
        await _send(send, KEEP_ALIVE)
        pending: asyncio.Task[bytes] | None = None
        try:
            while True:
                if pending is None:
                    pending = asyncio.ensure_future(_next(self._source))
                done, _ = await asyncio.wait({pending}, timeout=self._keep_alive_s)
                if not done:
                    await _send(send, KEEP_ALIVE)
                    continue
                chunk, pending = pending.result(), None
                if not chunk:
                    break
                await _send(send, chunk)
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _next(source: AsyncGenerator[bytes, None]) -> bytes:
    """Return the next event; nothing at the end."""
    async for chunk in source:
        return chunk
    return b""


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
