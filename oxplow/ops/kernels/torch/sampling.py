"""Portable sampling kernels (being written)."""

from oxplow.ops.table import Kernel

KERNELS: tuple[Kernel, ...] = ()
