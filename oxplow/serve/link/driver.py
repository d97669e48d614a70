"""The loop that turns an engine: commands in, steps, events out.

Owns the order of work between steps, the threads of session files, and the beat. Knows no socket
and no HTTP; `emit` carries events away and may be called from the driver's thread only.
Invariant: commands are taken between steps, so an abort waits for one step at most; `put` and
`beat` may be called from any thread; every session command is answered once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from oxplow.errors import CapacityError, OxplowError, RequestError, TransferError
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
    LoadSession,
    Refused,
    SaveSession,
    SessionDone,
    SessionJob,
    Started,
    Step,
    Work,
)

__all__ = ["Driver"]


_JOB_WAIT_S = 0.05  # between looks at a job that the end waits for


@dataclass(frozen=True, slots=True)
class _Worked:
    """A session job whose slow part has ended, with what it raised."""

    job_id: str
    job: SessionJob
    error: OxplowError | None


class Driver:
    """Turns one engine until it is told to leave."""

    def __init__(self, core: Core, emit: Callable[[EngineEvent], None]) -> None:
        self._core, self._emit = core, emit
        self._inbox: queue.SimpleQueue[Command | _Worked] = queue.SimpleQueue()
        self._is_draining = False
        self._open: set[str] = set()
        self._num_jobs = 0
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
        while not self._may_leave():
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

    def _may_leave(self) -> bool:
        is_done = not (self._core.has_work or self._num_jobs)
        return self._is_draining and is_done and self._inbox.empty()

    def _take_commands(self) -> None:
        """Apply everything that waits; without work, wait for something."""
        is_idle = not self._core.has_work
        wait_s = _JOB_WAIT_S if self._is_draining else 1.0
        try:
            command = self._inbox.get(timeout=wait_s) if is_idle else self._inbox.get_nowait()
            while True:
                self._apply(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            self._stats = self._core.stats()

    def _apply(self, command: Command | _Worked) -> None:
        match command:
            case Work():
                self._add(command)
            case Abort():
                self._core.abort(command.request_id)
                self._open.discard(command.request_id)
            case EndChoice():
                self._core.end_choice(command.request_id, command.index)
            case SaveSession() | LoadSession():
                self._begin_job(command)
            case _Worked():
                self._finish_job(command)
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

    def _begin_job(self, command: SaveSession | LoadSession) -> None:
        """Start a session job; its slow part runs beside the steps."""
        try:
            job = self._core.session_job(command)
        except OxplowError as error:
            self._emit(_failed(command.job_id, error))
            return
        self._num_jobs += 1

        def work() -> None:
            failure: OxplowError | None = TransferError("the session's thread ended early")
            try:
                job.work()
                failure = None
            except OxplowError as error:
                failure = error
            finally:
                self._inbox.put(_Worked(command.job_id, job, failure))

        threading.Thread(target=work, name="session", daemon=True).start()

    def _finish_job(self, worked: _Worked) -> None:
        self._num_jobs -= 1
        if worked.error is not None:
            self._emit(_failed(worked.job_id, worked.error))
            return
        try:
            self._emit(worked.job.finish())
        except OxplowError as error:
            self._emit(_failed(worked.job_id, error))

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


def _failed(job_id: str, error: OxplowError) -> SessionDone:
    kind = "capacity" if isinstance(error, CapacityError) else "transfer"
    return SessionDone(job_id=job_id, kind=kind, failure=str(error))
