"""Broken dense kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from oxplow.contracts.dense import dequantise_blocks
from oxplow.feedback.gate import Reason
from tests.ops.broken import Broken


def _eps_outside(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + eps) * weight


def _in_place(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    x.copy_(y)
    return y


def _layer_norm_as_rms(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight + bias


def _two_moments(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


def _sample_variance(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


def _silu_gate(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps) * functional.silu(gate)


def _one_norm_for_all_heads(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    root = torch.rsqrt(x.square().mean((-1, -2), keepdim=True) + eps)
    return x * root * weight * gate.sigmoid()


def _rounded_activations(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x.bfloat16().float(), weight, bias)


def _forgotten_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight)


def _unwritten_last_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[0])
    y[:-1] = functional.linear(x[:-1], weight, bias)
    return y


def _divided_by_scale(x: Tensor, weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    return x @ dequantise_blocks(weight.float(), 1 / scale, block).t()


def _ragged_block_from_neighbour(x: Tensor, weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    whole = weight.shape[1] // block
    columns = (torch.arange(weight.shape[1]) // block).clamp_max(max(whole - 1, 0))
    rows = torch.arange(weight.shape[0]) // block
    return x @ (weight.float() * scale[rows][:, columns]).t()


def _flushed_subnormals(x: Tensor, weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    codes = weight.float()
    codes = torch.where(codes.abs() < 2.0**-6, torch.zeros_like(codes), codes)
    return x @ dequantise_blocks(codes, scale, block).t()


def _unclamped(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    return functional.silu(gate) * up


def _gate_clamped_below(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    bound = float("inf") if limit is None else limit
    return functional.silu(gate.clamp(-bound, bound)) * up.clamp(-bound, bound)


def _clamped_after_silu(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    bound = float("inf") if limit is None else limit
    return functional.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)


def _returns_its_input(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    bound = float("inf") if limit is None else limit
    up.copy_(functional.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound))
    return up


BROKEN = (
    Broken(op="rms_norm", fault="eps outside", run=_eps_outside, case="tiny_values", tensor="y"),
    Broken(
        op="rms_norm",
        fault="normalises in place",
        run=_in_place,
        case="decode",
        reason=Reason.UNTOUCHED,
        tensor="x",
    ),
    Broken(op="layer_norm", fault="RMSNorm", run=_layer_norm_as_rms, case="index_key", tensor="y"),
    Broken(op="layer_norm", fault="two moments", run=_two_moments, case="far_mean", tensor="y"),
    Broken(op="layer_norm", fault="n-1", run=_sample_variance, case="tiny_values", tensor="y"),
    Broken(op="gated_rms_norm", fault="silu gate", run=_silu_gate, case="decode", tensor="y"),
    Broken(
        op="gated_rms_norm",
        fault="one norm for all heads",
        run=_one_norm_for_all_heads,
        case="unlike_heads",
        tensor="y",
    ),
    Broken(
        op="linear",
        fault="activations in bfloat16",
        run=_rounded_activations,
        case="cancelling",
        tensor="y",
    ),
    Broken(op="linear", fault="no bias", run=_forgotten_bias, case="prefill_with_bias", tensor="y"),
    Broken(op="linear", fault="last row", run=_unwritten_last_row, case="decode", tensor="y"),
    Broken(
        op="linear_fp8",
        fault="scale taken for its inverse",
        run=_divided_by_scale,
        case="decode",
        tensor="y",
    ),
    Broken(
        op="linear_fp8",
        fault="ragged block scaled like its neighbour",
        run=_ragged_block_from_neighbour,
        case="ragged_blocks",
        tensor="y",
    ),
    Broken(
        op="linear_fp8",
        fault="subnormal codes flushed",
        run=_flushed_subnormals,
        case="every_code",
        tensor="y",
    ),
    Broken(op="swiglu", fault="no clamp", run=_unclamped, case="clamps_bind", tensor="y"),
    Broken(
        op="swiglu",
        fault="gate clamped below",
        run=_gate_clamped_below,
        case="deep_gate",
        tensor="y",
    ),
    Broken(
        op="swiglu",
        fault="clamp after silu",
        run=_clamped_after_silu,
        case="clamps_bind",
        tensor="y",
    ),
    Broken(
        op="swiglu",
        fault="result written over an input",
        run=_returns_its_input,
        case="decode",
        reason=Reason.ALIAS,
        tensor="y",
    ),
)
