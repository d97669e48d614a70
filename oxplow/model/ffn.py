"""Channel mixing: the dense SwiGLU block and the expert block.

Owns the two feed-forward forms. Knows no residual and no token order.
Invariant: rows are independent; the shared expert has weight 1 and is not scaled.
"""

from __future__ import annotations

from torch import Tensor

from oxplow.model.layers import JoinedLinear, take_linear
from oxplow.model.pages import trim
from oxplow.model.spec import FfnKind, TextSpec
from oxplow.model.weights import FP8_BLOCK, Checkpoint, Matrix
from oxplow.ops.table import OpTable


class DenseFfn:
    """down( swiglu(gate x, up x) ), clamped where the model says so."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        hidden: int,
        width: int,
        limit: float | None,
    ) -> None:
        self._ops = ops
        self._limit = limit
        self._gate_up = JoinedLinear(
            ops,
            [
                source.matrix(f"{prefix}.gate_proj.weight", width, hidden),
                source.matrix(f"{prefix}.up_proj.weight", width, hidden),
            ],
        )
        self._down = take_linear(ops, source, f"{prefix}.down_proj", hidden, width)

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, D] to [T, D]."""
        gate, up = self._gate_up(x)
        return self._down(self._ops.swiglu(gate, up, limit=self._limit))


class MoeFfn:
    """Routed experts plus the shared expert."""

    def __init__(self, ops: OpTable, source: Checkpoint, prefix: str, text: TextSpec) -> None:
        moe = text.moe
        if moe is None:
            raise AssertionError("a MoE layer without a MoE spec")
        self._ops = ops
        self._moe = moe
        self._limit = text.swiglu_limit
        self._router = source.vector(f"{prefix}.gate.weight", moe.num_experts, text.hidden)
        self._bias = source.vector(
            f"{prefix}.gate.e_score_correction_bias", moe.num_experts, fp32=True
        )
        gate, up, down = moe.projections
        experts = [f"{prefix}.experts.{e}" for e in range(moe.num_experts)]
        # `down` first: laying it out takes a second copy, which must not stand beside all the rest.
        self._down = source.stacked([f"{e}.{down}.weight" for e in experts], text.hidden, moe.width)
        if self._down.scale is None:
            self._down = Matrix(ops.lay("experts", "down", self._down.values))
            trim()
        self._gate_up = _pairs(
            source.stacked(
                [f"{e}.{p}.weight" for e in experts for p in (gate, up)], moe.width, text.hidden
            )
        )
        if self._gate_up.scale is None:
            self._gate_up = Matrix(ops.lay("experts", "gate_up", self._gate_up.values))
        self._shared = DenseFfn(
            ops,
            source,
            f"{prefix}.shared_experts",
            text.hidden,
            moe.shared_width,
            text.swiglu_limit,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, D] to [T, D]."""
        moe = self._moe
        ids, weights = self._ops.router(
            x,
            self._router,
            self._bias,
            top_k=moe.top_k,
            scaling=moe.scaling,
            renormalise=moe.renormalise,
        )
        if self._gate_up.scale is None:
            routed = self._ops.experts(
                x, ids, weights, self._gate_up.values, self._down.values, limit=self._limit
            )
        else:
            routed = self._ops.experts_fp8(
                x,
                ids,
                weights,
                self._gate_up.values,
                self._gate_up.scale,
                self._down.values,
                self._down.scale,
                limit=self._limit,
                block=FP8_BLOCK,
            )
        return routed + self._shared(x)


def take_ffn(
    ops: OpTable, source: Checkpoint, layer: str, kind: FfnKind, text: TextSpec
) -> DenseFfn | MoeFfn:
    """Take the feed-forward block of one layer (`layer` is its name prefix, with the final dot)."""
    if kind is FfnKind.DENSE:
        return DenseFfn(
            ops, source, f"{layer}mlp", text.hidden, text.dense_width, text.swiglu_limit
        )
    prefix = text.moe.prefix if text.moe else "mlp"
    return MoeFfn(ops, source, f"{layer}{prefix}", text)


def _pairs(stack: Matrix) -> Matrix:
    """View a stack of gate, up, gate, up, ... as [E, 2, ...]."""
    values = stack.values.view(-1, 2, *stack.values.shape[1:])
    scale = None if stack.scale is None else stack.scale.view(-1, 2, *stack.scale.shape[1:])
    return Matrix(values, scale)
