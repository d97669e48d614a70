"""An engine on a thread of this process.

Owns the thread. Knows no socket; events cross to the event loop in one call each.
Invariant: when the thread ends other than by draining, the front is told.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from oxplow.errors import OxplowError
from oxplow.serve.engine_port import Command, Core, EngineEvent
from oxplow.serve.link.driver import Driver

__all__ = ["ThreadTransport"]

_BEAT_S = 0.2  # costs a call, not a message
_T = TypeVar("_T")


class ThreadTransport:
    """Runs the engine that `build` makes on its own thread; it is not restarted when it fails."""

    restarts = False

    def __init__(self, build: Callable[[], Core]) -> None:
        self._build = build
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        self._beats: asyncio.Task[None] | None = None

    async def start(
        self, on_event: Callable[[EngineEvent], None], on_lost: Callable[[str], None]
    ) -> None:
        """Build the engine, then turn it. Raises what `build` raises."""
        loop = asyncio.get_running_loop()
        core = await loop.run_in_executor(None, self._build)
        driver = Driver(core, lambda event: _cross(loop, on_event, event))
        self._driver = driver

        def turn() -> None:
            try:
                driver.run()
            finally:  # the fault itself goes on, to the thread's own report
                if not driver.is_done:
                    error = sys.exception()
                    told = str(error) if isinstance(error, OxplowError) else repr(error)
                    _cross(loop, on_lost, told)

        self._thread = threading.Thread(target=turn, name="engine", daemon=True)
        self._thread.start()
        self._beats = asyncio.create_task(self._beat(driver, on_event))

    def send(self, command: Command) -> None:
        """Hand a command in."""
        if self._driver is not None:
            self._driver.put(command)

    async def close(self) -> None:
        """Wait up to ten seconds for the thread."""
        if self._beats is not None:
            self._beats.cancel()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    async def _beat(self, driver: Driver, on_event: Callable[[EngineEvent], None]) -> None:
        while self._thread is not None and self._thread.is_alive():
            on_event(driver.beat())
            await asyncio.sleep(_BEAT_S)


def _cross(loop: asyncio.AbstractEventLoop, call: Callable[[_T], None], value: _T) -> None:
    """Call on the event loop's thread; a loop that has closed needs no news."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, value)
