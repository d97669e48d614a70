"""What a candidate must leave alone in the process that judges it: names and settings of torch.

Owns a record of both, the comparison after a call, and the repair. Knows no contract. Invariant:
after `repair` every recorded name and setting has its old value. A candidate that runs in the
judge's process can still get around this (threads, C memory, frames); isolation is another tool's
work. This one stops a patch from deciding a verdict and from outliving its examination.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

_MISSING = object()
_LAZY = frozenset({"manual_seed"})
"""Names that torch itself wraps when it imports its compiler, which any kernel may cause."""
_OWNERS: tuple[ModuleType | type, ...] = (torch, torch.Tensor, torch.nn.functional, torch.linalg)


def _set_grad(value: bool) -> None:
    torch.set_grad_enabled(value)


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "gradients": (torch.is_grad_enabled, _set_grad),
}


class ProcessWatch:
    """A record of torch's names and settings, and of the names of `owners`, taken when made.

    Names that a module gains later are no offence (torch imports lazily); a class must not gain
    any.
    """

    def __init__(self, *owners: ModuleType | type) -> None:
        self._names = [(owner, dict(vars(owner))) for owner in (*_OWNERS, *owners)]
        self._settings = {name: read() for name, (read, _) in _SETTINGS.items()}

    def repair(self) -> list[str]:
        """Put back what changed since the record; return the changed names and settings."""
        changed = []
        for owner, before in self._names:
            now = vars(owner)
            names = before.keys() | now.keys() if isinstance(owner, type) else before.keys()
            for name in names - _LAZY:
                if now.get(name, _MISSING) is before.get(name, _MISSING):
                    continue
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
                changed.append(f"{owner.__name__}.{name}")
        for name, value in self._settings.items():
            read, write = _SETTINGS[name]
            if read() != value:
                write(value)
                changed.append(f"the setting of {name}")
        return sorted(changed)
