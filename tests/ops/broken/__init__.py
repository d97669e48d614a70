"""Deliberately broken kernels, one module per family: each must be rejected for the stated reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oxplow.feedback.gate import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A kernel with one planted fault: the gate must stop at `reason` on `tensor`, at least on `case`."""

    op: str
    fault: str
    run: Callable[..., Any]
    case: str
    reason: Reason = Reason.NUMERICS
    tensor: str = ""
