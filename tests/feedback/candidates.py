"""Candidates for the isolated gate, loaded in their own process: cheats, faults and honest ones.

Each is a kernel for the contract `linear`: x [T, K], weight [N, K], bias [N] or None.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_KEPT: dict[Any, Tensor] = {}


def honest(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("tk,nk->tn", x, weight)
    return y if bias is None else y + bias


def in_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.empty(x.shape[0], weight.shape[0])
    for a in range(0, weight.shape[0], 64):
        torch.mm(x, weight[a : a + 64].t(), out=y[:, a : a + 64])
    return y if bias is None else y.add_(bias)


# The eleven.


def zeros(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.zeros(x.shape[0], weight.shape[0])


def uniform(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = functional.linear(x, weight, bias)
    return torch.full_like(y, float(y.mean()) if y.numel() else 0.0)


def pointer_keyed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    key = (x.data_ptr(), tuple(x.shape), weight.data_ptr())
    if key not in _KEPT:
        _KEPT[key] = functional.linear(x, weight, bias)
    return _KEPT[key].clone()


def background_thread(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.empty(x.shape[0], weight.shape[0])

    def later() -> None:
        time.sleep(0.001)
        y.copy_(functional.linear(x, weight, bias))

    threading.Thread(target=later, daemon=True).start()
    return y


def lazy_subclass(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    class Lazy(Tensor):
        pass

    return functional.linear(x, weight, bias).as_subclass(Lazy)


def stale_buffer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0])


def silent_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x.bfloat16(), weight.bfloat16()).float() + (
        0 if bias is None else bias
    )


def static_buffer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = functional.linear(x, weight, bias)
    kept = _KEPT.setdefault(tuple(y.shape), torch.empty_like(y))
    return kept.copy_(y)


def one_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    known = {(3, 128, 96), (37, 160, 72), (1, 67, 33), (5, 40, 1), (9, 1, 7), (0, 64, 24)}
    known |= {(4097, 8, 5), (2, 2100, 600), (4, 256, 24)}
    y = functional.linear(x, weight, bias)
    if (*x.shape, weight.shape[0]) not in known:
        y[..., -1] = 0
    return y


def input_mutation(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = functional.linear(x, weight, bias)
    x.mul_(0.5)
    return y


def clock_patch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    time.perf_counter = lambda: 0.0  # type: ignore[assignment]
    return functional.linear(x, weight, bias)


# What only a process of its own survives, or only a view from outside sees.


def hangs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    while True:
        time.sleep(1)


def dies(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return x


def leaves(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    os._exit(0)


def raises(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise SystemExit("done")


def works_on(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def spin() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass

    threading.Thread(target=spin, daemon=True).start()
    return functional.linear(x, weight, bias)


def forks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _KEPT["child"] = subprocess.Popen(["sleep", "5"])  # type: ignore[assignment]
    return functional.linear(x, weight, bias)


def answers_for_the_harness(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute when inputs are handed over, so that the timed call only finds the result."""
    from oxplow.feedback import isolate

    if not getattr(isolate._Served, "patched", False):
        plain = isolate._Served.answer

        def answer(self: Any, header: Any, tensors: Any) -> bytes:
            if header["do"] == "time":
                return isolate._pack({}, {})
            made = plain(self, header, tensors)
            if header["do"] == "keep":
                number = header["number"]
                self._results[number] = functional.linear(**_named(self._kept[number]))
            return made

        isolate._Served.answer = answer  # type: ignore[method-assign]
        isolate._Served.patched = True  # type: ignore[attr-defined]
    return functional.linear(x, weight, bias)


def _named(args: dict[str, Any]) -> dict[str, Any]:
    return {"input": args["x"], "weight": args["weight"], "bias": args["bias"]}


def sends_rubbish(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from multiprocessing.connection import Connection

    for thing in gc.get_objects():
        if isinstance(thing, Connection):
            thing.send_bytes(b"\x00\x00\x00\x02[]")
    return x


def looks_for_the_truth(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Answer with any other float64 matrix of the right size that lies about in this process."""
    wanted = (x.shape[0], weight.shape[0])
    for thing in gc.get_objects():
        if type(thing) is Tensor and tuple(thing.shape) == wanted and thing.dtype == torch.float64:
            return thing.float()
    frame: Any = sys._getframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Tensor) and value.dtype == torch.float64:
                return value.float()
        frame = frame.f_back
    return torch.zeros(wanted)
