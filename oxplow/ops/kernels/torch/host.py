"""What the kernels for few rows on a CPU share: when they may be used.

Owns the answer to "is this a CPU". Knows no op. Invariant: a kernel that reads results on the host
is offered on the CPU alone, and hands calls of many rows or other formats to its family's general
kernel, so the choice at start needs no number of rows.
"""

from __future__ import annotations

from oxplow.ops.table import Facts, Support


def on_host(facts: Facts) -> Support:
    """Accept the CPU alone: anywhere else the numbers would have to travel."""
    if facts.device.type != "cpu":
        return Support(ok=False, reason="reads small results on the host, which stops a device")
    return Support(ok=True, reason="few rows on a CPU: as few torch calls as can be")
