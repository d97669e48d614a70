"""A candidate kernel in a process of its own: its start, its calls, its deadlines, its end.

Owns the child process, the frames between it and the judge, and what is seen of it from outside
(processor time, child processes). Knows no truth and no verdict beyond hung, died and busy.
Invariant: nothing that comes from the child is unpickled or executed; candidate code is imported in
the child only; every wait has a deadline; a child never outlives its `Isolated`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Args, OpContract
from oxplow.errors import ConfigError
from oxplow.feedback.calibrate import settle
from oxplow.feedback.gate import Caller, Reason, Stop
from oxplow.ops.kernels import builtin_kernels

__all__ = ["Isolated", "load_candidate"]

_QUIET_S = 0.02
_QUIET_CPU_S = 0.01  # of processor time after an answer: far more than going back to sleep takes
_QUIET_LIMIT_S = 2.0
_START_S = 60.0

Header = dict[str, Any]


class Isolated:
    """One candidate's process, from the judge's side; close it, or use it in a `with`."""

    def __init__(self, op: str, spec: str, *, deadline_s: float = 30.0) -> None:
        """Start the child and let it load `spec`. Raises Stop where that fails."""
        self.deadline_s = deadline_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        mine, theirs = context.Pipe()
        self._connection = mine
        self._process = context.Process(target=_child, args=(theirs, op, spec), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive(_START_S)
        except Stop:
            self.close()
            raise

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child and wait for its end."""
        self._connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def call(self, args: Args, how: str) -> dict[str, Tensor]:
        """Run one guarded call, as `gate.Caller.call` does; return outputs and mutated tensors."""
        scalars, tensors = _split(args)
        self._send({"do": "call", "how": how, "scalars": scalars}, tensors)
        _, outputs = self._receive(self.deadline_s)
        return outputs

    def keep(self, number: int, args: Args) -> None:
        """Give the child one set of inputs for a later timed call."""
        scalars, tensors = _split(args)
        self._send({"do": "keep", "number": number, "scalars": scalars}, tensors)
        self._receive(self.deadline_s)

    def timed(self, number: int) -> float:
        """Let the child run one kept set, without guards; return seconds by the judge's clock."""
        message = _pack({"do": "time", "number": number}, {})
        began = time.perf_counter()
        self._send_bytes(message)
        self._receive(self.deadline_s)
        return time.perf_counter() - began

    def ping(self) -> float:
        """Return the seconds of a message and its answer with nothing in between."""
        message = _pack({"do": "ping"}, {})
        began = time.perf_counter()
        self._send_bytes(message)
        self._receive(self.deadline_s)
        return time.perf_counter() - began

    def fetch(self, number: int) -> dict[str, Tensor]:
        """Return what the timed call on a kept set left, as it is now. Raises Stop for its form."""
        self._send({"do": "fetch", "number": number}, {})
        _, outputs = self._receive(self.deadline_s)
        return outputs

    def check_quiet(self) -> bool:
        """Raise Stop if the child works on although it has answered; False where nobody can see.

        Waits until all its threads sleep: on a busy machine they may be starved, not idle.
        """
        before = self._processor_s()
        if before is None:
            return False
        limit = time.monotonic() + _QUIET_LIMIT_S
        while time.monotonic() < limit:
            time.sleep(_QUIET_S)
            after = self._processor_s()
            if after is None:
                raise self._dead()
            if after - before > _QUIET_CPU_S:
                spent = f"{(after - before) * 1e3:.1f} ms of processor time"
                raise Stop(Reason.BUSY, "", f"used {spent} after its answer")
            if self._sleeps():
                break
        if self._has_children():
            raise Stop(Reason.BUSY, "", "started another process that still lives")
        return True

    def _sleeps(self) -> bool:
        try:
            tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
            return all((t / "stat").read_text().rpartition(")")[2].split()[0] == "S" for t in tasks)
        except (OSError, IndexError):
            return True

    def _processor_s(self) -> float | None:
        tasks = Path(f"/proc/{self._process.pid}/task")
        try:
            told = [(t / "schedstat").read_text().split()[0] for t in tasks.iterdir()]
        except (OSError, IndexError):
            return None
        return sum(map(int, told)) / 1e9

    def _has_children(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task")
        try:
            return any((t / "children").read_text().strip() for t in tasks.iterdir())
        except OSError:
            return False

    def _send(self, header: Header, tensors: Mapping[str, Tensor]) -> None:
        self._send_bytes(_pack(header, tensors))

    def _send_bytes(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._dead() from error

    def _receive(self, limit_s: float) -> tuple[Header, dict[str, Tensor]]:
        try:
            if not self._connection.poll(limit_s):
                self._process.kill()
                raise Stop(Reason.HUNG, "", f"no answer within {limit_s:.1f} s")
            message = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._dead() from error
        try:
            header, tensors = _unpack(message)
            stopped = header.get("stop")
            reason = None if stopped is None else Reason(stopped)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise Stop(Reason.TAMPERED, "", f"its answer is no answer: {error}") from error
        if reason is not None:
            raise Stop(reason, str(header.get("tensor", "")), str(header.get("detail", "")))
        return header, tensors

    def _dead(self) -> Stop:
        self._process.join(5.0)
        code = self._process.exitcode
        told = f"exit code {code}"
        if code is not None and code < 0:
            told = f"signal {signal.Signals(-code).name}"
        return Stop(Reason.DIED, "", f"its process ended: {told}")


def load_candidate(spec: str, op: str) -> Callable[..., Any]:
    """Return the callable of `kernel:NAME`, `FILE.py:FUNCTION` or `MODULE:FUNCTION`.

    Imports the candidate's code: for its own process only. Raises ConfigError.
    """
    place, _, name = spec.rpartition(":")
    if place == "kernel":
        for kernel in builtin_kernels():
            if kernel.op == op and kernel.name == name:
                return kernel.run
        raise ConfigError("no such kernel", got=f"{op}/{name}", wanted=_kernel_names(op))
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location("candidate", place)
        if found is None or found.loader is None:
            raise ConfigError("this file is no module", got=place)
        module = importlib.util.module_from_spec(found)
        sys.modules["candidate"] = module
        found.loader.exec_module(module)
    elif place:
        module = importlib.import_module(place)
    else:
        raise ConfigError(
            "a candidate needs a place and a name", got=spec, wanted="FILE.py:FUNCTION"
        )
    run = getattr(module, name, None)
    if not callable(run):
        raise ConfigError("the candidate has no such function", got=spec)
    return cast(Callable[..., Any], run)


def _kernel_names(op: str) -> str:
    return ", ".join(k.name for k in builtin_kernels() if k.op == op)


# The frames: a length, a JSON header, then safetensors.


def _split(args: Args) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = {n: v for n, v in args.items() if isinstance(v, Tensor)}
    return {n: v for n, v in args.items() if n not in tensors}, tensors


def _pack(header: Header, tensors: Mapping[str, Tensor]) -> bytes:
    head = json.dumps(header).encode()
    # safetensors refuses tensors that share memory: every one travels as its own copy
    body = save({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()})
    return len(head).to_bytes(4, "big") + head + (body if tensors else b"")


def _unpack(message: bytes) -> tuple[Header, dict[str, Tensor]]:
    length = int.from_bytes(message[:4], "big")
    header = json.loads(message[4 : 4 + length])
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    body = message[4 + length :]
    return header, load(body) if body else {}


# The child's side.


def _child(connection: Connection, op: str, spec: str) -> None:
    """Serve one judge until it hangs up; whatever goes wrong is an answer, never a traceback."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    torch.set_num_threads(1)
    contract = CONTRACTS[op]
    try:
        served = _Served(contract, load_candidate(spec, op))
        connection.send_bytes(_pack({}, {}))
    except (Exception, SystemExit) as error:  # the candidate's module may raise anything
        connection.send_bytes(_stop_frame(Reason.RAISED, "", f"{type(error).__name__}: {error}"))
        return
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            answer = served.answer(*_unpack(message))
        except Stop as stop:
            answer = _stop_frame(stop.reason, stop.tensor, stop.detail)
        except (Exception, SystemExit) as error:  # a timed call may raise anything
            answer = _stop_frame(Reason.RAISED, "", f"{type(error).__name__}: {error}")
        connection.send_bytes(answer)


def _stop_frame(reason: Reason, tensor: str, detail: str) -> bytes:
    return _pack({"stop": reason.value, "tensor": tensor, "detail": detail[:2000]}, {})


class _Served:
    """The candidate in its own process: guarded calls, and plain ones for the clock."""

    def __init__(self, contract: OpContract, run: Callable[..., Any]) -> None:
        self._contract, self._run = contract, run
        self._caller = Caller(contract, run, None)
        self._kept: dict[int, Args] = {}
        self._results: dict[int, object] = {}

    def answer(self, header: Header, tensors: dict[str, Tensor]) -> bytes:
        match header["do"]:
            case "call":
                args = {**header["scalars"], **tensors}
                return _pack({}, self._caller.call(args, header["how"]))
            case "keep":
                self._kept[header["number"]] = {**header["scalars"], **tensors}
            case "time":
                number = header["number"]
                args = self._kept[number]
                self._results[number] = self._run(**args)
                settle(next(v.device for v in args.values() if isinstance(v, Tensor)))
            case "fetch":
                number = header["number"]
                args = self._kept.pop(number)
                return _pack({}, self._caller.collect(args, self._results.pop(number)))
        return _pack({}, {})
