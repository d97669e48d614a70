"""Where this user's files live, and which variables of the environment bear on speed and results.

Owns these two reads of the environment. It must not create a file or judge a value.
Invariant: nothing outside the named prefixes is read, so no secret can end in a record.
"""

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cache_home", "compute_variables"]

_PREFIXES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_TF32_",
    "CUBLAS_", "NCCL_", "HIP_", "ROCR_", "TRITON_", "MALLOC_", "PYTHONHASHSEED", "PYTHONMALLOC",
    "LD_PRELOAD", "DNNL_", "ONEDNN_", "OXPLOW_",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what can be made again: `$XDG_CACHE_HOME/oxplow` or `~/.cache/oxplow`.

    `environ` stands in for the environment of the process in tests.
    """
    env = os.environ if environ is None else environ
    base = env.get("XDG_CACHE_HOME", "")
    # A relative path is invalid by the XDG rules, and is ignored as they ask.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "oxplow"


def compute_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that threads, allocators, compilers and devices read, by name."""
    env = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(_PREFIXES) and not any(word in name for word in _SECRET)
    }
