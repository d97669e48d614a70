"""The trunk's layers in their training form.

Owns mHC sites, KDA, MLA with the pooled indexer, feed-forwards and the block that joins them. It
must not know data or the optimiser. Invariant: the same sums as the released architecture (model.md
sections 2 to 7); parameters are fp32 masters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.kernels import EPS, HC_EPS, Backend, KdaInputs, linear, rms_norm, swiglu
from training.shape import NanoShape

SELECT_SLICE = 1024


@dataclass(slots=True)
class Pass:
    """What one forward pass is told, and the alignment terms that it leaves behind.

    `positions` [P] are the queries whose pool scores are aligned with attention mass; None leaves
    the indexer alone.
    """

    num_rows: int
    length: int
    sparse: bool = False
    positions: Tensor | None = None
    alignment: list[Tensor] = field(default_factory=list)
    coverage: list[Tensor] = field(default_factory=list)


def matrix(*sizes: int, gain: float = 1.0) -> nn.Parameter:
    """Return a normal matrix of standard deviation gain / sqrt(fan_in)."""
    return nn.Parameter(torch.randn(*sizes) * gain * sizes[-1] ** -0.5)


def ones(size: int) -> nn.Parameter:
    """Return a norm weight."""
    return nn.Parameter(torch.ones(size))


def site_coefficients(
    streams: Tensor, mixed: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pre [N, 4], post [N, 4] and the unnormalised residual matrix [N, 4, 4]."""
    mixed = mixed * torch.rsqrt(streams.float().square().mean((1, 2)) + EPS)[:, None]
    pre = torch.sigmoid(mixed[:, :4] * scale[0] + base[:4]) + HC_EPS
    post = 2 * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8])
    residual = (mixed[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)
    return pre, post, torch.softmax(residual, -1) + HC_EPS


def collapse_streams(streams: Tensor, pre: Tensor, norm: Tensor) -> Tensor:
    """Weigh the four streams together and normalise: the sub-block's input [N, D]."""
    return rms_norm((pre[:, :, None] * streams.float()).sum(1).to(streams.dtype), norm)


def expand_streams(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """X'[j] = post[j] y + sum_i C[i, j] X[i], in fp32, cast once."""
    parts = [
        post[:, j, None] * y.float()
        + sum(mix[:, i, j, None] * streams[:, i].float() for i in range(4))
        for j in range(4)
    ]
    return torch.stack(parts, 1).to(streams.dtype)


class HyperSite(nn.Module):
    """One mHC site around a sub-block. Streams start unequal weights so that they can part."""

    def __init__(self, shape: NanoShape, backend: Backend, site: int) -> None:
        super().__init__()
        base = torch.zeros(24)
        base[:4] = -1.0
        base[site % 4] = 2.0
        base[8:] = (torch.eye(4) * 4).flatten()
        self.fn = nn.Parameter(torch.randn(24, shape.streams * shape.hidden) * 0.02)
        self.base, self.scale = nn.Parameter(base), nn.Parameter(torch.full((3,), 0.1))
        self.backend = backend
        self.coefficients = backend.compiled(site_coefficients)
        self.collapse = backend.compiled(collapse_streams)
        self.expand = backend.compiled(expand_streams)

    def forward(self, streams: Tensor, norm: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the sub-block between collapse and expand; streams [N, 4, D]."""
        mixed = self.backend.product_fp32(streams.flatten(1), self.fn)
        pre, post, residual = self.coefficients(streams, mixed, self.base, self.scale)
        y = block(self.collapse(streams, pre, norm))
        return self.expand(streams, y, post, self.backend.sinkhorn(residual))


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """Per-head RMSNorm times sigmoid(gate), all in fp32, cast once; [N, H, D]."""
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weight
    return (y * torch.sigmoid(gate.float())).to(gate.dtype)


class KdaLayer(nn.Module):
    """Kimi delta attention with low-rank decay and output gates."""

    def __init__(self, shape: NanoShape, backend: Backend) -> None:
        super().__init__()
        hidden, heads, dim = shape.hidden, shape.num_heads, shape.kda_head_dim
        self.heads, self.dim, self.backend = heads, dim, backend
        self.qkv = matrix(3, heads * dim, hidden)
        self.conv = nn.Parameter(torch.randn(3 * heads * dim, 4) * 0.3)
        self.decay_a, self.decay_b = matrix(dim, hidden), matrix(heads * dim, dim)
        self.gate_a, self.gate_b = matrix(dim, hidden), matrix(heads * dim, dim)
        self.beta, self.out = matrix(heads, hidden), matrix(hidden, heads * dim, gain=0.2)
        self.a_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * dim).uniform_(-8, -2))
        self.norm = ones(dim)
        self.finish = backend.compiled(gated_norm)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [B*T, D] normed -> [B*T, D]."""
        rows, length, heads, dim = run.num_rows, run.length, self.heads, self.dim
        u = linear(x, self.qkv.flatten(0, 1)).view(rows, length, -1)
        u = self.backend.short_conv(u, self.conv)
        q, k, v = (part.view(rows, length, heads, dim) for part in u.split(heads * dim, -1))
        decay = linear(linear(x, self.decay_a), self.decay_b).view(rows, length, heads, dim)
        gate = linear(linear(x, self.gate_a), self.gate_b).view(-1, heads, dim)
        beta = linear(x, self.beta).view(rows, length, heads)
        o = self.backend.kda(KdaInputs(q, k, v, decay, beta, self.a_log, self.dt_bias))
        return linear(self.finish(o.reshape(-1, heads, dim), self.norm, gate).flatten(1), self.out)


class Indexer(nn.Module):
    """Pool scores for sparse attention; its inputs arrive detached."""

    def __init__(self, shape: NanoShape) -> None:
        super().__init__()
        self.heads, self.dim, self.pool = shape.index_heads, shape.index_dim, shape.pool
        self.query = matrix(self.heads * self.dim, shape.q_rank)
        self.key, self.pool_gate = matrix(self.dim, shape.hidden), matrix(self.dim, shape.hidden)
        self.place = nn.Parameter(torch.zeros(self.pool, self.dim))
        self.weight = matrix(self.heads, shape.hidden)
        self.key_norm = nn.LayerNorm(self.dim, eps=1e-6)

    def parts(self, x: Tensor, low_rank: Tensor, run: Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, T, H, d], fp32 pool keys [B, T/4, d] and head weights [B, T, H]."""
        rows, length = run.num_rows, run.length
        key = self.key_norm(linear(x, self.key).float()).view(
            rows, length // self.pool, self.pool, -1
        )
        gate = linear(x, self.pool_gate).float().view_as(key)
        pools = ((gate + self.place).softmax(2) * key).sum(2)
        query = linear(low_rank, self.query).view(rows, length, self.heads, self.dim)
        weight = linear(x, self.weight).float().view(rows, length, self.heads)
        return query, pools, weight * self.heads**-0.5

    def score(self, query: Tensor, pools: Tensor, weight: Tensor) -> Tensor:
        """Return scores [B, T, P] in fp32; products run in the pools' dtype."""
        dots = torch.einsum("bqhd,bpd->bqhp", query.to(pools.dtype), pools) * self.dim**-0.5
        return torch.einsum("bqhp,bqh->bqp", dots.relu(), weight.to(dots.dtype)).float()


class MlaLayer(nn.Module):
    """NoPE latent attention, dense or over selected pools, with the indexer's alignment loss."""

    def __init__(self, shape: NanoShape, backend: Backend) -> None:
        super().__init__()
        hidden, heads = shape.hidden, shape.num_heads
        self.shape, self.backend = shape, backend
        self.q_down, self.q_norm = matrix(shape.q_rank, hidden), ones(shape.q_rank)
        self.q_up = matrix(heads * shape.qk_head_dim, shape.q_rank)
        self.kv_down, self.kv_norm = matrix(shape.kv_rank, hidden), ones(shape.kv_rank)
        self.kv_up = matrix(heads * (shape.qk_head_dim + shape.v_head_dim), shape.kv_rank)
        self.out = matrix(hidden, heads * shape.v_head_dim, gain=0.2)
        self.indexer = Indexer(shape)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        """x [B*T, D] normed -> [B*T, D]."""
        rows, length, shape = run.num_rows, run.length, self.shape
        low_rank = rms_norm(linear(x, self.q_down), self.q_norm)
        q = linear(low_rank, self.q_up).view(rows, length, shape.num_heads, -1).transpose(1, 2)
        latent = rms_norm(linear(x, self.kv_down), self.kv_norm)
        kv = linear(latent, self.kv_up).view(rows, length, shape.num_heads, -1).transpose(1, 2)
        k, v = kv.split([shape.qk_head_dim, shape.v_head_dim], -1)
        select = run.sparse and length > shape.index_topk
        if select or run.positions is not None:
            parts = self.indexer.parts(x.detach(), low_rank.detach(), run)
        bias = self.selection_bias(parts, run, q.dtype) if select else None
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        if run.positions is not None:
            self.align(q, k, parts, run)
        return linear(o.transpose(1, 2).reshape(rows * length, -1), self.out)

    @torch.no_grad()
    def selection_bias(
        self, parts: tuple[Tensor, Tensor, Tensor], run: Pass, dtype: torch.dtype
    ) -> Tensor:
        """Return [B, H, T, T] (expanded over heads): 0 for selected pools and the raw tail, -inf
        elsewhere.
        """
        query, pools, weight = parts
        length, pool, device = run.length, self.shape.pool, query.device
        last = torch.arange(length // pool, device=device) * pool + pool - 1
        keys, chosen = pools.to(self.backend.dtype), []
        count = min(self.shape.index_topk // pool, length // pool)
        for start in range(0, length, SELECT_SLICE):
            t = torch.arange(start, min(length, start + SELECT_SLICE), device=device)
            stop = start + len(t)
            score = self.indexer.score(query[:, start:stop], keys, weight[:, start:stop])
            visible = last[None, None] <= t[:, None]
            best = score.masked_fill(~visible, -torch.inf).topk(count, -1).indices
            picked = torch.zeros(score.shape, dtype=torch.bool, device=device)
            chosen.append(picked.scatter_(2, best, True) & visible)
        t = torch.arange(length, device=device)
        tail = (t[None] <= t[:, None]) & (t[None] >= (t[:, None] + 1) // pool * pool)
        allowed = torch.cat(chosen, 1).repeat_interleave(pool, 2) | tail
        bias = torch.zeros(run.num_rows, 1, length, length, dtype=dtype, device=device)
        bias.masked_fill_(~allowed[:, None], -torch.inf)
        return bias.expand(-1, self.shape.num_heads, -1, -1)

    def align(self, q: Tensor, k: Tensor, parts: tuple[Tensor, Tensor, Tensor], run: Pass) -> None:
        """Append KL(attention mass of complete pools || softmax of pool scores) at the sampled
        positions.
        """
        query, pools, weight = parts
        t, pool, length = run.positions, self.shape.pool, run.length
        last = torch.arange(length // pool, device=q.device) * pool + pool - 1
        visible = last[None] <= t[:, None]
        with torch.no_grad():
            logits = (q[:, :, t] @ k.mT).float() * self.shape.qk_head_dim**-0.5
            future = torch.arange(length, device=q.device)[None] > t[:, None]
            mass = logits.masked_fill(future, -torch.inf).softmax(-1).sum(1)
            mass = mass.view(run.num_rows, len(t), length // pool, pool).sum(-1) * visible
            mass = mass / (mass.sum(-1, keepdim=True) + 1e-9)
        score = self.indexer.score(query[:, t], pools, weight[:, t]).masked_fill(~visible, -1e9)
        gap = torch.special.xlogy(mass, mass) - mass * score.log_softmax(-1)
        run.alignment.append(gap.sum(-1).mean())
        count = min(self.shape.index_topk // pool, length // pool)
        found = mass.gather(2, score.topk(count).indices).sum(-1).mean().detach()
        run.coverage.append(found / mass.topk(count).values.sum(-1).mean())


def dense_activation(hidden: Tensor) -> Tensor:
    """Clamped SwiGLU of [gate | up], in fp32, cast once."""
    gate, up = hidden.float().chunk(2, -1)
    return swiglu(gate, up).to(hidden.dtype)


def expert_activation(hidden: Tensor, weight: Tensor) -> Tensor:
    """Clamped SwiGLU of [gates of all experts | ups of all experts], each expert scaled by its
    weight [N, E].
    """
    gate, up = hidden.float().chunk(2, -1)
    experts = weight.shape[1]
    y = swiglu(gate, up).view(-1, experts, gate.shape[1] // experts) * weight[:, :, None]
    return y.flatten(1).to(hidden.dtype)


class FeedForward(nn.Module):
    """Dense SwiGLU, or a sigmoid-routed MoE with one shared expert (the last slot).

    All experts run as one wide product, weight 0 for unpicked ones: the same sums, fastest at 16
    small experts.
    """

    def __init__(self, shape: NanoShape, backend: Backend, routed: bool) -> None:
        super().__init__()
        self.shape, self.routed = shape, routed
        slots = shape.num_experts + 1 if routed else 1
        width = shape.expert_intermediate if routed else shape.dense_intermediate
        self.gate_up = matrix(2, slots, width, shape.hidden)
        self.down = nn.Parameter(torch.randn(slots, shape.hidden, width) * 0.2 * width**-0.5)
        self.activate = backend.compiled(expert_activation if routed else dense_activation)
        if routed:
            self.router = matrix(shape.num_experts, shape.hidden)
            self.register_buffer("bias", torch.zeros(shape.num_experts))
            self.register_buffer("load", torch.zeros(shape.num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] normed -> [N, D]; in training the picks are counted into `load`."""
        hidden = linear(x, self.gate_up.flatten(0, 2))
        active = self.activate(hidden, self.weights(x)) if self.routed else self.activate(hidden)
        return linear(active, self.down.permute(1, 0, 2).flatten(1))

    def weights(self, x: Tensor) -> Tensor:
        """Return [N, E + 1]: normalised unbiased scores of the picked experts, 1 for the shared
        one.
        """
        score = torch.sigmoid(functional.linear(x.float(), self.router))
        picked = (score + self.bias).topk(self.shape.experts_per_token).indices
        mask = torch.zeros_like(score).scatter_(1, picked, 1.0)
        if self.training:
            self.load += mask.sum(0)
        kept = score * mask
        kept = self.shape.routed_scale * kept / (kept.sum(1, keepdim=True) + 1e-20)
        return torch.cat([kept, torch.ones_like(kept[:, :1])], 1)

    @torch.no_grad()
    def balance(self, step: float | Tensor) -> Tensor:
        """Move the selection bias against the load, reset the count, return max over mean load."""
        load = self.load
        self.bias += step * torch.sign(load.mean() - load)
        self.bias -= self.bias.mean()
        worst = load.max() / load.mean()
        self.load.zero_()
        return worst


class Block(nn.Module):
    """One trunk layer (two mHC sites) or the MTP block's layer (plain residuals)."""

    def __init__(
        self, shape: NanoShape, backend: Backend, layer: int, is_mtp: bool = False
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = ones(shape.hidden), ones(shape.hidden)
        full = is_mtp or shape.is_full_attention(layer)
        self.mixer = MlaLayer(shape, backend) if full else KdaLayer(shape, backend)
        self.ffn = FeedForward(shape, backend, routed=is_mtp or layer >= shape.num_dense)
        if not is_mtp:
            self.site1 = HyperSite(shape, backend, 2 * layer)
            self.site2 = HyperSite(shape, backend, 2 * layer + 1)

    def forward(self, streams: Tensor, run: Pass) -> Tensor:
        """streams [N, 4, D] -> the same."""
        streams = self.site1(streams, self.norm1, lambda x: self.mixer(x, run))
        return self.site2(streams, self.norm2, self.ffn)

    def plain(self, z: Tensor, run: Pass) -> Tensor:
        """The MTP form: one stream, pre-norm residuals; z [N, D]."""
        z = z + self.mixer(rms_norm(z, self.norm1), run)
        return z + self.ffn(rms_norm(z, self.norm2))
