"""Memory that a load does not need again, given back to the system at once.

Owns two hints, to the kernel and to the allocator. Knows no model. Invariant: contents never
change: a page that is given back is read from its file when somebody needs it after all.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

__all__ = ["page_out", "trim"]

_MADV_PAGEOUT = 21  # Linux 5.4 and later; others refuse, and nothing is lost


def page_out(tensor: Tensor) -> None:
    """Let the system take back the whole pages of a CPU tensor whose copy is used from now on.

    Without it a weight that was copied out of a mapped file counts twice until memory is short.
    """
    if tensor.device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)


def trim() -> None:
    """Let the allocator return what was freed; glibc keeps freed blocks of many MiB for itself."""
    if sys.platform.startswith("linux"):
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if give_back is not None:
            give_back(0)
