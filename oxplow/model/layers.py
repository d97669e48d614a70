"""The small parts that every block is made of: linear maps, norms and the embedding, over the op
table.

Owns the binding of a stored weight to the op that can use it (plain or FP8 blocks). Knows no
model. Invariant: a part holds its weights and calls exactly one op; the choice of op is made when
it is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from oxplow.model.weights import FP8_BLOCK, Checkpoint, Matrix
from oxplow.ops.table import OpTable


def at_least_fp32(x: Tensor) -> Tensor:
    """Widen x to float32 unless it is wider already (truth runs in float64 stay there)."""
    return x if x.dtype is torch.float64 else x.float()


class Linear:
    """y = x W^T (+ b); plain weights or FP8 blocks that stay one byte in memory."""

    def __init__(self, ops: OpTable, weight: Matrix, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._plain = weight.scale is None
        values = ops.lay("linear", "weight", weight.values) if self._plain else weight.values
        self.weight = Matrix(values, weight.scale)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Map the last axis of x [T, K] to [T, N]."""
        if self._plain:
            return self._ops.linear(x, self.weight.values, self.bias)
        return self._ops.linear_fp8(x, self.weight.values, self.weight.scale, block=FP8_BLOCK)


class JoinedLinear:
    """Several linear maps of one input; plain weights are joined into one product."""

    def __init__(
        self,
        ops: OpTable,
        weights: Sequence[Matrix],
        *,
        biases: Sequence[Tensor] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        """Join `weights`; `sizes` regroups the joined columns (default: one group per weight)."""
        own = [w.values.shape[0] for w in weights]
        self._sizes = list(sizes) or own
        self._regroup = self._sizes != own
        plain = (
            all(w.scale is None for w in weights) and len({w.values.dtype for w in weights}) == 1
        )
        if plain:
            bias = torch.cat(list(biases)) if biases else None
            self._parts = [Linear(ops, Matrix(torch.cat([w.values for w in weights])), bias)]
        else:
            self._parts = [
                Linear(ops, w, biases[i] if biases else None) for i, w in enumerate(weights)
            ]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one [T, size] tensor per group, in order; they may be columns of one product."""
        if len(self._parts) == 1:
            return self._parts[0](x).split_with_sizes(self._sizes, -1)
        parts = tuple(part(x) for part in self._parts)
        return torch.cat(parts, -1).split_with_sizes(self._sizes, -1) if self._regroup else parts


class RmsNorm:
    """RMSNorm over the last axis."""

    def __init__(self, ops: OpTable, weight: Tensor, eps: float) -> None:
        self._ops = ops
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise x [T, D]."""
        return self._ops.rms_norm(x, self.weight, eps=self.eps)


class Embedding:
    """Token embedding table [V, D]."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return rows [T, D] in the activation dtype."""
        return embedding(token_ids, self.weight).to(self._dtype)


def take_linear(ops: OpTable, source: Checkpoint, name: str, rows: int, columns: int) -> Linear:
    """Take `name`.weight [rows, columns] (no bias) from a checkpoint."""
    return Linear(ops, source.matrix(f"{name}.weight", rows, columns))


def take_norm(ops: OpTable, source: Checkpoint, name: str, width: int, eps: float) -> RmsNorm:
    """Take `name`.weight [width] from a checkpoint."""
    return RmsNorm(ops, source.vector(f"{name}.weight", width), eps)
