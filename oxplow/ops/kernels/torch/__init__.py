"""Portable kernels in plain torch: correct on any torch device, no Python loop over tokens.

One family per file; `KERNELS` concatenates the families.
"""

from oxplow.ops.kernels.torch import (
    dense,
    dense_host,
    hyper,
    hyper_host,
    index,
    kda,
    kda_host,
    mla,
    mla_host,
    moe,
    moe_host,
    sampling,
    vision,
)

__all__ = ["KERNELS"]

KERNELS = (
    *dense.KERNELS,
    *dense_host.KERNELS,
    *hyper.KERNELS,
    *hyper_host.KERNELS,
    *kda.KERNELS,
    *kda_host.KERNELS,
    *mla.KERNELS,
    *mla_host.KERNELS,
    *index.KERNELS,
    *moe.KERNELS,
    *moe_host.KERNELS,
    *vision.KERNELS,
    *sampling.KERNELS,
)
