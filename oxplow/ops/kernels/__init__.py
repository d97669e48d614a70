"""Every kernel that ships with Oxplow, one folder per way of computing.

`builtin_kernels()` gathers them explicitly; importing a kernel module registers nothing.
"""

from oxplow.ops.kernels.torch import KERNELS as TORCH_KERNELS
from oxplow.ops.table import Kernel

__all__ = ["builtin_kernels"]


def builtin_kernels() -> tuple[Kernel, ...]:
    """Return every kernel that this installation can offer, usable here or not."""
    return TORCH_KERNELS
