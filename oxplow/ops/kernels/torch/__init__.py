"""Portable kernels in plain torch: correct on any torch device, no Python loop over tokens.

One family per file; `KERNELS` concatenates the families.
"""

from oxplow.ops.kernels.torch import dense

__all__ = ["KERNELS"]

KERNELS = (*dense.KERNELS,)
