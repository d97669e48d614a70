"""The vision tower in its training form.

Owns the tower from raw-pixel patches to feature rows. Pictures of different grids share one padded
slot shape, so that a step's shapes never change. Invariant: a picture's features do not depend on
its padding or on the other pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.kernels import EPS, Backend, linear, rms_norm, swiglu
from training.layers import matrix, ones
from training.shape import NanoShape

MAX_BLOCKS = 36
MAX_PATCHES = 4 * MAX_BLOCKS


@dataclass(frozen=True, slots=True)
class Pictures:
    """A batch of padded pictures: patches [N, 144, 588] normalised, rows and cols [N, 144] of each
    patch, valid [N, 144].
    """

    patches: Tensor
    rows: Tensor
    cols: Tensor
    valid: Tensor


def patch_places(grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (row, col, valid) [N, 144] of each patch in 2x2 merge order; grid [N, 2] is (rows,
    cols) in blocks.
    """
    index = torch.arange(MAX_PATCHES, device=grid.device)[None]
    block, inner = index // 4, index % 4
    cols = grid[:, 1:2]
    row, col = block // cols * 2 + inner // 2, block % cols * 2 + inner % 2
    return row, col, block < grid[:, :1] * cols


class VisionBlock(nn.Module):
    """One pre-norm layer with q/k norm and axial rope."""

    def __init__(self, shape: NanoShape, backend: Backend) -> None:
        super().__init__()
        vision = shape.vision
        size, self.heads, self.dtype = vision.hidden, vision.num_heads, backend.dtype
        self.norm1, self.norm2 = ones(size), ones(size)
        self.q_norm, self.k_norm = ones(size // self.heads), ones(size // self.heads)
        self.qkv, self.qkv_bias = matrix(3, size, size), nn.Parameter(torch.zeros(3 * size))
        self.out, self.out_bias = matrix(size, size, gain=0.5), nn.Parameter(torch.zeros(size))
        width = vision.intermediate
        self.gate_up, self.gate_up_bias = (
            matrix(2, width, size),
            nn.Parameter(torch.zeros(2 * width)),
        )
        self.down, self.down_bias = matrix(size, width, gain=0.5), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x [N, S, D] fp32 residual; cos, sin [N, 1, S, d]; mask [N, 1, 1, S] True where valid."""
        n, s, _ = x.shape

        def rotate(a: Tensor) -> Tensor:
            first, second = a.float().chunk(2, -1)
            return (a * cos + torch.cat([-second, first], -1) * sin).to(self.dtype)

        y = linear(rms_norm(x, self.norm1).to(self.dtype), self.qkv.flatten(0, 1))
        y = y + self.qkv_bias.to(y.dtype)
        q, k, v = y.view(n, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(rms_norm(q, self.q_norm)), rotate(rms_norm(k, self.k_norm))
        o = (
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            .transpose(1, 2)
            .reshape(n, s, -1)
        )
        x = x + linear(o, self.out) + self.out_bias
        y = linear(rms_norm(x, self.norm2).to(self.dtype), self.gate_up.flatten(0, 1))
        gate, up = (y + self.gate_up_bias.to(y.dtype)).chunk(2, -1)
        return x + linear(swiglu(gate, up), self.down) + self.down_bias


class VisionTower(nn.Module):
    """Patches to language-model rows, one per 2x2 block."""

    def __init__(self, shape: NanoShape, backend: Backend) -> None:
        super().__init__()
        vision, self.dtype = shape.vision, backend.dtype
        size = vision.hidden
        self.head_dim = size // vision.num_heads
        self.patch, self.patch_bias = (
            matrix(size, vision.patch_values),
            nn.Parameter(torch.zeros(size)),
        )
        self.blocks = nn.ModuleList([VisionBlock(shape, backend) for _ in range(vision.depth)])
        self.norm = ones(size)
        self.merge = matrix(shape.hidden, 4 * size)
        self.merge_bias = nn.Parameter(torch.zeros(shape.hidden))
        self.proj = matrix(shape.hidden, shape.hidden)
        self.proj_norm = nn.LayerNorm(shape.hidden, eps=EPS)
        self.gate_up = matrix(2, vision.projection, shape.hidden)
        self.down = matrix(shape.hidden, vision.projection)

    def rope(self, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [N, 1, S, d] of the axial rotation, theta 10000."""
        half = self.head_dim // 2
        steps = torch.arange(0, half, 2, device=rows.device, dtype=torch.float32)
        inverse = 1.0 / (10000.0 ** (steps / half))
        angle = torch.cat([rows[..., None] * inverse, cols[..., None] * inverse], -1)
        angle = angle.repeat(1, 1, 2)[:, None]
        return angle.cos(), angle.sin()

    def forward(self, pictures: Pictures) -> Tensor:
        """Return features [N, 36, D] fp32; rows past a picture's own blocks are meaningless."""
        x = linear(pictures.patches.to(self.dtype), self.patch).float() + self.patch_bias
        cos, sin = self.rope(pictures.rows, pictures.cols)
        mask = pictures.valid[:, None, None]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = rms_norm(x, self.norm).to(self.dtype).view(x.shape[0], MAX_BLOCKS, -1)
        x = linear(x, self.merge) + self.merge_bias.to(self.dtype)
        x = functional.gelu(self.proj_norm(linear(x, self.proj).float())).to(self.dtype)
        gate, up = linear(x, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return linear(swiglu(gate, up), self.down).float()
