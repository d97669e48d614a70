"""Portable mixture-of-experts kernels: router, and experts as grouped products over sorted pairs.

Owns the fast forms; `moe_invariant` holds the deterministic ones. Knows the contracts, no model.
Invariant: a (token, slot) pair with a negative expert id reaches no expert, and whatever stands in
its weight or its row stays out of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from oxplow.ops.kernels.torch.dense import slow_half_cpu, swiglu
from oxplow.ops.kernels.torch.fp8 import dequantise
from oxplow.ops.kernels.torch.invariant import row_invariance
from oxplow.ops.kernels.torch.moe_invariant import (
    experts_fp8_invariant,
    experts_invariant,
    router_invariant,
)
from oxplow.ops.kernels.torch.routing import weigh
from oxplow.ops.table import Kernel

EXPERT_ELEMENTS = 1 << 21
"""Weights widened at a time: 8 MiB in float32; one expert's gate and up if they are larger."""


def router(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """Score in float32, sort stably, weigh by the unbiased scores.

    The caller keeps reduced float32 products (TF32) off, as torch does by default.
    """
    scores = (x.float() @ weight.float().t()).sigmoid_()
    # topk does not say which of equal scores it takes; a stable sort does
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True)[1][:, :top_k]
    return weigh(scores, ids.contiguous(), scaling, renormalise)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float | None,
) -> Tensor:
    """Run one grouped product per weight, all experts at once; sums in float32.

    Memory: T k rows of x, of 2 I and of D values. Weights narrower than x go through
    `experts_wide`.
    """
    if x.dtype != gate_up.dtype:
        return experts_wide(x, expert_ids, expert_weights, gate_up, down, limit=limit)
    num_experts, _, inner, _ = gate_up.shape
    absent = expert_ids < 0
    pairs, order = expert_ids.masked_fill(absent, num_experts).flatten().sort()
    every = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(pairs, every, right=True, out_int32=True)
    rows = x.index_select(0, order // expert_ids.shape[1])
    hidden = _grouped(rows, gate_up.flatten(1, 2), ends)
    hidden = swiglu(hidden[:, :inner], hidden[:, inner:], limit=limit)
    return _combine(_grouped(hidden, down, ends), order, absent, expert_weights, x.dtype)


def experts_wide(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float | None,
) -> Tensor:
    """Widen the picked experts to float32, at most EXPERT_ELEMENTS weights at a time."""
    return _picked_experts(
        _Call(x, expert_ids, expert_weights, limit, tuple(gate_up.shape)),
        lambda picked: gate_up.index_select(0, picked).float(),
        lambda picked: down.index_select(0, picked).float(),
    )


def experts_fp8(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    limit: float | None,
    block: int,
) -> Tensor:
    """Widen the picked experts' codes to float32, at most EXPERT_ELEMENTS at a time."""
    return _picked_experts(
        _Call(x, expert_ids, expert_weights, limit, tuple(gate_up.shape)),
        lambda picked: widen_codes(gate_up, gate_up_scale, block, picked),
        lambda picked: widen_codes(down, down_scale, block, picked),
    )


def widen_codes(codes: Tensor, scale: Tensor, block: int, picked: Tensor) -> Tensor:
    """Return the float32 weights of the experts `picked` [G]; codes [E, ...] stay one byte."""
    some = codes.view(torch.uint8).index_select(0, picked).view(codes.dtype)
    return dequantise(some, scale.index_select(0, picked), block)


@dataclass(frozen=True, slots=True)
class _Call:
    x: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    limit: float | None
    gate_up_shape: tuple[int, ...]  # [E, 2, I, D]


def _picked_experts(
    call: _Call, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
) -> Tensor:
    """Run the experts that `call` picks; `gate_up` and `down` widen those with given ids [G]."""
    x, expert_ids = call.x, call.expert_ids
    num_experts, _, inner, width = call.gate_up_shape
    num_groups = min(expert_ids.numel(), num_experts)  # no more can be picked
    if num_groups == 0:
        return torch.zeros_like(x)
    absent = expert_ids < 0
    pairs, order = expert_ids.masked_fill(absent, num_experts).flatten().sort()
    picked, ends = _group(pairs, num_experts, num_groups)
    rows = x.index_select(0, order // expert_ids.shape[1]).float()

    def run(groups: slice, part: Tensor, part_ends: Tensor) -> Tensor:
        chosen = picked[groups]
        hidden = _grouped(part, gate_up(chosen).flatten(1, 2), part_ends)
        hidden = swiglu(hidden[:, :inner], hidden[:, inner:], limit=call.limit)
        return _grouped(hidden, down(chosen), part_ends)

    height = max(1, EXPERT_ELEMENTS // (2 * inner * width))
    if height >= num_groups:
        out = run(slice(0, num_groups), rows, ends)
    else:
        out = rows.new_zeros(rows.shape[0], width)
        # which rows belong to a panel of experts is data: the one wait for the device here
        bounds = [0, *ends.tolist()]
        for start in range(0, num_groups, height):
            stop = min(start + height, num_groups)
            first, last = bounds[start], bounds[stop]
            if first < last:
                out[first:last] = run(
                    slice(start, stop), rows[first:last], ends[start:stop] - first
                )
    return _combine(out, order, absent, call.expert_weights, x.dtype)


def _group(pairs: Tensor, num_experts: int, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return the distinct experts of sorted `pairs` [P] and where each one's rows end.

    Pads carry the id `num_experts`; unused entries name expert 0 and own no rows.
    """
    new = torch.ones_like(pairs, dtype=torch.bool)
    torch.ne(pairs[1:], pairs[:-1], out=new[1:])
    group = new.cumsum(0) - 1  # pads may be one group more than there is room for: the last entry
    picked = pairs.new_zeros(num_groups + 1).scatter_(0, group, pairs)
    rows = (pairs < num_experts).to(torch.int32)
    counts = rows.new_zeros(num_groups + 1).scatter_add_(0, group, rows)[:num_groups]
    return (picked % num_experts)[:num_groups], counts.cumsum(0, dtype=torch.int32)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [P, K] sorted by group with weights [G, N, K]; rows past ends[-1]: garbage."""
    grain = 16 // rows.element_size()
    missing = -rows.shape[1] % grain
    if missing:  # grouped_mm wants rows on 16-byte borders; only odd test sizes pay this copy
        rows, weights = functional.pad(rows, (0, missing)), functional.pad(weights, (0, missing))
    elif weights.data_ptr() % 16 or any(step % grain for step in weights.stride() if step != 1):
        weights = weights.contiguous()  # a slice between the borders pays it too
    return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _combine(
    out: Tensor, order: Tensor, absent: Tensor, expert_weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Bring rows [P, D] back to token order, weigh and add the slots of each token in float32."""
    back = out.index_select(0, order.argsort()).view(*absent.shape, out.shape[1])
    shares = (back * expert_weights[..., None]).masked_fill_(absent[..., None], 0.0)
    return shares.sum(1).to(dtype)


KERNELS = (
    Kernel(op="router", name="torch", run=router),
    Kernel(
        op="router",
        name="torch-invariant",
        run=router_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="experts", name="torch", run=experts),
    Kernel(op="experts", name="torch-wide", run=experts_wide, supports=slow_half_cpu, rank=1),
    Kernel(
        op="experts",
        name="torch-invariant",
        run=experts_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="experts_fp8", name="torch", run=experts_fp8),
    Kernel(
        op="experts_fp8",
        name="torch-invariant",
        run=experts_fp8_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
)
