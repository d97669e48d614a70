"""How blocks read from and write to the residual: plain addition or hyper-connected streams.

Owns the two residual forms behind one protocol. Knows no mixer. Invariant: `leave` is the only
way that a block's output reaches the residual, and it sees the residual as it was before `enter`
collapsed it.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from oxplow.model.spec import HyperSpec
from oxplow.model.weights import Checkpoint
from oxplow.ops.table import OpTable


class Site(Protocol):
    """One place where a block is attached to the residual."""

    def enter(self, residual: Tensor) -> tuple[Tensor, Any]:
        """Return the block's input [T, D] and what `leave` needs."""
        ...

    def leave(self, residual: Tensor, y: Tensor, carried: Any) -> Tensor:
        """Return the residual after the block gave y [T, D]."""
        ...


class PlainSite:
    """The ordinary residual: x + f(x)."""

    def enter(self, residual: Tensor) -> tuple[Tensor, None]:
        """Return the residual [T, D] itself."""
        return residual, None

    def leave(self, residual: Tensor, y: Tensor, carried: None) -> Tensor:
        """Add y to the residual."""
        return residual + y


class HyperSite:
    """Manifold-constrained hyper-connection over streams [T, n, D]."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        spec: HyperSpec,
        hidden: int,
        norm_eps: float,
    ) -> None:
        n = spec.streams
        outputs = n * (2 + n)
        self._ops = ops
        self._spec = spec
        self._norm_eps = norm_eps
        self._fn = source.vector(f"{prefix}_fn", outputs, n * hidden)
        self._base = source.vector(f"{prefix}_base", outputs, fp32=True)
        self._scale = source.vector(f"{prefix}_scale", 3, fp32=True)

    def enter(self, residual: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Collapse the streams; carry the post gains and the mixing matrix."""
        x, post, mix = self._ops.mhc_collapse(
            residual,
            self._fn,
            self._base,
            self._scale,
            norm_eps=self._norm_eps,
            mix_eps=self._spec.mix_eps,
            iterations=self._spec.iterations,
        )
        return x, (post, mix)

    def leave(self, residual: Tensor, y: Tensor, carried: tuple[Tensor, Tensor]) -> Tensor:
        """Mix the streams and add y to each with its gain."""
        return self._ops.mhc_expand(residual, y, *carried)
