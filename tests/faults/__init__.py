"""Planted faults and clean controls: what the instruments are measured with.

Each fault re-creates the mechanism of a public report in our engine while its context is open; a
control changes something that must not matter. Nothing of this ships in the wheel.
"""

from tests.faults.catalogue import CONTROLS, FAULTS, NOT_APPLICABLE
from tests.faults.record import Control, Expected, Fault, FaultClass, NotApplicable

__all__ = [
    "CONTROLS",
    "FAULTS",
    "NOT_APPLICABLE",
    "Control",
    "Expected",
    "Fault",
    "FaultClass",
    "NotApplicable",
]
