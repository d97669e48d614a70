"""Fenced and poisoned memory for the correctness gate.

Owns guard zones around tensors and an allocation mode that hands poisoned, guarded buffers to a
kernel. Knows nothing of contracts. Invariant: every byte of a guard is known, so a single stray
write is seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_BYTES = 512
"""Size of each guard zone, in bytes: more than the widest vector store of any backend."""

_NAN_BYTE = 0xFF  # 0xFFFF.. is a NaN in every float format we use, and -1 in every integer format
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}


class Fence:
    """A copy of a tensor inside a larger buffer whose margins are NaN (or -1) and are checked
    later.
    """

    def __init__(self, source: Tensor, device: torch.device) -> None:
        self.inner, self._buffer, self._start = _guarded(tuple(source.shape), source.dtype, device)
        if source.numel():
            self.inner.copy_(source)
        self._before = self.inner.clone()

    def intact(self) -> bool:
        """True when no guard byte changed."""
        return _guards_intact(self._buffer, self._start, self.inner)

    def unchanged(self) -> bool:
        """True when the tensor still has its first bits."""
        return torch.equal(_bytes(self.inner), _bytes(self._before))

    def shares_memory(self, other: Tensor) -> bool:
        """True when `other` lives in this fence's buffer."""
        return other.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()


def fenced(source: Tensor, device: torch.device) -> Fence:
    """Copy `source` to `device` behind guards; the copy is contiguous and keeps shape and dtype."""
    return Fence(source, device)


class PoisonedAllocations(TorchDispatchMode):
    """While active, uninitialised allocations are NaN (or -1) inside guards: unwritten outputs
    show.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace plain dense allocations; pass everything else through."""
        out = func(*args, **(kwargs or {}))
        if func not in _EMPTY or out.layout != torch.strided or not out.is_contiguous():
            return out
        inner, buffer, start = _guarded(tuple(out.shape), out.dtype, out.device)
        self._made.append((buffer, start, inner))
        return inner

    def intact(self) -> bool:
        """True when no guard of any allocation changed."""
        return all(_guards_intact(buffer, start, inner) for buffer, start, inner in self._made)


def _guarded(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    size = torch.Size(shape).numel() * dtype.itemsize
    buffer = torch.full(
        (GUARD_BYTES + size + GUARD_BYTES,), _NAN_BYTE, dtype=torch.uint8, device=device
    )
    inner = buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)
    return inner, buffer, GUARD_BYTES


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _guards_intact(buffer: Tensor, start: int, inner: Tensor) -> bool:
    end = start + inner.numel() * inner.element_size()
    return bool((buffer[:start] == _NAN_BYTE).all() and (buffer[end:] == _NAN_BYTE).all())
