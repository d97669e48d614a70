"""Experts for few rows on a CPU: routing in plain numbers, picked weights side by side.

Owns the forms for few rows; `moe` does the rest. Knows the contracts' names and shapes, no model.
Invariant: weights of experts that nobody picked are never read.
"""

from __future__ import annotations

from functools import partial
from math import exp, isfinite

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from oxplow.contracts.router import SUM_FLOOR
from oxplow.ops.kernels.torch.host import on_host
from oxplow.ops.kernels.torch.moe import experts, router
from oxplow.ops.table import Facts, Kernel, Support

_FEW_SCORES = 64  # scores that are ranked in plain numbers: 4 rows of 16
_COPIED = 1 << 20
"""Weights copied side by side at most: 4 MiB. Larger experts gain nothing from the copy."""


def router_host(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """Rank a few scores on the host; `router` does more, and takes numbers that are not finite."""
    general = partial(
        router, x, weight, bias, top_k=top_k, scaling=scaling, renormalise=renormalise
    )
    T, E = x.shape[0], weight.shape[0]
    if not 0 < T * E <= _FEW_SCORES:
        return general()
    logits = functional.linear(x.float(), weight.float())
    offsets = bias.tolist()
    ids, shares = [], []
    for row in logits.tolist():
        try:
            scores = [1 / (1 + exp(-z)) for z in row]
        except OverflowError:  # a score under 1e-308
            return general()
        if not isfinite(sum(scores)):
            return general()
        biased = [s + b for s, b in zip(scores, offsets, strict=True)]
        picked = sorted(range(E), key=biased.__getitem__, reverse=True)[:top_k]  # a stable order
        factor = scaling
        if renormalise:
            factor /= sum(scores[e] for e in picked) + SUM_FLOOR
        ids.append(picked)
        shares.append([scores[e] * factor for e in picked])
    return (
        torch.from_numpy(np.array(ids, dtype=np.int64)),
        torch.from_numpy(np.array(shares, dtype=np.float32)),
    )


def experts_host(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float | None,
) -> Tensor:
    """Copy one row's picked experts side by side: two products in all; `experts` does more.

    Memory: the picked weights, at most _COPIED.
    """
    T, k = expert_ids.shape
    _, _, inner, width = gate_up.shape
    is_plain = x.dtype is torch.float32 and gate_up.dtype is torch.float32
    if T != 1 or not is_plain or 3 * k * inner * width > _COPIED or min(expert_ids.tolist()[0]) < 0:
        return experts(x, expert_ids, expert_weights, gate_up, down, limit=limit)
    picked = expert_ids[0]
    first = gate_up.index_select(0, picked).view(k * 2 * inner, width)
    gate, up = functional.linear(x, first).view(k, 2, inner).unbind(1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = functional.silu(gate).mul_(up).mul_(expert_weights.view(k, 1))
    second = down.transpose(1, 2).index_select(0, picked)  # no copy on the way where laid as rows
    return torch.mm(hidden.view(1, k * inner), second.view(k * inner, width))


def rows_of_inner(down: Tensor) -> Tensor:
    """Lay down [E, D, I] on a CPU as [E, I, D]: picked experts then stand below one another."""
    if down.device.type != "cpu" or down.dtype is not torch.float32:
        return down
    return down.transpose(1, 2).contiguous().transpose(1, 2)


def on_host_in_float32(facts: Facts) -> Support:
    """Accept float32 on the CPU; half precision has kernels of its own there."""
    if facts.dtype is not torch.float32:
        return Support(ok=False, reason=f"only for float32, not {facts.dtype}")
    return on_host(facts)


KERNELS = (
    Kernel(op="router", name="torch-host", run=router_host, supports=on_host, rank=1),
    Kernel(
        op="experts",
        name="torch-host",
        run=experts_host,
        supports=on_host_in_float32,
        rank=1,
        layouts={"down": rows_of_inner},
    ),
)
