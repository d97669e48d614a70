"""The tensors behind the cache components: one pool per component, addressed by block or slot.

Owns allocation and lookup. Does not know who uses which block or slot: that is the cache manager's.
Invariant: a pool is allocated once with the shape that its component declares and never resized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from oxplow.cache.spec import Component, Per

LayerCaches: TypeAlias = dict[str, Tensor]
"""The pools of one layer by component name: [blocks, ...] or [slots, ...]."""

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ALIGNMENT = 64  # bytes: a cache line, as torch's own allocator gives


class CacheTensors:
    """Pools for all components of a model: `caches[layer][name]`."""

    def __init__(
        self,
        components: Sequence[Component],
        *,
        num_blocks: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.components = tuple(components)
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self._layers: dict[int, LayerCaches] = {}
        for c in components:
            units = num_blocks if c.per is Per.BLOCK else num_slots
            pool = _zeros((units, *c.shape), _DTYPES[c.dtype], device)
            self._layers.setdefault(c.layer, {})[c.name] = pool

    def __getitem__(self, layer: int) -> LayerCaches:
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for layer in self._layers.values() for pool in layer.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed pool; on the CPU its pages take memory only once they are written."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
    skip = -raw.data_ptr() % _ALIGNMENT
    return raw[skip : skip + size].view(dtype).view(shape)
