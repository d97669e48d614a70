"""Broken mixture-of-experts kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from oxplow.contracts.dense import dequantise_blocks
from oxplow.feedback.gate import Reason
from tests.ops.broken import Broken


def _route(
    scores: Tensor, biased: Tensor, top_k: int, scaling: float, floor: float = 1e-20
) -> tuple[Tensor, Tensor]:
    ids = torch.sort(biased, dim=-1, descending=True, stable=True)[1][:, :top_k].contiguous()
    picked = scores.gather(-1, ids)
    return ids, scaling * picked / (picked.sum(-1, keepdim=True) + floor)


def _weights_from_biased_scores(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    biased = (x @ weight.t()).sigmoid() + bias
    return _route(biased, biased, top_k, scaling)


def _softmax_scores(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = (x @ weight.t()).softmax(-1)
    return _route(scores, scores + bias, top_k, scaling)


def _half_precision_logits(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = (x @ weight.t()).bfloat16().float().sigmoid()
    return _route(scores, scores + bias, top_k, scaling)


def _highest_index_wins(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = (x @ weight.t()).sigmoid().flip(-1)
    ids, weights = _route(scores, scores + bias.flip(-1), top_k, scaling)
    return weight.shape[0] - 1 - ids, weights


def _rising_order(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = (x @ weight.t()).sigmoid()
    ids, weights = _route(scores, scores + bias, top_k, scaling)
    return ids.flip(-1), weights.flip(-1)


def _no_floor(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    scores = (x @ weight.t()).sigmoid()
    return _route(scores, scores + bias, top_k, scaling, floor=0.0)


def _loop(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float | None,
) -> Tensor:
    """Compute correctly, pair by pair; the faults below change one thing each."""
    y = torch.zeros_like(x)
    bound = float("inf") if limit is None else limit
    for token, slot in (expert_ids >= 0).nonzero().tolist():
        expert = int(expert_ids[token, slot])
        gate, up = gate_up[expert, 0] @ x[token], gate_up[expert, 1] @ x[token]
        hidden = functional.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
        y[token] += expert_weights[token, slot] * (down[expert] @ hidden)
    return y


def _swapped_gate_and_up(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    return _loop(x, expert_ids, expert_weights, gate_up.flip(1), down, limit)


def _padding_wraps_to_the_last_expert(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    ids = expert_ids % gate_up.shape[0]
    return _loop(x, ids, expert_weights, gate_up, down, limit)


def _no_clamp(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    return _loop(x, expert_ids, expert_weights, gate_up, down, None)


def _dense_times_zero(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    everyone = torch.arange(gate_up.shape[0]).expand(x.shape[0], -1)
    shares = torch.zeros(x.shape[0], gate_up.shape[0]).scatter_(1, expert_ids, expert_weights)
    return _loop(x, everyone, shares, gate_up, down, limit)


def _weights_by_sorted_place(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    order = expert_ids.argsort(-1)  # sorts the ids but forgets to take the weights along
    return _loop(x, expert_ids.gather(-1, order), expert_weights, gate_up, down, limit)


def _hidden_in_bfloat16(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    return _loop(x.bfloat16().float(), expert_ids, expert_weights, gate_up, down, limit)


def _sorts_the_ids_in_place(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor, *,
    limit: float | None,
) -> Tensor:  # fmt: skip
    y = _loop(x, expert_ids, expert_weights, gate_up, down, limit)
    expert_ids.copy_(expert_ids.sort(-1)[0])
    return y


def _gate_scale_for_up(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor,
    down: Tensor, down_scale: Tensor, *, limit: float | None, block: int,
) -> Tensor:  # fmt: skip
    scale = gate_up_scale[:, :1].expand_as(gate_up_scale)
    wide = dequantise_blocks(gate_up.float(), scale, block)
    wide_down = dequantise_blocks(down.float(), down_scale, block)
    return _loop(x, expert_ids, expert_weights, wide, wide_down, limit)


def _first_expert_scales_all(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor,
    down: Tensor, down_scale: Tensor, *, limit: float | None, block: int,
) -> Tensor:  # fmt: skip
    wide = dequantise_blocks(gate_up.float(), gate_up_scale, block)
    wide_down = dequantise_blocks(down.float(), down_scale[:1].expand_as(down_scale), block)
    return _loop(x, expert_ids, expert_weights, wide, wide_down, limit)


BROKEN = (
    Broken(
        op="router",
        fault="weights from biased scores",
        run=_weights_from_biased_scores,
        case="bias_decides",
        tensor="expert_weights",
    ),
    Broken(
        op="router", fault="softmax", run=_softmax_scores, case="many_experts", tensor="expert_ids"
    ),
    Broken(
        op="router",
        fault="bfloat16 logits",
        run=_half_precision_logits,
        case="near_ties",
        tensor="expert_ids",
    ),
    Broken(
        op="router",
        fault="highest index wins ties",
        run=_highest_index_wins,
        case="exact_ties",
        tensor="expert_ids",
    ),
    Broken(op="router", fault="rising", run=_rising_order, case="nano", tensor="expert_ids"),
    Broken(
        op="router",
        fault="no floor under the sum",
        run=_no_floor,
        case="dead_rows",
        tensor="expert_weights",
    ),
    Broken(
        op="experts",
        fault="gate and up swapped",
        run=_swapped_gate_and_up,
        case="nano_decode",
        tensor="y",
    ),
    Broken(
        op="experts",
        fault="padding wraps to the last expert",
        run=_padding_wraps_to_the_last_expert,
        case="padding",
        tensor="y",
    ),
    Broken(op="experts", fault="no clamp", run=_no_clamp, case="clamps_bind", tensor="y"),
    Broken(
        op="experts",
        fault="dense products times zero",
        run=_dense_times_zero,
        case="dead_experts",
        tensor="y",
    ),
    Broken(
        op="experts",
        fault="ids sorted without their weights",
        run=_weights_by_sorted_place,
        case="nano_decode",
        tensor="y",
    ),
    Broken(
        op="experts",
        fault="activations in bfloat16",
        run=_hidden_in_bfloat16,
        case="nano_decode",
        tensor="y",
    ),
    Broken(
        op="experts",
        fault="ids sorted in place",
        run=_sorts_the_ids_in_place,
        case="nano_decode",
        reason=Reason.UNTOUCHED,
        tensor="expert_ids",
    ),
    Broken(
        op="experts_fp8",
        fault="gate scale used for up",
        run=_gate_scale_for_up,
        case="decode",
        tensor="y",
    ),
    Broken(
        op="experts_fp8",
        fault="first expert's scale used for all",
        run=_first_expert_scales_all,
        case="unlike_scales",
        tensor="y",
    ),
)
