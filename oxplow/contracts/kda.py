"""Contracts of the KDA ops: the decay gate and the gated delta rule over prompts and single steps.

Owns their meaning as slow, obvious references: one token of one sequence at a time, with the
key-first memory of the equations. Knows no kernel, no chunk and no model. Invariant: every
reference works in the dtype of its inputs, so float64 in gives the truth; the stored state is
V-first, `[slots, H, V, K]`, and only the references turn it. The family's convolution stands in
`contracts.short_conv`, the inputs in `contracts.kda_cases`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts import kda_cases as cases
from oxplow.contracts import short_conv
from oxplow.contracts.laws import UNIT_ROUNDOFF, Close
from oxplow.contracts.paging import spans
from oxplow.contracts.schema import Args, Constraint, Cost, OpContract, Role, tensor
from oxplow.contracts.slots import own_slots, ragged_rows, single_tokens

_L2_EPS = 1e-6
_U = UNIT_ROUNDOFF[torch.float32]


def kda_gate_reference(
    f: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None
) -> dict[str, Tensor]:
    """Compute the log decay head by head: the bound multiplies a sigmoid, it does not clamp."""
    g = torch.zeros_like(f)
    for h in range(f.shape[1]):
        raw, rate = f[:, h] + dt_bias[h], torch.exp(a_log[h])
        if lower_bound is None:
            g[:, h] = -rate * torch.logaddexp(raw, torch.zeros_like(raw))
        else:
            g[:, h] = lower_bound * torch.sigmoid(rate * raw)
    return {"g": g}


def kda_prefill_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    state_slots: Tensor,
    has_state: Tensor,
    cu_seqlens: Tensor,
    *,
    lower_bound: float | None,
) -> dict[str, Tensor]:
    """Walk token by token: forget, read, correct, write, then read with the query."""
    o = torch.zeros_like(v)
    for i, (start, end) in enumerate(spans(cu_seqlens)):
        slot = int(state_slots[i])
        if slot < 0 or start == end:
            continue
        memory = state[slot].transpose(1, 2).clone()  # [H, K, V]
        if not has_state[i]:
            memory = torch.zeros_like(memory)
        for t in range(start, end):
            key, query = _unit(k[t]), _unit(q[t]) * q.shape[-1] ** -0.5
            memory = memory * torch.exp(g[t])[:, :, None]
            read = torch.einsum("hk,hkv->hv", key, memory)
            correction = beta[t][:, None] * (v[t] - read)
            memory = memory + key[:, :, None] * correction[:, None, :]
            o[t] = torch.einsum("hk,hkv->hv", query, memory)
        state[slot] = memory.transpose(1, 2)
    return {"o": o, "state": state}


def kda_decode_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_slots: Tensor
) -> dict[str, Tensor]:
    """Take one step for every row: sequences of length 1 that continue."""
    ragged = single_tokens(len(q))
    return kda_prefill_reference(q, k, v, g, beta, state, state_slots, *ragged, lower_bound=None)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + _L2_EPS)


def _gate_magnitude(a: Mapping[str, Any]) -> Tensor:
    """Return |g| plus how far g moves when its argument moves by its own size.

    The last term keeps the bound above the smallest normal float32: what lies deeper may flush.
    """
    bias, rate, bound = a["dt_bias"].double(), a["a_log"].double().exp()[:, None], a["lower_bound"]
    raw, size = a["f"].double() + bias, a["f"].double().abs() + bias.abs()
    if bound is None:
        value, slope = rate * torch.logaddexp(raw, torch.zeros_like(raw)), rate * raw.sigmoid()
    else:
        value = -bound * torch.sigmoid(rate * raw)
        slope = value * torch.sigmoid(-rate * raw) * rate
    return value + slope * size + torch.finfo(torch.float32).tiny / _U


def _error_scales(a: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the scale of honest rounding of every element of o and state.

    A row of the state (one value channel) is a recurrence of its own, s <- A s + beta v k, whose
    map A never amplifies: |A| <= max_d exp g_d. A step rounds by the size of what it adds up,
    |s| + beta |v|, and the next ones pass that on: e <- hypot(max decay * e, |s| + beta |v|), in
    norms over K. An output adds the products of its own last sum to |q| e.
    """
    a = {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in a.items()
    }
    if "cu_seqlens" not in a:
        a["has_state"], a["cu_seqlens"] = single_tokens(len(a["q"]))
    scale_o, scale_state = torch.zeros_like(a["v"]), torch.zeros_like(a["state"])
    query, key, decay = _unit(a["q"]) * a["q"].shape[-1] ** -0.5, _unit(a["k"]), a["g"].exp()
    for i, (start, end) in enumerate(spans(a["cu_seqlens"])):
        slot = int(a["state_slots"][i])
        if slot < 0 or start == end:
            continue
        s = a["state"][slot] if a["has_state"][i] else torch.zeros_like(a["state"][slot])
        error = torch.zeros_like(s[..., 0])  # [H, V]
        for t in range(start, end):
            gain = a["beta"][t][:, None]
            s = s * decay[t][:, None]
            size = s.norm(dim=-1) + gain * a["v"][t].abs()
            read = (s * key[t][:, None]).sum(-1)
            s = s + (gain * (a["v"][t] - read))[..., None] * key[t][:, None]
            error = torch.hypot(decay[t].amax(-1)[:, None] * error, size)
            products = (query[t].abs()[:, None] * s.abs()).sum(-1)
            scale_o[t] = query[t].norm(dim=-1)[:, None] * error + products
        scale_state[slot] = error[..., None] * s.shape[-1] ** -0.5
    return {"o": scale_o, "state": scale_state}


def _cost(a: Args) -> Cost:
    tokens, heads, depth = a["q"].shape
    width, rows = a["v"].shape[-1], a["state_slots"].numel()
    moved = sum(a[n].nbytes for n in ("q", "k", "v", "g", "beta")) + a["v"].nbytes
    state_bytes = rows * heads * width * depth * a["state"].element_size()
    return Cost(
        bytes=moved + 2 * state_bytes,
        # for each state element: decay 1, read 2, write 2, output 2 (the chunked form does more);
        # norms, decay and correction for each key and value channel
        flops=tokens * heads * (7 * depth * width + 8 * depth + 2 * width),
    )


def _is_above(g: Tensor, bound: float | None) -> bool:
    # the gate rounds, so its last digit may stand below the floor
    return bound is None or bool((g >= bound * (1 + 4 * _U)).all())


_FORGETS = Constraint(
    "the log decay is finite and <= 0, beta lies in [0, 1]",
    lambda a: bool(
        (a["g"].isfinite() & (a["g"] <= 0)).all() and ((a["beta"] >= 0) & (a["beta"] <= 1)).all()
    ),
)


def _check(name: str) -> Close:
    """A sum runs over K products; what adds up over the tokens is part of the scale."""
    return Close(
        length=lambda a: a["k"].shape[-1],
        magnitude=lambda a: _error_scales(a)[name],
        calibrated=True,
    )


_CHECKS = {"o": _check("o"), "state": _check("state")}
_AXES = {
    "H": "heads",
    "K": "key size",
    "V": "value size",
    "N": "sequences",
    "slots": "pool entries",
}


def _recurrence_inputs(rows: str) -> dict[str, Any]:
    return {
        "q": tensor(Role.ACT, f"{rows} H K"),
        "k": tensor(Role.ACT, f"{rows} H K"),
        "v": tensor(Role.ACT, f"{rows} H V"),
        "g": tensor(Role.F32, f"{rows} H K"),
        "beta": tensor(Role.F32, f"{rows} H"),
        "state": tensor(Role.F32, "slots H V K"),
        "state_slots": tensor(Role.INT, "N"),
    }


KDA_GATE = OpContract(
    name="kda_gate",
    summary="Log decay of every key channel: lower_bound * sigmoid(exp(a_log) (f + dt_bias))",
    source="model.md 4; linear-attention.md 0 (3); the softplus gate: Kimi-Linear",
    axes={"T": "tokens", "H": "heads", "K": "key size"},
    inputs={
        "f": tensor(Role.ACT, "T H K"),
        "a_log": tensor(Role.F32, "H"),
        "dt_bias": tensor(Role.F32, "H K"),
    },
    scalars={"lower_bound": "factor of the sigmoid; None: -exp(a_log) * softplus(f + dt_bias)"},
    outputs={"g": tensor(Role.F32, "T H K")},
    constraints=(
        Constraint(
            "lower_bound is None or negative",
            lambda a: a["lower_bound"] is None or a["lower_bound"] < 0,
        ),
    ),
    reference=kda_gate_reference,
    cases=cases.KDA_GATE,
    # four rounded steps: sum, rate, exponential, division
    checks={"g": Close(length=lambda a: 4, magnitude=_gate_magnitude)},
    cost=lambda a: Cost(
        bytes=sum(a[n].nbytes for n in ("f", "a_log", "dt_bias")) + 4 * a["f"].numel(),
        flops=6 * a["f"].numel(),
    ),
)

KDA_PREFILL = OpContract(
    name="kda_prefill",
    summary="Gated delta rule over ragged sequences, from and into a V-first state pool",
    source="linear-attention.md 2 and 3; model.md 4",
    axes={**_AXES, "T": "tokens of all sequences"},
    inputs={
        **_recurrence_inputs("T"),
        "has_state": tensor(Role.BOOL, "N"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    scalars={"lower_bound": "floor of g, from which a kernel may choose its evaluation, or None"},
    outputs={"o": tensor(Role.ACT, "T H V")},
    mutates=("state",),
    constraints=(
        ragged_rows("q"),
        own_slots("state"),
        _FORGETS,
        Constraint("g >= lower_bound", lambda a: _is_above(a["g"], a["lower_bound"])),
    ),
    reference=kda_prefill_reference,
    cases=cases.KDA_PREFILL,
    checks=_CHECKS,
    cost=_cost,
)

KDA_DECODE = OpContract(
    name="kda_decode",
    summary="One step of the gated delta rule for every row, in place in a V-first state pool",
    source="linear-attention.md 2 and 4.3; model.md 4",
    axes=_AXES,
    inputs=_recurrence_inputs("N"),
    outputs={"o": tensor(Role.ACT, "N H V")},
    mutates=("state",),
    constraints=(own_slots("state"), _FORGETS),
    reference=kda_decode_reference,
    cases=cases.KDA_DECODE,
    checks=_CHECKS,
    cost=_cost,
)

CONTRACTS = (*short_conv.CONTRACTS, KDA_GATE, KDA_PREFILL, KDA_DECODE)
