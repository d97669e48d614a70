"""An engine in a process of its own.

Owns the child, its sockets and its replacement. Knows no request.
Invariant: at most one child lives at a time; a child that stops by itself is reported once and
replaced, at growing intervals where it keeps stopping; nothing of it is left after `close`.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from oxplow.errors import ConfigError
from oxplow.serve.engine_port import Command, EngineEvent, Started, decode_event, encode
from oxplow.serve.engine_settings import EngineSettings

__all__ = ["ProcessTransport"]

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_CALM_S = 60.0  # a child that lived so long starts over with the first pause
_LEAVE_S = 10.0
_SEND_AGAIN_S = 0.005


class ProcessTransport:
    """Runs the engine in a child process and restarts it when it dies."""

    restarts = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._context = zmq.asyncio.Context()
        self._plain = zmq.Context()
        self._commands: zmq.Socket[bytes] | None = None
        self._unsent: deque[bytes] = deque()
        self._child: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._is_closing = False
        self._has_started = False
        self._first_start: asyncio.Future[None] | None = None

    async def start(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Start the child and wait until it takes work.

        Raises ConfigError where the first child ends before that; it has said why on its standard
        error.
        """
        self._first_start = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(on_event, on_lost))
        await self._first_start

    def send(self, command: Command) -> None:
        """Send a command; dropped while no child lives."""
        if self._commands is not None:
            self._unsent.append(encode(command))
            if len(self._unsent) == 1:
                self._flush(self._commands)

    def _flush(self, commands: zmq.Socket[bytes]) -> None:
        """Send what waits. A child that has said that it started may not listen yet, and a send
        would wait for it: the event loop must not stand still, so it is tried again soon.
        """
        if commands is not self._commands:
            return  # that child has ended
        try:
            while self._unsent:
                commands.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            asyncio.get_running_loop().call_later(_SEND_AGAIN_S, self._flush, commands)

    async def close(self) -> None:
        """Give the child ten seconds to leave, then end it; one that still loads is ended now."""
        self._is_closing = True
        child = self._child
        if child is not None and child.returncode is None:
            if not self._has_started:
                child.kill()
            try:
                await asyncio.wait_for(child.wait(), _LEAVE_S)
            except TimeoutError:
                log.warning("the engine process did not leave; it is ended")
                child.kill()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._context.destroy(linger=0)
        self._plain.destroy(linger=0)

    async def _keep(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Run one child after the other."""
        pause = _FIRST_PAUSE_S
        first = self._first_start
        while True:
            began = time.monotonic()
            code = await self._run_child(on_event)
            if self._is_closing:
                return
            if first is not None and not first.done():
                first.set_exception(
                    ConfigError("the engine did not start", got=f"exit code {code}")
                )
                return
            on_lost(f"its process ended with code {code}")
            pause = _FIRST_PAUSE_S if time.monotonic() - began > _CALM_S else pause
            await asyncio.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def _run_child(self, on_event: Callable[[EngineEvent], None]) -> int:
        """Start a child, carry its events until it ends, and return its exit code."""
        folder = tempfile.mkdtemp(prefix="oxplow-")
        self._commands = self._plain.socket(zmq.PUSH)
        events = self._context.socket(zmq.PULL)
        for socket, name in ((self._commands, "commands"), (events, "events")):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{folder}/{name}")
        reader: asyncio.Task[None] | None = None
        try:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "oxplow.serve.link.child",
                folder,
                msgspec.json.encode(self._settings).decode(),
            )
            reader = asyncio.create_task(self._read(events, on_event))
            return await self._child.wait()
        finally:
            # Nothing here waits: a cancelled keeper must still leave nothing behind.
            if self._child is not None and self._child.returncode is None:
                self._child.kill()
            if reader is not None:
                reader.cancel()
            self._commands.close(linger=0)
            self._commands = None
            self._unsent.clear()
            events.close(linger=0)
            shutil.rmtree(folder, ignore_errors=True)

    async def _read(
        self, events: zmq.asyncio.Socket, on_event: Callable[[EngineEvent], None]
    ) -> None:
        while True:
            event = decode_event(await events.recv())
            on_event(event)
            first = self._first_start
            if isinstance(event, Started) and first is not None and not first.done():
                self._has_started = True
                first.set_result(None)
