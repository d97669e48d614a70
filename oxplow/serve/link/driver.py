"""The loop that turns an engine: commands in, steps, events out.

Owns the order of work between steps and the beat. Knows no socket and no HTTP; `emit` carries
events away and may be called from the driver's thread only.
Invariant: commands are taken between steps, so an abort waits for one step at most; `put` and
`beat` may be called from any thread.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from oxplow.errors import CapacityError, OxplowError, RequestError
from oxplow.serve.engine_port import (
    Abort,
    Accepted,
    Beat,
    Command,
    Core,
    Drain,
    EndChoice,
    EngineEvent,
    EngineStats,
    Refused,
    Started,
    Step,
    Work,
)

__all__ = ["Driver"]


class Driver:
    """Turns one engine until it is told to leave."""

    def __init__(self, core: Core, emit: Callable[[EngineEvent], None]) -> None:
        self._core, self._emit = core, emit
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_draining = False
        self._open: set[str] = set()
        self._stats = EngineStats()
        self._step_began = 0.0  # 0: no step is in progress
        self._predicted_s = 0.0
        self.is_done = False

    def put(self, command: Command) -> None:
        """Hand in a command."""
        self._inbox.put(command)

    def beat(self) -> Beat:
        """Tell how the loop stands at this moment."""
        began = self._step_began
        busy = time.monotonic() - began if began else 0.0
        return Beat(stats=self._stats, busy_s=busy, predicted_s=self._predicted_s)

    def run(self) -> None:
        """Take commands and step until drained; whatever the engine raises ends the loop."""
        self._emit(Started(info=self._core.info))
        while not (self._is_draining and not self._core.has_work and self._inbox.empty()):
            self._take_commands()
            if not self._core.has_work:
                continue
            self._predicted_s = self._core.predicted_s
            self._step_began = time.monotonic()
            deltas = tuple(self._core.step())
            self._step_began = 0.0
            self._stats = self._core.stats()
            if deltas:
                self._emit(Step(deltas=deltas))
        self.is_done = True

    def _take_commands(self) -> None:
        """Apply everything that waits; without work, wait for something."""
        is_idle = not self._core.has_work and not self._is_draining
        try:
            command = self._inbox.get(timeout=1.0) if is_idle else self._inbox.get_nowait()
            while True:
                self._apply(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            self._stats = self._core.stats()

    def _apply(self, command: Command) -> None:
        match command:
            case Work():
                self._add(command)
            case Abort():
                self._core.abort(command.request_id)
                self._open.discard(command.request_id)
            case EndChoice():
                self._core.end_choice(command.request_id, command.index)
            case Drain():
                self._is_draining = True
                if command.abort_running:
                    for request_id in sorted(self._open):
                        self._core.abort(request_id)
                    self._open.clear()

    def _add(self, work: Work) -> None:
        if self._is_draining:
            self._refuse(work, "capacity", CapacityError("the server is shutting down"))
            return
        try:
            self._core.add(work)
        except RequestError as error:
            self._refuse(work, "request", error, param=error.param, code=error.code)
        except CapacityError as error:
            self._refuse(work, "capacity", error)
        except OxplowError as error:
            self._refuse(work, "fault", error)
        else:
            self._open.add(work.request_id)
            self._emit(Accepted(request_id=work.request_id))

    def _refuse(
        self,
        work: Work,
        kind: str,
        error: OxplowError,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        refusal = Refused(
            request_id=work.request_id, kind=kind, message=str(error), param=param, code=code
        )
        self._emit(refusal)
