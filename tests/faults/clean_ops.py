"""Clean controls in kernels: other orders, widths, tiles and layouts inside the tolerance law.

Owns the controls whose results may differ in their last bits, or not at all. Knows the kernels'
signatures, no probe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from oxplow.ops.kernels.torch import index, kda, kda_chunk, mla, moe
from tests.faults.record import Control
from tests.faults.swap import Make, Run, kernels_of, value

_log = logging.getLogger(__name__)
_ONE_PERCENT = 1.01
_BLOCKED = 2


def _wide(run: Run) -> Run:
    """Compute in float64, give back what was asked for."""

    def kernel(*args: Any, **named: Any) -> Any:
        given = (*args, *named.values())
        narrow = next(a.dtype for a in given if isinstance(a, Tensor) and a.is_floating_point())

        def widened(x: Any) -> Any:
            return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

        out = run(*map(widened, args), **{k: widened(v) for k, v in named.items()})
        return out.to(narrow) if isinstance(out, Tensor) else tuple(o.to(narrow) for o in out)

    return kernel


def _copied(run: Run) -> Run:
    """Read a copy of the first input, which no op here writes."""

    def kernel(*args: Any, **named: Any) -> Any:
        if args:
            return run(args[0].clone(), *args[1:], **named)
        first = next(iter(named))
        return run(**{**named, first: named[first].clone()})

    return kernel


def _named(run: Run) -> Run:
    """Pass everything through another function, as a refactoring does."""

    def inner(*args: Any, **named: Any) -> Any:
        return run(*args, **named)

    def kernel(*args: Any, **named: Any) -> Any:
        return inner(*args, **named)

    return kernel


def _logged(run: Run) -> Run:
    def kernel(*args: Any, **named: Any) -> Any:
        _log.debug("called with %d arguments", len(args))
        return run(*args, **named)

    return kernel


def _one_percent(run: Run) -> Run:
    def kernel(*args: Any, **named: Any) -> Any:
        began = time.thread_time()
        out = run(*args, **named)
        until = began + _ONE_PERCENT * (time.thread_time() - began)
        while time.thread_time() < until:
            pass
        return out

    return kernel


def _summed_backwards(run: Run) -> Run:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return run(x.flip(-1), weight.flip(-1), bias)

    return linear


def _in_two_parts(run: Run) -> Run:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half = weight.shape[0] // _BLOCKED
        biases = (None, None) if bias is None else (bias[:half], bias[half:])
        if half == 0:
            return run(x, weight, bias)
        parts = (run(x, w, b) for w, b in zip((weight[:half], weight[half:]), biases, strict=True))
        return torch.cat(list(parts), -1)

    return linear


def _half_where_it_is_exact(run: Run) -> Run:
    """Read bfloat16 and sum in float32 where x and the weight are bfloat16 numbers already."""

    def router(x: Tensor, weight: Tensor, *args: Any, **named: Any) -> Any:
        if torch.equal(x, x.bfloat16().to(x.dtype)):
            x = x.bfloat16().to(x.dtype)
        if torch.equal(weight, weight.bfloat16().to(weight.dtype)):
            weight = weight.bfloat16().to(weight.dtype)
        return run(x, weight, *args, **named)

    return router


def _rows_turned(run: Run) -> Run:
    """Compute the rows from last to first."""

    def experts(
        x: Tensor, expert_ids: Tensor, expert_weights: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        named |= {"expert_ids": expert_ids.flip(0), "expert_weights": expert_weights.flip(0)}
        if not rest:
            return run(x=x.flip(0), **named).flip(0)
        ids, weights = named.pop("expert_ids"), named.pop("expert_weights")
        return run(x.flip(0), ids, weights, *rest, **named).flip(0)

    return experts


def _stepwise(run: Run) -> Run:
    def kda_prefill(*args: Any, **named: Any) -> Tensor:
        return kda.kda_prefill_stepwise(*args, **named)

    return kda_prefill


def _heads_apart(run: Run) -> Run:
    """Turn the images of a call one by one: only calls whose length is known are cut."""

    def vision_attention(
        q: Tensor, k: Tensor, v: Tensor, coords: Tensor, cu_seqlens: Tensor, *, theta: float
    ) -> Tensor:
        parts = [
            run(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], coords, cu_seqlens, theta=theta)
            for h in range(q.shape[1])
        ]
        return torch.cat(parts, 1)

    return vision_attention


def _swap(make: Make, *ops: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: kernels_of(*ops, make=make)


CONTROLS = (
    Control(id="C01", title="linear sums backwards", plant=_swap(_summed_backwards, "linear")),
    Control(id="C02", title="linear in two parts", plant=_swap(_in_two_parts, "linear")),
    Control(id="C03", title="linear in float64", plant=_swap(_wide, "linear")),
    Control(id="C04", title="rms_norm in float64", plant=_swap(_wide, "rms_norm")),
    Control(id="C05", title="layer_norm in float64", plant=_swap(_wide, "layer_norm")),
    Control(id="C06", title="gated_rms_norm in float64", plant=_swap(_wide, "gated_rms_norm")),
    Control(id="C07", title="swiglu in float64", plant=_swap(_wide, "swiglu")),
    Control(id="C08", title="mhc_expand refactored", plant=_swap(_named, "mhc_expand")),
    Control(id="C09", title="mhc_collapse refactored", plant=_swap(_named, "mhc_collapse")),
    Control(
        id="C10",
        title="router reads bfloat16 where that is exact, sums in float32",
        plant=_swap(_half_where_it_is_exact, "router"),
    ),
    Control(id="C11", title="router copies its rows", plant=_swap(_copied, "router")),
    Control(id="C12", title="experts from last row to first", plant=_swap(_rows_turned, "experts")),
    Control(
        id="C13",
        title="experts in smaller panels",
        plant=lambda: value(moe, "EXPERT_ELEMENTS", 1 << 12),
    ),
    Control(id="C14", title="KDA in chunks of 32", plant=lambda: value(kda_chunk, "CHUNK", 32)),
    Control(id="C15", title="KDA in chunks of 16", plant=lambda: value(kda_chunk, "CHUNK", 16)),
    Control(id="C16", title="KDA step by step", plant=_swap(_stepwise, "kda_prefill")),
    Control(id="C17", title="KDA takes chunks earlier", plant=lambda: value(kda, "_FEW_STEPS", 4)),
    Control(id="C18", title="kda_decode refactored", plant=_swap(_named, "kda_decode")),
    Control(id="C19", title="kda_gate copies its rows", plant=_swap(_copied, "kda_gate")),
    Control(id="C20", title="short_conv refactored", plant=_swap(_named, "short_conv")),
    Control(
        id="C21",
        title="convolution in smaller tiles",
        plant=lambda: value(kda, "_CONV_TILE", 1 << 10),
    ),
    Control(
        id="C22",
        title="attention in smaller tiles",
        plant=lambda: value(mla, "GATHER_ELEMENTS", 1 << 12),
    ),
    Control(
        id="C23",
        title="index scores in smaller tiles",
        plant=lambda: value(index, "SCORE_ELEMENTS", 1 << 11),
    ),
    Control(id="C24", title="dense_mla copies its queries", plant=_swap(_copied, "dense_mla")),
    Control(
        id="C25", title="sparse_mla_decode refactored", plant=_swap(_named, "sparse_mla_decode")
    ),
    Control(id="C26", title="latent_write copies its rows", plant=_swap(_copied, "latent_write")),
    Control(id="C27", title="vision heads apart", plant=_swap(_heads_apart, "vision_attention")),
    Control(id="C28", title="vision_merge refactored", plant=_swap(_named, "vision_merge")),
    Control(id="C29", title="sample copies its logits", plant=_swap(_copied, "sample")),
    Control(id="C30", title="every router call is logged", plant=_swap(_logged, "router")),
    Control(
        id="C31",
        title="experts 1% slower",
        plant=_swap(_one_percent, "experts"),
        symptom="throughput",
    ),
    Control(
        id="C32",
        title="kda_prefill 1% slower",
        plant=_swap(_one_percent, "kda_prefill"),
        symptom="ttft",
    ),
    Control(
        id="C33",
        title="every kda_decode call is logged",
        plant=_swap(_logged, "kda_decode"),
        symptom="itl",
    ),
)
