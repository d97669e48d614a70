"""Oxplow: serve, debug and speed up hybrid linear-attention models.

Owns the curated public names of the package. It must not import torch: every export is resolved on
first use, so that `oxplow --version` and the parts without tensors start at once.
Invariant: `__all__` is exactly what a user may rely on; a golden file pins it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from oxplow.config import RuntimeConfig, load_config
    from oxplow.serve.llm import LLM
    from oxplow.trace import EventRing

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "ConfigError",
    "ContractError",
    "EventRing",
    "KernelUnavailable",
    "OxplowError",
    "RequestError",
    "RuntimeConfig",
    "TransferError",
    "WeightError",
    "__version__",
    "load_config",
]

# name -> module that defines it; resolved by __getattr__ on first use.
_LAZY = {
    "LLM": "oxplow.serve.llm",
    "EventRing": "oxplow.trace",
    "RuntimeConfig": "oxplow.config",
    "load_config": "oxplow.config",
}


def __getattr__(name: str) -> object:
    """Resolve a lazy export; raise AttributeError for any other name."""
    if name not in _LAZY:
        raise AttributeError(f"module 'oxplow' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """List the public names, the lazy ones too."""
    return sorted(__all__)
