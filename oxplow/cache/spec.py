"""What a layer keeps for a request, as data: named components with shapes, formats, bytes and
shard axes.

Owns the component record and its arithmetic. Knows no tensors, no torch and no model; a mixer
declares its components, the engine sizes and allocates them, hand-over and prefix reuse list
them. Invariant: a component is one named array with its own shard axis; nothing slices bytes out
of another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import prod

from oxplow.errors import ConfigError

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every format that a component may have; float64 serves truth runs only."""


class Per(Enum):
    """What one unit of a component belongs to."""

    BLOCK = "block"  # `block_size` consecutive tokens of one request
    SLOT = "slot"  # one request, whatever its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One cached array of one layer.

    `shape` is the shape of one unit (without the leading block or slot axis), `dtype` a key of
    DTYPE_BYTES, `shard_axis` the axis of `shape` that tensor parallelism splits (None: replicated).
    """

    layer: int
    name: str
    per: Per
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"cache component {self.name}: unknown format",
                got=self.dtype,
                wanted=sorted(DTYPE_BYTES),
            )

    @property
    def unit_bytes(self) -> int:
        """Bytes of one block or one slot."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def bytes_per(components: Iterable[Component], per: Per) -> int:
    """Return the bytes that one block (or one slot) takes over all layers."""
    return sum(c.unit_bytes for c in components if c.per is per)
