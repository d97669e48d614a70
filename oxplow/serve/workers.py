"""The processes that read requests: tokenising and pictures, outside the event loop.

Owns the pool, its two lanes and its repair. Knows no endpoint.
Invariant: a long prompt never stands before a short one, since each lane has its own process; a
process that dies costs one retry, never the server.
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
_T = TypeVar("_T")


class WorkerPool:
    """Two lanes of workers, for small and for large requests.

    `processes` False runs the jobs on threads of this process: for tests and small tools.
    """

    def __init__(self, settings: PrepareSettings, *, processes: bool = True) -> None:
        self._settings, self._processes = settings, processes
        self._lanes: dict[str, Executor] = {}

    async def start(self) -> None:
        """Start the workers and let them read the model's files. Raises what reading raises."""
        for lane in ("small", "large"):
            self._lanes[lane] = self._executor()
        await asyncio.gather(*(self._warm(lane) for lane in self._lanes))

    async def run(self, job: Callable[..., _T], *arguments: Any, num_bytes: int) -> _T:
        """Run a job with the settings before its arguments; raises what the job raises.

        A job whose worker died is tried once more. Raises CapacityError when that fails too, or
        when the job takes longer than five minutes.
        """
        lane = "large" if num_bytes >= _LARGE_BYTES else "small"
        for attempt in (1, 2):
            executor = self._lanes[lane]
            try:
                return await self._call(executor, job, *arguments)
            except BrokenProcessPool:
                log.warning("a worker of the %s lane died, attempt %s", lane, attempt)
                self._replace(lane, executor)
            except TimeoutError:
                self._replace(lane, executor)
                raise CapacityError("reading this request took too long") from None
        raise CapacityError("the worker that reads requests died twice on this one")

    def close(self) -> None:
        """End the workers."""
        for executor in self._lanes.values():
            _end(executor)
        self._lanes.clear()

    async def _warm(self, lane: str) -> None:
        await self._call(self._lanes[lane], warm_up)

    async def _call(self, executor: Executor, job: Callable[..., _T], *arguments: Any) -> _T:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(executor, job, self._settings, *arguments)
        return await asyncio.wait_for(future, _PATIENCE_S)

    def _replace(self, lane: str, broken: Executor) -> None:
        """Put a fresh executor in; of several requests that met the broken one, the first does."""
        if self._lanes.get(lane) is broken:
            self._lanes[lane] = self._executor()
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
