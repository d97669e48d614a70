"""Portable vision kernels: attention inside each image, and the merger of 2 x 2 patches.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, not the
model. Invariant: rotary tables and softmax are float32; what a matrix unit reads (turned queries
and keys, softmax weights, activations between products) has the activation dtype.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

from oxplow.ops.kernels.torch.dense import layer_norm, linear, swiglu, swiglu_invariant
from oxplow.ops.kernels.torch.invariant import matmul_rows, row_invariance
from oxplow.ops.table import Kernel

_SCORES = 2**28
"""Scores of one call where a device writes them out (no fused attention): 1 GiB in float32."""


def vision_attention(
    q: Tensor, k: Tensor, v: Tensor, coords: Tensor, cu_seqlens: Tensor, *, theta: float
) -> Tensor:
    """Return o [T, H, Dh]; neighbouring images of equal size (frames of a video) share a call.

    Loops over runs of equal size: padding to the largest image could cost 500 times the work. One
    host sync, because the sizes decide shapes. Memory: turned copies of q and k, and at most
    _SCORES scores, only where attention is not fused.
    """
    return _attend(q, k, v, coords, _runs(cu_seqlens), theta)


def vision_attention_alone(
    q: Tensor, k: Tensor, v: Tensor, coords: Tensor, cu_seqlens: Tensor, *, theta: float
) -> Tensor:
    """Compute what `vision_attention` does, one image a call: its bits depend on nothing else."""
    runs = [(size, 1) for size, count in _runs(cu_seqlens) for _ in range(count)]
    return _attend(q, k, v, coords, runs, theta)


def vision_attention_part(
    q: Tensor, k: Tensor, v: Tensor, q_coords: Tensor, coords: Tensor, *, theta: float
) -> Tensor:
    """Return o [Q, H, Dh]; no host sync.

    Memory: turned copies of q and k, and at most _SCORES scores, only where attention is not fused.
    """
    (Q, H, Dh), T = q.shape, k.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    queries = _turn(q, *_tables(q_coords, Dh, theta))
    keys = _turn(k, *_tables(coords, Dh, theta))
    # [1, H, T, Dh]
    queries, keys, values, target = (
        t.unsqueeze(0).transpose(1, 2) for t in (queries, keys, v.contiguous(), out)
    )
    tile = max(1, _SCORES // (H * T))
    for start in range(0, Q, tile):
        part = slice(start, start + tile)
        target[:, :, part] = scaled_dot_product_attention(queries[:, :, part], keys, values)
    return out


def _runs(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    """Return (patches per image, images) of every run of equal neighbours."""
    sizes = cu_seqlens.diff().tolist()  # the host sync
    return [(size, len(list(run))) for size, run in groupby(sizes)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, coords: Tensor, runs: list[tuple[int, int]], theta: float
) -> Tensor:
    _, H, Dh = q.shape
    cos, sin = _tables(coords, Dh, theta)
    q, k = _turn(q, cos, sin), _turn(k, cos, sin)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    first = 0
    for size, images in runs:
        if size == 0:
            continue
        rows = slice(first, first := first + size * images)
        # [images, H, size, Dh]
        queries, keys, values, target = (
            t[rows].view(images, size, H, Dh).transpose(1, 2) for t in (q, k, v.contiguous(), out)
        )
        tile = max(1, _SCORES // (images * H * size))
        for start in range(0, size, tile):
            part = slice(start, start + tile)
            target[:, :, part] = scaled_dot_product_attention(queries[:, :, part], keys, values)
    return out


def _tables(coords: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin [T, 1, Dh / 2]: rows' angles, then columns'."""
    exponents = torch.arange(0, head_dim // 2, 2, device=coords.device, dtype=torch.float32)
    inverse = torch.pow(theta, exponents / -(head_dim // 2))
    angles = (coords.float().unsqueeze(-1) * inverse).flatten(1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis against each other in float32; one cast."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def vision_merge(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    proj: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    limit: float,
    norm_eps: float,
) -> Tensor:
    """Merge blocks of four patches, [T, D] to [T / 4, Do]; the convolution is one product.

    Memory: activations of one stage, and what `linear` takes.
    """
    merged = linear(linear(_blocks(x), conv_weight.flatten(1), conv_bias), proj)
    merged = gelu(layer_norm(merged, norm_weight, norm_bias, eps=norm_eps))
    return linear(swiglu(linear(merged, gate), linear(merged, up), limit=limit), down)


def _blocks(x: Tensor) -> Tensor:
    """Return [T / 4, D * 4], each channel's four taps together: the weight's order in memory."""
    return x.view(-1, 4, x.shape[1]).transpose(1, 2).flatten(1)


def vision_merge_invariant(
    x: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    proj: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    limit: float,
    norm_eps: float,
) -> Tensor:
    """Compute what `vision_merge` does in float32, a block's bits depending on its patches only.

    GELU is spelled out: torch's own gives other bits in the tail of a vector loop (CPU).
    """
    wide = matmul_rows(matmul_rows(_blocks(x), conv_weight.flatten(1)) + conv_bias.float(), proj)
    wide = layer_norm(wide, norm_weight, norm_bias, eps=norm_eps)
    merged = wide * torch.erf(wide * 0.5**0.5).add_(1).mul_(0.5)
    inner = swiglu_invariant(matmul_rows(merged, gate), matmul_rows(merged, up), limit=limit)
    return matmul_rows(inner, down).to(x.dtype)


KERNELS = (
    Kernel(op="vision_attention", name="torch", run=vision_attention),
    Kernel(
        op="vision_attention",
        name="torch-invariant",
        run=vision_attention_alone,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="vision_attention_part", name="torch", run=vision_attention_part, invariant=True),
    Kernel(op="vision_merge", name="torch", run=vision_merge),
    Kernel(
        op="vision_merge",
        name="torch-invariant",
        run=vision_merge_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
)
