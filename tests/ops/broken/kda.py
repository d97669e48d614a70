"""Broken KDA kernels: faults that field reports and the notes on linear attention list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from oxplow.ops.kernels.torch import kda, kda_chunk
from tests.ops.broken import Broken

Run = Callable[..., Any]


def _with(run: Run, **changes: Callable[[dict[str, Any]], Any]) -> Run:
    """Return `run` with some arguments replaced: each change sees all of them."""

    def broken(**args: Any) -> Any:
        return run(**{**args, **{name: change(args) for name, change in changes.items()}})

    return broken


def _all_ones(args: dict[str, Any]) -> Tensor:
    return torch.ones_like(args["has_state"])


def _last_slot_for_padding(run: Run, pool: str) -> Run:
    """Index the pool with -1: padding rows use the last slot; their output is cleared."""

    def broken(**args: Any) -> Tensor:
        slots = args["state_slots"] % len(args[pool])
        out = run(**{**args, "state_slots": slots})
        padding = args["state_slots"] < 0
        if "cu_seqlens" in args:
            padding = padding.repeat_interleave(args["cu_seqlens"].diff())
        out[padding] = 0
        return out

    return broken


# short convolution


def _across_borders(x: Tensor, weight: Tensor, **args: Any) -> Tensor:
    kda.short_conv(x, weight, **args)
    padded = pad(x.t(), (weight.shape[1] - 1, 0))
    return silu(torch.conv1d(padded[None], weight[:, None], groups=x.shape[1])[0].t())


def _only_new_inputs(
    window: Tensor, state_slots: Tensor, cu_seqlens: Tensor, **args: Any
) -> Tensor:
    y = kda.short_conv(window=window, state_slots=state_slots, cu_seqlens=cu_seqlens, **args)
    for slot, length in zip(state_slots.tolist(), cu_seqlens.diff().tolist(), strict=True):
        window[slot, :, : max(0, window.shape[2] - length)] = 0
    return y


def _keeps_activated(x: Tensor, window: Tensor, state_slots: Tensor, **args: Any) -> Tensor:
    y = kda.short_conv_decode(x=x, window=window, state_slots=state_slots, **args)
    window[state_slots, :, -1] = silu(x)
    return y


# decay gate


def _bound_clamps(f: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> Tensor:
    return kda.kda_gate(f, a_log, dt_bias, lower_bound=None).clamp_min(lower_bound)


def _bias_per_head(args: dict[str, Any]) -> Tensor:
    return args["dt_bias"][:, :1].expand_as(args["dt_bias"])


# gated delta rule


def _key_first(run: Run) -> Run:
    def broken(state: Tensor, **args: Any) -> Tensor:
        turned = state.transpose(2, 3).contiguous()
        o = run(state=turned, **args)
        state.copy_(turned.transpose(2, 3))
        return o

    return broken


def _norm_floor(name: str) -> Callable[[dict[str, Any]], Tensor]:
    """Divide by max(|x|, 1e-6), then undo the eps that the kernel adds to a norm of 1."""

    def change(args: dict[str, Any]) -> Tensor:
        x = args[name]
        return 1e4 * x / x.norm(dim=-1, keepdim=True).clamp_min(1e-6)

    return change


def _decays_twice(args: dict[str, Any]) -> Tensor:
    return 2 * args["g"]


def _reads_before_decay(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    correction = (v - (state * k.unsqueeze(-2)).sum(-1)) * beta.unsqueeze(-1)
    state.mul_(decay.unsqueeze(-2)).addcmul_(correction.unsqueeze(-1), k.unsqueeze(-2))
    return (state * q.unsqueeze(-2)).sum(-1)


def _output_before_write(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    before = state * decay.unsqueeze(-2)
    _STEP(state, q, k, v, decay, beta)
    return (before * q.unsqueeze(-2)).sum(-1)


_STEP = kda._step


def _stepping(step: Run) -> Run:
    """Return decode with another step inside."""

    def broken(**args: Any) -> Any:
        with patch.object(kda, "_step", step):
            return kda.kda_decode(**args)

    return broken


def _zero_times_slot(args: dict[str, Any]) -> Tensor:
    """Clear recycled slots by a product, which keeps their NaN."""
    args["state"][args["state_slots"]] *= args["has_state"][:, None, None, None]
    return torch.ones_like(args["has_state"])


def _one_sequence(args: dict[str, Any]) -> Tensor:
    """Let the first state run through all sequences; the others get tokens no more."""
    cu = args["cu_seqlens"].clone()
    cu[1:] = cu[-1]
    return cu


def _clears_empty(state: Tensor, state_slots: Tensor, cu_seqlens: Tensor, **args: Any) -> Tensor:
    o = kda.kda_prefill(state=state, state_slots=state_slots, cu_seqlens=cu_seqlens, **args)
    state[state_slots[cu_seqlens.diff() == 0]] = 0
    return o


def _pairs(reference: Callable[[Tensor], Tensor]) -> Run:
    """Return chunked prefill that factors decays at one reference row for each row."""

    def pairs(both: Tensor, decay: Tensor, rate: Tensor) -> kda_chunk._Pairs:
        sums = decay.log().cumsum(1)
        left = both * (sums - reference(sums))[:, :, None].exp()
        right = both[:, :, 1] * (reference(sums) - sums).exp()
        full = torch.einsum("bixd,bjd->bxij", left, right)
        lower = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool).tril()
        system = torch.where(lower.tril(-1), full[:, 1] * rate, 0)
        eye = torch.eye(len(lower)).expand_as(system)
        return kda_chunk._Pairs(
            scores=torch.where(lower, full[:, 0], 0),
            inverse=torch.linalg.solve_triangular(system + eye, eye, upper=False),
            since_start=sums.exp(),
            until_end=both[:, :, 1] * (sums[:, -1:] - sums).exp(),
        )

    def broken(**args: Any) -> Any:
        with patch.object(kda_chunk._Pairs, "of", pairs):
            return kda.kda_prefill(**args)

    return broken


BROKEN = (
    Broken(
        op="short_conv",
        fault="taps cross borders",
        run=_across_borders,
        case="loud_neighbour",
        tensor="y",
    ),
    Broken(
        op="short_conv",
        fault="forgets the window of a short sequence",
        run=_only_new_inputs,
        case="short_continuations",
        tensor="window",
    ),
    Broken(
        op="short_conv",
        fault="reads a recycled window",
        run=_with(kda.short_conv, has_state=_all_ones),
        case="stale_windows",
        tensor="y",
    ),
    Broken(
        op="short_conv",
        fault="padding writes the last slot",
        run=_last_slot_for_padding(kda.short_conv, "window"),
        case="padding_between",
        tensor="window",
    ),
    Broken(
        op="short_conv_decode",
        fault="padding writes the last slot",
        run=_last_slot_for_padding(kda.short_conv_decode, "window"),
        case="padding_rows",
        tensor="window",
    ),
    Broken(
        op="short_conv_decode",
        fault="keeps activated inputs",
        run=_keeps_activated,
        case="decode",
        tensor="window",
    ),
    Broken(
        op="short_conv_decode",
        fault="no SiLU on values",
        run=lambda **a: torch.where(
            torch.arange(a["x"].shape[1]) < a["x"].shape[1] // 3,
            (a["window"][a["state_slots"]] * a["weight"][:, :-1]).sum(2)
            + a["x"] * a["weight"][:, -1],
            kda.short_conv_decode(**a),
        ),
        case="decode",
        tensor="y",
    ),
    Broken(op="kda_gate", fault="bound clamps", run=_bound_clamps, case="extremes", tensor="g"),
    Broken(
        op="kda_gate",
        fault="rate not exponentiated",
        run=_with(kda.kda_gate, a_log=lambda a: a["a_log"].abs().log()),
        case="extremes",
        tensor="g",
    ),
    Broken(
        op="kda_gate",
        fault="bias for each head",
        run=_with(kda.kda_gate, dt_bias=_bias_per_head),
        case="bounded",
        tensor="g",
    ),
    Broken(
        op="kda_prefill",
        fault="key-first state",
        run=_key_first(kda.kda_prefill),
        case="square_state",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="beta rounded to bfloat16",
        run=_with(kda.kda_prefill, beta=lambda a: a["beta"].bfloat16().float()),
        case="one_prompt",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="norm with a maximum",
        run=_with(kda.kda_prefill, q=_norm_floor("q"), k=_norm_floor("k")),
        case="tiny_keys",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="a state runs through its neighbours",
        run=_with(kda.kda_prefill, cu_seqlens=_one_sequence),
        case="continued",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="zero times a recycled slot",
        run=_with(kda.kda_prefill, has_state=_zero_times_slot),
        case="stale_slots",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="padding writes the last slot",
        run=_last_slot_for_padding(kda.kda_prefill, "state"),
        case="padding_between",
        tensor="state",
    ),
    Broken(
        op="kda_prefill",
        fault="an empty sequence clears its slot",
        run=_clears_empty,
        case="packed_lengths",
        tensor="state",
    ),
    Broken(
        op="kda_prefill",
        fault="exp(-G) over a whole chunk",
        run=_pairs(lambda sums: torch.zeros_like(sums)),
        case="strong_decay",
        tensor="o",
    ),
    Broken(
        op="kda_prefill",
        fault="state rounded to bfloat16 between calls",
        run=lambda **a: (kda.kda_prefill(**a), a["state"].copy_(a["state"].bfloat16()))[0],
        case="weak_decay_long",
        tensor="state",
    ),
    Broken(
        op="kda_decode",
        fault="key-first state",
        run=_key_first(kda.kda_decode),
        case="square_state",
        tensor="o",
    ),
    Broken(
        op="kda_decode",
        fault="padding writes the last slot",
        run=_last_slot_for_padding(kda.kda_decode, "state"),
        case="padding_rows",
        tensor="state",
    ),
    Broken(
        op="kda_decode",
        fault="decays twice",
        run=_with(kda.kda_decode, g=_decays_twice),
        case="decode",
        tensor="o",
    ),
    Broken(
        op="kda_decode",
        fault="correction reads before the decay",
        run=_stepping(_reads_before_decay),
        case="decode",
        tensor="o",
    ),
    Broken(
        op="kda_decode",
        fault="output reads before the write",
        run=_stepping(_output_before_write),
        case="decode",
        tensor="o",
    ),
)
