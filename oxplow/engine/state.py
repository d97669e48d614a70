"""Moving cached state: slot to slot, to the host and back, and wiping it.

Owns reads and writes of the cache pools outside the forward pass. Knows no request and no policy.
Invariant: a read contains nothing beyond the tokens asked for, so that no neighbour's data can
leave; a write followed by a read of the same tokens gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from oxplow.cache.plan import blocks_for
from oxplow.cache.spec import Component, Per
from oxplow.errors import TransferError
from oxplow.model.caches import CacheTensors


class StateStore:
    """Access to a model's cache pools by slot and block."""

    def __init__(self, caches: CacheTensors, block_size: int) -> None:
        self.caches, self._block_size = caches, block_size

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int) -> None:
        """Copy every slot component from one slot to another."""
        for component, pool in self._pools():
            if component.per is Per.SLOT:
                pool[target].copy_(pool[source])

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zero every slot component of a slot."""
        for component, pool in self._pools():
            if component.per is Per.SLOT:
                pool[slot].zero_()

    @torch.inference_mode()
    def wipe(self, blocks: Sequence[int], slot: int) -> None:
        """Zero blocks and a slot that may hold bad numbers."""
        self.clear_slot(slot)
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        for component, pool in self._pools():
            if component.per is Per.BLOCK:
                pool.index_fill_(0, index, 0)

    @torch.inference_mode()
    def read(self, blocks: Sequence[int], slot: int | None, num_tokens: int) -> dict[str, Tensor]:
        """Copy `num_tokens` tokens' blocks and a slot to the host, under each component's name.

        Block components come as [blocks used, *shape] with zeros after the last whole unit. `slot`
        None leaves the slot components out.
        """
        used = blocks_for(num_tokens, self._block_size)
        index = torch.tensor(blocks[:used], dtype=torch.int64, device=self._device)
        copies: dict[str, Tensor] = {}
        for component, pool in self._pools():
            if component.per is Per.SLOT:
                if slot is not None:
                    copies[component_name(component)] = pool[slot].to("cpu", copy=True)
                continue
            units = component.shape[0]  # tokens or pools of tokens in one block
            kept = num_tokens * units // self._block_size
            rows = pool[index].to("cpu", copy=True)
            rows.view(-1, *component.shape[1:])[kept:].zero_()
            copies[component_name(component)] = rows
        return copies

    @torch.inference_mode()
    def write(self, tensors: Mapping[str, Tensor], blocks: Sequence[int], slot: int) -> None:
        """Put what `read` returned into blocks and a slot; TransferError if it does not fit."""
        used: int | None = None
        for component, pool in self._pools():
            name = component_name(component)
            if name not in tensors:
                raise TransferError("a cache component is missing", wanted=name)
            value = tensors[name]
            shape = tuple(component.shape)
            if component.per is Per.BLOCK:
                used = value.shape[0] if used is None else used
                shape = (used, *shape)
            if tuple(value.shape) != shape or value.dtype != pool.dtype:
                raise TransferError(
                    f"cache component {name} does not fit",
                    got=f"{tuple(value.shape)} {value.dtype}",
                    wanted=f"{shape} {pool.dtype}",
                )
            if component.per is Per.SLOT:
                pool[slot].copy_(value)
            else:
                index = torch.tensor(blocks[:used], dtype=torch.int64, device=self._device)
                pool.index_copy_(0, index, value.to(self._device))

    @torch.inference_mode()
    def write_slot(self, tensors: Mapping[str, Tensor], slot: int) -> None:
        """Put the slot components that `read` returned into a slot, and touch no block.

        The caller has checked their shapes and types.
        """
        for component, pool in self._pools():
            if component.per is Per.SLOT:
                pool[slot].copy_(tensors[component_name(component)])

    @property
    def _device(self) -> torch.device:
        first = self.caches.components[0]
        return self.caches[first.layer][first.name].device

    def _pools(self) -> Iterator[tuple[Component, Tensor]]:
        for component in self.caches.components:
            yield component, self.caches[component.layer][component.name]


def component_name(component: Component) -> str:
    """Return the name of a component inside a manifest: its layer and its own name."""
    return f"{component.layer}.{component.name}"
