"""Kimi Delta Attention: a fixed-size state per request instead of a growing cache.

Owns the KDA mixer and its two components (state, window). Knows no residual and no scheduler.
Invariant: decode rows and prefill rows are two op calls over one set of projections, and rows of
different requests meet in no other way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.cache.spec import Component, Per
from oxplow.model.caches import LayerCaches
from oxplow.model.layers import JoinedLinear, at_least_fp32, take_linear
from oxplow.model.mixer import MixerOptions, Observe
from oxplow.model.spec import TextSpec
from oxplow.model.step import Rows, StepInput
from oxplow.model.weights import Checkpoint
from oxplow.ops.table import OpTable


class KdaMixer:
    """Kimi Delta Attention: short convolution, gated delta rule, gated norm."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        layer: int,
        text: TextSpec,
        options: MixerOptions,
    ) -> None:
        kda, hidden = text.kda, text.hidden
        width = kda.num_heads * kda.head_dim
        self._ops, self._kda, self._layer, self._options = ops, kda, layer, options
        self._width = width
        self._project = JoinedLinear(
            ops,
            [
                *(source.matrix(f"{prefix}.{p}_proj.weight", width, hidden) for p in "qkv"),
                source.matrix(f"{prefix}.f_a_proj.weight", kda.gate_rank, hidden),
                source.matrix(f"{prefix}.g_a_proj.weight", kda.gate_rank, hidden),
                source.matrix(f"{prefix}.b_proj.weight", kda.num_heads, hidden),
            ],
            sizes=[3 * width, kda.gate_rank, kda.gate_rank, kda.num_heads],
        )
        taps = [
            source.vector(f"{prefix}.{p}_conv1d.weight", width, 1, kda.conv_width) for p in "qkv"
        ]
        self._taps = torch.cat(taps).squeeze(1)  # [3 * width, conv_width]
        self._decay = take_linear(ops, source, f"{prefix}.f_b_proj", width, kda.gate_rank)
        self._gate = take_linear(ops, source, f"{prefix}.g_b_proj", width, kda.gate_rank)
        log_shape = (1, 1, kda.num_heads, 1) if kda.lower_bound is None else (kda.num_heads,)
        self._a_log = source.vector(f"{prefix}.A_log", *log_shape, fp32=True).reshape(-1)
        self._dt_bias = source.vector(f"{prefix}.dt_bias", width, fp32=True).view(
            kda.num_heads, kda.head_dim
        )
        self._norm = source.vector(f"{prefix}.o_norm.weight", kda.head_dim)
        self._norm_eps = text.norm_eps
        self._out = take_linear(ops, source, f"{prefix}.o_proj", hidden, width)

    def components(self) -> tuple[Component, ...]:
        """State [H, V, K] in fp32, and the window of raw conv inputs [3, H*d, width-1] (q, k, v
        by the first axis).
        """
        kda = self._kda
        state = (
            "float64" if self._options.dtype == "float64" else "float32"
        )  # never narrower: model.md 8
        return (
            Component(
                layer=self._layer, name="state", per=Per.SLOT, dtype=state, shard_axis=0,
                shape=(kda.num_heads, kda.head_dim, kda.head_dim),
            ),
            Component(
                layer=self._layer, name="window", per=Per.SLOT, dtype=self._options.dtype,
                shard_axis=1, shape=(3, self._width, kda.conv_width - 1),
            ),
        )  # fmt: skip

    def __call__(
        self, x: Tensor, step: StepInput, caches: LayerCaches, observe: Observe | None
    ) -> Tensor:
        """Mix decode rows with the recurrent op and prefill rows with the chunked one."""
        kda = self._kda
        raw, low_decay, low_gate, beta = self._project(x)
        decay = self._decay(low_decay).view(-1, kda.num_heads, kda.head_dim)
        g = self._ops.kda_gate(decay, self._a_log, self._dt_bias, lower_bound=kda.lower_bound)
        # Spelled out: the library sigmoid rounds a tensor's tail in another way than its body.
        beta = at_least_fp32(beta).neg().exp_().add_(1).reciprocal_()
        parts = []
        if step.decode is not None:
            parts.append(self._decode(raw, g, beta, step.decode, caches))
        if step.prefill is not None:
            parts.append(self._prefill(raw, g, beta, step.prefill, caches))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        gate = self._gate(low_gate).view(-1, kda.num_heads, kda.head_dim)
        out = self._ops.gated_rms_norm(out, gate, self._norm, eps=self._norm_eps)
        return self._out(out.view(-1, self._width))

    def _decode(
        self, raw: Tensor, g: Tensor, beta: Tensor, rows: Rows, caches: LayerCaches
    ) -> Tensor:
        raw, g, beta = (rows.of(x) for x in (raw, g, beta))
        mixed = self._ops.short_conv_decode(raw, self._taps, self._window(caches), rows.state_slots)
        q, k, v = self._heads(mixed)
        return self._ops.kda_decode(q, k, v, g, beta, caches["state"], rows.state_slots)

    def _prefill(
        self, raw: Tensor, g: Tensor, beta: Tensor, rows: Rows, caches: LayerCaches
    ) -> Tensor:
        raw, g, beta = (rows.of(x) for x in (raw, g, beta))
        mixed = self._ops.short_conv(
            raw,
            self._taps,
            self._window(caches),
            rows.state_slots,
            rows.has_state,
            rows.cu_seqlens,
        )
        q, k, v = self._heads(mixed)
        return self._ops.kda_prefill(
            q,
            k,
            v,
            g,
            beta,
            caches["state"],
            rows.state_slots,
            rows.has_state,
            rows.cu_seqlens,
            lower_bound=self._kda.lower_bound,
        )

    def _window(self, caches: LayerCaches) -> Tensor:
        window = caches["window"]
        return window.view(window.shape[0], 3 * self._width, -1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.view(-1, 3, self._kda.num_heads, self._kda.head_dim).unbind(1)
        return q, k, v
