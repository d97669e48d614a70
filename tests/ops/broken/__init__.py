"""Deliberately broken kernels, one module per family: each is rejected for its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oxplow.feedback.gate import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A kernel with one planted fault: on `case` the gate stops at `reason`, naming `tensor`."""

    op: str
    fault: str
    run: Callable[..., Any]
    case: str
    reason: Reason = Reason.NUMERICS
    tensor: str = ""
