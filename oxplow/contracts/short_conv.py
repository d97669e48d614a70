"""Contracts of the short convolution: over ragged sequences, and one step for every row.

Owns the reference (one token of one sequence at a time), the cases and the law's scale. Knows no
kernel.
Invariant: the window holds raw inputs, oldest first, before SiLU and in the activation dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Check, Close, Exact
from oxplow.contracts.paging import ragged, spans
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor
from oxplow.contracts.slots import (
    PACKED,
    deal_slots,
    fill_pool,
    mark_states,
    own_slots,
    ragged_rows,
    single_tokens,
)


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
) -> dict[str, Tensor]:
    """Slide over one sequence after another: y_t = silu(sum_j weight[:, j] u_{t-(W-1)+j})."""
    sums = _sums(x, weight, window, state_slots, has_state, cu_seqlens)
    return {"y": sums * torch.sigmoid(sums), "window": window}


def short_conv_decode_reference(
    x: Tensor, weight: Tensor, window: Tensor, state_slots: Tensor
) -> dict[str, Tensor]:
    """Take one step of the same convolution for every row: sequences of length 1 that continue."""
    return short_conv_reference(x, weight, window, state_slots, *single_tokens(len(x)))


def _sums(
    x: Tensor,
    weight: Tensor,
    window: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Return the sums before SiLU (zeros for padding) and leave the new windows in `window`."""
    sums = torch.zeros_like(x)
    for i, (start, end) in enumerate(spans(cu_seqlens)):
        slot = int(state_slots[i])
        if slot < 0 or start == end:
            continue
        history = window[slot].clone() if has_state[i] else torch.zeros_like(window[slot])
        for t in range(start, end):
            taps = torch.cat([history, x[t, :, None]], dim=1)  # [C, W], oldest first
            sums[t] = (weight * taps).sum(1)
            history = taps[:, 1:]
        window[slot] = history
    return sums


def _magnitude(a: Mapping[str, Any]) -> Tensor:
    """|weight| conv |x|, the dot bound of the sum before SiLU, whose slope is at most 1.1."""
    size = {n: v.double().abs() if v.is_floating_point() else v for n, v in a.items()}
    if "cu_seqlens" not in size:
        size["has_state"], size["cu_seqlens"] = single_tokens(len(size["x"]))
    return 1.1 * _sums(**size)


def _cost(a: Args) -> Cost:
    x, weight = a["x"], a["weight"]
    window_bytes = a["state_slots"].numel() * x.shape[1] * (weight.shape[1] - 1) * x.element_size()
    return Cost(
        bytes=2 * x.nbytes + weight.nbytes + 2 * window_bytes,
        # a tap is a product and a sum; SiLU an exponential, a sum, a division and a product
        flops=x.numel() * (2 * weight.shape[1] + 4),
    )


def _prompts(
    g: torch.Generator,
    *,
    lengths: Sequence[int],
    fresh: Sequence[int] = (),
    padding: Sequence[int] = (),
    sizes: tuple[int, int] = (40, 4),
    loud: int = -1,
) -> Args:
    """Draw a call for sequences of `lengths`; `loud` names one with thousandfold inputs."""
    (channels, taps), cu = sizes, ragged(lengths)
    slots, kept = deal_slots(len(lengths), g, padding), mark_states(len(lengths), fresh)
    x = torch.randn(sum(lengths), channels, generator=g)
    if loud >= 0:
        x[cu[loud] : cu[loud + 1]] *= 1000
    return {
        "x": x,
        "weight": torch.randn(channels, taps, generator=g) * taps**-0.5,
        "window": fill_pool((channels, taps - 1), slots, kept, g),
        "state_slots": slots,
        "has_state": kept,
        "cu_seqlens": cu,
    }


def _rows(
    g: torch.Generator,
    *,
    rows: int,
    padding: Sequence[int] = (),
    sizes: tuple[int, int] = (40, 4),
    scale: float = 1.0,
) -> Args:
    """Draw a decode call."""
    args = _prompts(g, lengths=(1,) * rows, padding=padding, sizes=sizes)
    args = {n: v for n, v in args.items() if n not in ("has_state", "cu_seqlens")}
    return {**args, "x": args["x"] * scale, "window": args["window"] * scale}


_TAPS = Constraint(
    "the window keeps W - 1 inputs, W >= 2",
    lambda a: 1 <= a["window"].shape[2] == a["weight"].shape[1] - 1,
)
_CHECKS: Mapping[str, Check] = {
    "y": Close(length=lambda a: a["weight"].shape[1], magnitude=_magnitude),
    "window": Exact(),
}
_AXES = {"C": "channels", "W": "taps", "N": "sequences", "slots": "entries of the pool"}
_EDGE, _EXCITE = CaseKind.EDGE, CaseKind.EXCITATION

SHORT_CONV = OpContract(
    name="short_conv",
    summary="Depthwise causal convolution over ragged sequences, then SiLU; keeps W - 1 raw inputs",
    source="model.md 4; linear-attention.md 0 and 11 (10)",
    axes={**_AXES, "T": "tokens of all sequences"},
    inputs={
        "x": tensor(Role.ACT, "T C"),
        "weight": tensor(Role.WEIGHT, "C W"),
        "window": tensor(Role.ACT, "slots C W-1"),
        "state_slots": tensor(Role.INT, "N"),
        "has_state": tensor(Role.BOOL, "N"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    outputs={"y": tensor(Role.ACT, "T C")},
    mutates=("window",),
    constraints=(_TAPS, ragged_rows("x"), own_slots("window")),
    reference=short_conv_reference,
    cases=(
        Case("one_prompt", CaseKind.ORDINARY, partial(_prompts, lengths=(37,), fresh=(0,))),
        Case("continued", CaseKind.ORDINARY, partial(_prompts, lengths=(150, 21, 70), fresh=(1,))),
        Case("packed_lengths", _EDGE, partial(_prompts, lengths=PACKED, fresh=(1, 4, 6, 7))),
        Case("two_taps_odd_channels", _EDGE, partial(_prompts, lengths=(5, 1), sizes=(37, 2))),
        Case("no_tokens", _EDGE, partial(_prompts, lengths=(0, 0), fresh=(0,))),
        Case("no_sequences", _EDGE, partial(_prompts, lengths=())),
        Case("padding_only", _EDGE, partial(_prompts, lengths=(3, 2), padding=(0, 1))),
        Case(
            "padding_between",
            _EXCITE,
            partial(_prompts, lengths=(4, 6, 9), padding=(1,)),
            note="slot -1 with tokens: a write through index -1 lands in the last slot",
        ),
        Case(
            "loud_neighbour",
            _EXCITE,
            partial(_prompts, lengths=(9, 5, 8), fresh=(2,), loud=1),
            note="taps that cross a sequence border read a thousandfold neighbour",
        ),
        Case(
            "short_continuations",
            _EXCITE,
            partial(_prompts, lengths=(1, 2, 1, 2)),
            note="sequences shorter than the window: the older inputs must stay in it",
        ),
        Case(
            "stale_windows",
            _EXCITE,
            partial(_prompts, lengths=(2, 1, 5), fresh=(0, 1, 2)),
            note="recycled slots hold NaN: has_state False reads zeros, no product with them",
        ),
    ),
    checks=_CHECKS,
    cost=_cost,
)

SHORT_CONV_DECODE = OpContract(
    name="short_conv_decode",
    summary="One step of the short convolution for every row",
    source="model.md 4; linear-attention.md 4.3",
    axes=_AXES,
    inputs={
        "x": tensor(Role.ACT, "N C"),
        "weight": tensor(Role.WEIGHT, "C W"),
        "window": tensor(Role.ACT, "slots C W-1"),
        "state_slots": tensor(Role.INT, "N"),
    },
    outputs={"y": tensor(Role.ACT, "N C")},
    mutates=("window",),
    constraints=(_TAPS, own_slots("window")),
    reference=short_conv_decode_reference,
    cases=(
        Case("decode", CaseKind.ORDINARY, partial(_rows, rows=5)),
        Case("one_row_odd_channels", _EDGE, partial(_rows, rows=1, sizes=(67, 3))),
        Case("no_rows", _EDGE, partial(_rows, rows=0)),
        Case("padding_only", _EDGE, partial(_rows, rows=3, padding=(0, 1, 2))),
        Case(
            "padding_rows",
            _EXCITE,
            partial(_rows, rows=6, padding=(0, 3, 5)),
            note="a write through index -1 lands in the last slot; slot 0 is no stand-in either",
        ),
        Case(
            "saturated",
            _EXCITE,
            partial(_rows, rows=4, scale=60.0),
            note="sums far on both sides of SiLU: an infinite exponential must not become NaN",
        ),
    ),
    checks=_CHECKS,
    cost=_cost,
)

CONTRACTS = (SHORT_CONV, SHORT_CONV_DECODE)
