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
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}


class Fence:
    """A copy of a tensor inside a larger buffer whose margins are NaN (or -1) and are checked
    later. `padding` elements behind every row (the last axis) belong to the margins.
    """

    def __init__(self, source: Tensor, device: torch.device, padding: int = 0) -> None:
        shape = (*source.shape[:-1], source.shape[-1] + padding) if padding else source.shape
        whole, self._buffer, self._start = _guarded(tuple(shape), source.dtype, device)
        self._whole = whole
        self._inner = whole[..., : source.shape[-1]] if padding else whole
        self._padding = whole[..., source.shape[-1] :] if padding else None
        self.refill(source)

    def refill(self, source: Tensor) -> None:
        """Copy other values of the same shape and dtype into the same memory."""
        if source.numel():
            self._inner.copy_(source)
        self._before = self._inner.clone()
        # the candidate gets a tensor object of its own: what it does to it is seen, and ends here
        self.handed = self._inner.detach()

    @property
    def contents(self) -> Tensor:
        """What the fenced memory holds now, whatever became of the tensor that was handed out."""
        return self._inner

    def intact(self) -> bool:
        """True when no guard byte changed."""
        spare = self._padding
        return _guards_intact(self._buffer, self._start, self._whole) and (
            spare is None or bool((_bytes(spare) == _NAN_BYTE).all())
        )

    def unchanged(self) -> bool:
        """True when the tensor still has its first bits."""
        return torch.equal(_bytes(self._inner), _bytes(self._before))

    def unmoved(self) -> bool:
        """True when the tensor that was handed out still names the same memory in the same way."""
        mine, theirs = self._inner, self.handed
        return (
            theirs.data_ptr() == mine.data_ptr()
            and theirs.shape == mine.shape
            and theirs.stride() == mine.stride()
            and theirs.dtype is mine.dtype
        )

    def shares_memory(self, other: Tensor) -> bool:
        """True when `other` reaches into this fence's buffer, through whatever storage object."""
        return share_memory(self._buffer, other)


def fenced(source: Tensor, device: torch.device, padding: int = 0) -> Fence:
    """Copy `source` to `device` behind guards; the copy keeps shape and dtype.

    It is contiguous unless `padding` spreads its rows: then rows start `padding` elements apart
    from each other, at addresses of no particular alignment.
    """
    return Fence(source, device, padding)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """True when the storages of two tensors overlap in memory, by address."""
    (a, a_end), (b, b_end) = _reach(one), _reach(other)
    return one.device == other.device and a < b_end and b < a_end


def _reach(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


class PoisonedAllocations(TorchDispatchMode):
    """While active, uninitialised allocations are NaN (or -1) inside guards: unwritten outputs
    show.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._made: list[tuple[Tensor, int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace plain dense allocations; pass everything else through."""
        out = func(*args, **(kwargs or {}))
        if func not in _EMPTY or out.layout != torch.strided or out.device.type == "meta":
            return out
        length = out.untyped_storage().nbytes() // out.element_size()
        flat, buffer, start = _guarded((length,), out.dtype, out.device)
        self._made.append((buffer, start, flat))
        return flat.as_strided(out.shape, out.stride(), flat.storage_offset())

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
