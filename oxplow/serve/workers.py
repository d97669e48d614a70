"""The processes that read requests: tokenising and pictures, outside the event loop.

Owns the pool, its two lanes and its repair. Knows no endpoint.
Invariant: a long prompt never stands before a short one, since each lane has its own process; a
process that dies costs one retry, never the server; a job whose client has left ends, with its
process where it must, and takes no other job along.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from oxplow.errors import CapacityError
from oxplow.serve.prepare.jobs import warm_up
from oxplow.serve.prepare.prepared import PrepareSettings

__all__ = ["WorkerPool"]

log = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 10  # bodies from here on go to the large lane
_PATIENCE_S = 300.0
_LEAVE_S = 2.0  # a job whose client left may end by itself; a new process costs about as much
_T = TypeVar("_T")


class _Lane:
    """One worker and the turn to use it: jobs come one by one, so only one dies with a worker."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.turn = asyncio.Lock()


class WorkerPool:
    """Two lanes of workers, for small and for large requests.

    `processes` False runs the jobs on threads of this process: for tests and small tools.
    """

    def __init__(self, settings: PrepareSettings, *, processes: bool = True) -> None:
        self._settings, self._processes = settings, processes
        self._lanes: dict[str, _Lane] = {}
        self._endings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the workers and let them read the model's files. Raises what reading raises."""
        for name in ("small", "large"):
            self._lanes[name] = _Lane(self._executor())
        await asyncio.gather(*(self._warm(lane) for lane in self._lanes.values()))

    async def run(self, job: Callable[..., _T], *arguments: Any, num_bytes: int) -> _T:
        """Run a job with the settings before its arguments; raises what the job raises.

        A job whose worker died is tried once more. Raises CapacityError when that fails too, or
        when the job takes longer than five minutes. Cancelled, it leaves the queue, or ends within
        two seconds.
        """
        name = "large" if num_bytes >= _LARGE_BYTES else "small"
        lane = self._lanes[name]
        await lane.turn.acquire()
        is_abandoned = False
        try:
            for attempt in (1, 2):
                try:
                    work = self._submit(lane, job, *arguments)
                    return await asyncio.wait_for(asyncio.shield(work), _PATIENCE_S)
                except BrokenProcessPool:
                    log.warning("a worker of the %s lane died, attempt %s", name, attempt)
                    self._replace(lane)
                except TimeoutError:
                    self._replace(lane)
                    raise CapacityError("reading this request took too long") from None
                except asyncio.CancelledError:
                    is_abandoned = True
                    self._end_job(lane, work)
                    raise
        finally:
            if not is_abandoned:
                lane.turn.release()
        raise CapacityError("the worker that reads requests died twice on this one")

    def close(self) -> None:
        """End the workers."""
        for ending in self._endings:
            ending.cancel()
        for lane in self._lanes.values():
            _end(lane.executor)
        self._lanes.clear()

    async def _warm(self, lane: _Lane) -> None:
        await asyncio.wait_for(self._submit(lane, warm_up), _PATIENCE_S)

    def _submit(self, lane: _Lane, job: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(lane.executor, job, self._settings, *arguments)

    def _end_job(self, lane: _Lane, work: asyncio.Future[Any]) -> None:
        """Let an unwanted job come to its end, or end its process; then the next one has its turn.

        A thread cannot be ended: there the next job waits.
        """

        async def end() -> None:
            try:
                await asyncio.wait({work}, timeout=_LEAVE_S if self._processes else None)
                if work.done():
                    work.exception()
                else:
                    log.info("a worker reads for a client that has left; it is replaced")
                    self._replace(lane)
                    await asyncio.gather(work, return_exceptions=True)
            finally:
                lane.turn.release()

        ending = asyncio.create_task(end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def _replace(self, lane: _Lane) -> None:
        """Put a fresh worker in."""
        broken, lane.executor = lane.executor, self._executor()
        _end(broken)

    def _executor(self) -> Executor:
        if not self._processes:
            return ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare")
        return ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(os.getpid(),),
        )


def _end(executor: Executor) -> None:
    """Stop an executor without waiting for a job that may never end."""
    processes = list((getattr(executor, "_processes", None) or {}).values())
    executor.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _begin_worker(parent: int) -> None:
    """Leave interrupts to the front, and follow it when it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), name="follow-parent", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
