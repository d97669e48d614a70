"""Memory that a load does not need again, given back to the system at once.

Owns one hint to the allocator. Knows no model. Invariant: nothing that is in use moves or changes;
where the allocator takes no such hint, nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["trim"]


def trim() -> None:
    """Let the allocator return what was freed; glibc keeps freed blocks of many MiB for itself."""
    if sys.platform.startswith("linux"):
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if give_back is not None:
            give_back(0)
