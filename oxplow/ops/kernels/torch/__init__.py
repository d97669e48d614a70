"""Portable kernels in plain torch: correct on any torch device, no Python loop over tokens.

One family per file; `KERNELS` concatenates the families.
"""

from oxplow.ops.kernels.torch import dense, hyper, index, kda, mla, moe, sampling, vision

__all__ = ["KERNELS"]

KERNELS = (
    *dense.KERNELS,
    *hyper.KERNELS,
    *kda.KERNELS,
    *mla.KERNELS,
    *index.KERNELS,
    *moe.KERNELS,
    *vision.KERNELS,
    *sampling.KERNELS,
)
