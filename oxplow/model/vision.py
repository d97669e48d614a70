"""The vision tower: patches of pictures and video frames to rows that replace text embeddings.

Owns the tower and its patch coordinates. Knows no text and no image files (`serve.images`
prepares pixels). Invariant: every temporal patch is attended on its own; its rows do not depend
on other pictures in the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.errors import ContractError
from oxplow.model.layers import JoinedLinear, Linear, RmsNorm, take_norm
from oxplow.model.spec import VisionSpec
from oxplow.model.weights import Checkpoint, Matrix
from oxplow.ops.table import OpTable

_MERGER_NORM_EPS = 1e-5  # model.md 3: the merger's LayerNorm keeps torch's default


def patch_layout(grid_thw: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """Return (coords [P, 2] int64 as (row, column), cu_seqlens [F+1] int32) of all patches in
    storage order.

    `grid_thw` [images, 3] counts temporal patches, patch rows, patch columns. Patches are ordered
    by merge block, then inside the block; each temporal patch is its own segment.
    """
    coords: list[Tensor] = []
    lengths: list[int] = []
    for frames, height, width in grid_thw.tolist():
        rows = (
            torch.arange(height)
            .view(height // merge, 1, merge, 1)
            .expand(-1, width // merge, -1, merge)
        )
        columns = (
            torch.arange(width)
            .view(1, width // merge, 1, merge)
            .expand(height // merge, -1, merge, -1)
        )
        one = torch.stack([rows.reshape(-1), columns.reshape(-1)], -1)
        coords.append(one.repeat(frames, 1))
        lengths.extend([height * width] * frames)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.cat(coords) if coords else torch.zeros(0, 2, dtype=torch.int64), ends


class _Block:
    """Pre-norm attention and clamped SwiGLU over patches."""

    def __init__(self, ops: OpTable, source: Checkpoint, at: str, spec: VisionSpec) -> None:
        d, w = spec.hidden, spec.width
        self._ops, self._spec = ops, spec
        self._norm1 = take_norm(ops, source, f"{at}.norm1", d, spec.norm_eps)
        self._norm2 = take_norm(ops, source, f"{at}.norm2", d, spec.norm_eps)
        self._qkv = _biased(ops, source, f"{at}.attn.qkv", 3 * d, d)
        head = d // spec.num_heads
        self._q_norm = take_norm(ops, source, f"{at}.attn.q_norm", head, spec.norm_eps)
        self._k_norm = take_norm(ops, source, f"{at}.attn.k_norm", head, spec.norm_eps)
        self._proj = _biased(ops, source, f"{at}.attn.proj", d, d)
        names = [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"]
        self._gate_up = JoinedLinear(
            ops,
            [source.matrix(f"{n}.weight", w, d) for n in names],
            biases=[source.vector(f"{n}.bias", w) for n in names],
        )
        self._down = _biased(ops, source, f"{at}.mlp.down_proj", d, w)

    def __call__(self, x: Tensor, coords: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Map patches x [P, D] to [P, D]."""
        patches, heads = x.shape[0], self._spec.num_heads
        q, k, v = self._qkv(self._norm1(x)).view(patches, 3, heads, -1).unbind(1)
        q, k = self._per_head(self._q_norm, q), self._per_head(self._k_norm, k)
        mixed = self._ops.vision_attention(q, k, v, coords, cu_seqlens, theta=self._spec.rope_theta)
        x = x + self._proj(mixed.reshape(patches, -1))
        gate, up = self._gate_up(self._norm2(x))
        return x + self._down(self._ops.swiglu(gate, up, limit=self._spec.swiglu_limit))

    @staticmethod
    def _per_head(norm: RmsNorm, x: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class VisionTower:
    """Patch embedding, blocks, final norm and 2x2 merge."""

    def __init__(
        self, ops: OpTable, source: Checkpoint, prefix: str, spec: VisionSpec, dtype: torch.dtype
    ) -> None:
        self._ops, self.spec, self._dtype = ops, spec, dtype
        d, out, width = spec.hidden, spec.out_hidden, spec.projection_width
        kernel = (3, spec.temporal_patch, spec.patch, spec.patch)
        patch = source.vector(f"{prefix}patch_embed.proj.weight", d, *kernel).reshape(d, -1)
        self._embed = Linear(ops, Matrix(patch), source.vector(f"{prefix}patch_embed.proj.bias", d))
        self._blocks = [_Block(ops, source, f"{prefix}blocks.{i}", spec) for i in range(spec.depth)]
        self._norm = take_norm(ops, source, f"{prefix}post_layernorm", d, spec.norm_eps)
        self._merge = (
            source.vector(f"{prefix}downsample.weight", out, d, spec.merge, spec.merge),
            source.vector(f"{prefix}downsample.bias", out),
            source.vector(f"{prefix}merger.proj.weight", out, out),
            source.vector(f"{prefix}merger.post_projection_norm.weight", out),
            source.vector(f"{prefix}merger.post_projection_norm.bias", out),
            source.vector(f"{prefix}merger.gate_proj.weight", width, out),
            source.vector(f"{prefix}merger.up_proj.weight", width, out),
            source.vector(f"{prefix}merger.down_proj.weight", out, width),
        )

    def __call__(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode patches [P, 3 * temporal * patch * patch] into rows [P / merge^2, out_hidden].

        Raises ContractError when the patches do not match the grid.
        """
        coords, cu_seqlens = patch_layout(grid_thw, self.spec.merge)
        if len(coords) != len(pixel_values):
            raise ContractError(
                "pixel rows do not match the grid",
                got=len(pixel_values),
                wanted=len(coords),
                where=grid_thw.tolist(),
            )
        coords, cu_seqlens = coords.to(pixel_values.device), cu_seqlens.to(pixel_values.device)
        x = self._embed(pixel_values.to(self._dtype))
        for block in self._blocks:
            x = block(x, coords, cu_seqlens)
        return self._ops.vision_merge(
            self._norm(x), *self._merge, limit=self.spec.swiglu_limit, norm_eps=_MERGER_NORM_EPS
        )


def _biased(ops: OpTable, source: Checkpoint, name: str, rows: int, columns: int) -> Linear:
    return Linear(
        ops, source.matrix(f"{name}.weight", rows, columns), source.vector(f"{name}.bias", rows)
    )
