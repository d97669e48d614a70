"""The vision tower: patches of pictures and video frames to rows that replace text embeddings.

Owns the tower, its patch coordinates and the pieces into which its work is cut. Knows no text, no
image files (`serve.images` prepares pixels) and no clock. Invariant: every temporal patch is
attended on its own; its rows do not depend on other pictures in the call, nor on how much of the
work is done between two pauses, because the cuts follow from the sizes alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oxplow.errors import ContractError
from oxplow.model.layers import JoinedLinear, Linear, RmsNorm, take_norm
from oxplow.model.spec import VisionSpec
from oxplow.model.weights import Checkpoint, Matrix
from oxplow.ops.table import OpTable

_MERGER_NORM_EPS = 1e-5  # model.md 3: the merger's LayerNorm keeps torch's default
_ROW_STEP = 64  # rows of a cut are a multiple: whole tiles of the products, whole merge blocks

_HOST_PIECE_FLOPS, _DEVICE_PIECE_FLOPS = 2e9, 2e12
"""Work between two possible pauses: about 0.05 s of one CPU core, 10 ms of an accelerator."""


@dataclass(slots=True)
class _Cuts:
    """Where the work on patches is cut, and when it is time to pause."""

    flops: float
    spent: float = 0.0

    def rows(self, count: int, flops_per_row: float) -> Iterator[slice]:
        """Yield row ranges of at most a piece's work, but of `_ROW_STEP` rows at least."""
        step = max(1, int(self.flops / flops_per_row / _ROW_STEP)) * _ROW_STEP
        for start in range(0, count, step):
            yield slice(start, min(count, start + step))

    def is_due(self, flops: float) -> bool:
        """Book finished work; True: a piece's worth was done since the last pause."""
        self.spent += flops
        if self.spent < self.flops:
            return False
        self.spent = 0.0
        return True


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

    def pieces(
        self, x: Tensor, coords: Tensor, cu_seqlens: Tensor, cuts: _Cuts
    ) -> Generator[None, None, None]:
        """Replace patches x [P, D] by the block's output, pausing between pieces."""
        (patches, d), heads = x.shape, self._spec.num_heads
        q, k, v = (x.new_empty(patches, heads, d // heads) for _ in range(3))
        for rows in cuts.rows(patches, 6 * d * d):
            qkv = self._qkv(self._norm1(x[rows])).view(-1, 3, heads, d // heads).unbind(1)
            q[rows] = self._per_head(self._q_norm, qkv[0])
            k[rows] = self._per_head(self._k_norm, qkv[1])
            v[rows] = qkv[2]
            if cuts.is_due(6.0 * d * d * (rows.stop - rows.start)):
                yield
        mixed = torch.empty_like(q)
        yield from self._attend(q, k, v, mixed, (coords, cu_seqlens), cuts)
        flops = 2 * d * d + 6 * d * self._spec.width
        for rows in cuts.rows(patches, flops):
            part = x[rows] + self._proj(mixed[rows].reshape(-1, d))
            gate, up = self._gate_up(self._norm2(part))
            x[rows] = part + self._down(self._ops.swiglu(gate, up, limit=self._spec.swiglu_limit))
            if cuts.is_due(float(flops) * (rows.stop - rows.start)):
                yield

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        layout: tuple[Tensor, Tensor],
        cuts: _Cuts,
    ) -> Generator[None, None, None]:
        """Write attention inside each segment into `out`: at once where that is one piece's work,
        else by segments, heads and queries.
        """
        theta, (coords, cu_seqlens) = self._spec.rope_theta, layout
        _, heads, head_dim = q.shape
        ends = cu_seqlens.tolist()
        whole = 4.0 * heads * head_dim * sum((b - a) ** 2 for a, b in pairwise(ends))
        if whole <= cuts.flops:
            out.copy_(self._ops.vision_attention(q, k, v, coords, cu_seqlens, theta=theta))
            if cuts.is_due(whole):
                yield
            return
        for first, end in pairwise(ends):
            per_query = 4.0 * head_dim * (end - first)  # of one head
            group = min(heads, max(1, int(cuts.flops / per_query / max(1, end - first))))
            for head in range(0, heads, group):
                some = slice(head, min(heads, head + group))
                for rows in cuts.rows(end - first, per_query * (some.stop - head)):
                    part = slice(first + rows.start, first + rows.stop)
                    out[part, some] = self._ops.vision_attention_part(
                        q[part, some].contiguous(),
                        k[first:end, some].contiguous(),
                        v[first:end, some].contiguous(),
                        coords[part],
                        coords[first:end],
                        theta=theta,
                    )
                    if cuts.is_due(per_query * (some.stop - head) * (rows.stop - rows.start)):
                        yield

    @staticmethod
    def _per_head(norm: RmsNorm, x: Tensor) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class VisionTower:
    """Patch embedding, blocks, final norm and 2x2 merge."""

    def __init__(
        self, ops: OpTable, source: Checkpoint, prefix: str, spec: VisionSpec, dtype: torch.dtype
    ) -> None:
        self._ops, self.spec, self._dtype = ops, spec, dtype
        on_host = ops.facts.device.type == "cpu"
        self.piece_flops = _HOST_PIECE_FLOPS if on_host else _DEVICE_PIECE_FLOPS
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
        encoding = self.begin(pixel_values, grid_thw)
        while encoding.rows is None:
            encoding.advance()
        return encoding.rows

    def begin(self, pixel_values: Tensor, grid_thw: Tensor) -> Encoding:
        """Return the same work, not begun yet. Raises what the call raises."""
        coords, cu_seqlens = patch_layout(grid_thw, self.spec.merge)
        if len(coords) != len(pixel_values):
            raise ContractError(
                "pixel rows do not match the grid",
                got=len(pixel_values),
                wanted=len(coords),
                where=grid_thw.tolist(),
            )
        device = self._merge[0].device
        layout = coords.to(device), cu_seqlens.to(device)
        return Encoding(self._pieces(pixel_values, *layout), device)

    def _pieces(
        self, pixel_values: Tensor, coords: Tensor, cu_seqlens: Tensor
    ) -> Generator[None, None, Tensor]:
        """Do the work, pausing about every `piece_flops`; return the rows."""
        cuts, d, device = _Cuts(self.piece_flops), self.spec.hidden, coords.device
        patches, width = pixel_values.shape
        x = torch.empty(patches, d, dtype=self._dtype, device=device)
        for rows in cuts.rows(patches, 2 * d * width):
            x[rows] = self._embed(pixel_values[rows].to(device=device, dtype=self._dtype))
            if cuts.is_due(2.0 * d * width * (rows.stop - rows.start)):
                yield
        for block in self._blocks:
            yield from block.pieces(x, coords, cu_seqlens, cuts)
        merged: list[Tensor] = []
        per_patch = 2 * sum(w.numel() for w in self._merge if w.dim() > 1) / self.spec.merge**2
        for rows in cuts.rows(patches, per_patch):
            merged.append(
                self._ops.vision_merge(
                    self._norm(x[rows]),
                    *self._merge,
                    limit=self.spec.swiglu_limit,
                    norm_eps=_MERGER_NORM_EPS,
                )
            )
            if cuts.is_due(per_patch * (rows.stop - rows.start)):
                yield
        return torch.cat(merged) if merged else x.new_empty(0, self.spec.out_hidden)


class Encoding:
    """One call of the tower that its caller turns piece by piece; dropping it ends the work."""

    def __init__(self, pieces: Generator[None, None, Tensor], device: torch.device) -> None:
        self._pieces, self._device = pieces, device
        self.rows: Tensor | None = None  # the result, once there is one

    @torch.inference_mode()
    def advance(self) -> None:
        """Do the next piece and wait for it; after the last one `rows` is there."""
        if self.rows is not None:
            return
        try:
            next(self._pieces)
        except StopIteration as end:
            self.rows = end.value
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _biased(ops: OpTable, source: Checkpoint, name: str, rows: int, columns: int) -> Linear:
    return Linear(
        ops, source.matrix(f"{name}.weight", rows, columns), source.vector(f"{name}.bias", rows)
    )
