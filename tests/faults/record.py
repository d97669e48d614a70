"""What is known of a planted fault: where it is, who reported it, how it shows, how to switch it.

Owns the records and the split into tuned and held-out faults. Knows no fault and no probe.
Invariant: the split depends on the id alone and was fixed before any probe was tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

Plant = Callable[[], AbstractContextManager[None]]


class FaultClass(Enum):
    """The four classes of failures."""

    NUMERIC = "numeric"
    STATE = "state"
    CONCURRENCY = "concurrency"
    PERFORMANCE = "performance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Right answers at three depths; any member of a set is right at its depth."""

    components: frozenset[str]
    ops: frozenset[str]
    parameters: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault and its switch.

    `reports` are public records of the mechanism; `symptom` is what a user sees first and what
    `oxplow diagnose --symptom` is told; `excitation` says when it shows at all.
    """

    id: str
    title: str
    kind: FaultClass
    reports: tuple[str, ...]
    expected: Expected
    symptom: str
    excitation: str
    plant: Plant

    @property
    def held_out(self) -> bool:
        """Tell whether the fault was kept out of all tuning."""
        return is_held_out(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotApplicable:
    """A fault of the list that this engine cannot have yet, or at all, and why."""

    id: str
    title: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A change that must not be called a fault; `symptom` is the complaint that it is judged by."""

    id: str
    title: str
    plant: Plant
    symptom: str = "accuracy"


def is_held_out(fault_id: str) -> bool:
    """Split by the parity of a hash of the id."""
    return sha256(f"oxplow-faults-1 {fault_id}".encode()).digest()[0] % 2 == 1


def expected(components: str, ops: str, parameters: str = "") -> Expected:
    """Write an Expected as words: `expected("ops", "router", "bias")`."""
    return Expected(
        components=frozenset(components.split()),
        ops=frozenset(ops.split()),
        parameters=frozenset(parameters.split()),
    )
