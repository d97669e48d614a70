"""Portable mla kernels (being written)."""

from oxplow.ops.table import Kernel

KERNELS: tuple[Kernel, ...] = ()
