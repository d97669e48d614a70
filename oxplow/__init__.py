"""Oxplow: serve, debug and speed up hybrid linear-attention models.

Owns the curated public names of the package. It must not import torch: every export is resolved on
first use, so that `oxplow --version` and the parts without tensors start at once.
Invariant: `__all__` is exactly what a user may rely on; a golden file pins it.
"""

from oxplow.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    KernelUnavailable,
    OxplowError,
    RequestError,
    TransferError,
    WeightError,
)

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "ConfigError",
    "ContractError",
    "KernelUnavailable",
    "OxplowError",
    "RequestError",
    "TransferError",
    "WeightError",
    "__version__",
]
