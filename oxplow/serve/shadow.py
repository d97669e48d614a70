"""Shadow mode: one call in so many of each op is computed again by its reference, in service.

Owns the wrapping at start and what is logged. Knows the judge, no request. Invariant: off means
off: without the setting the table that was chosen is returned, with the kernels themselves in it;
on, no answer changes, whatever the judge finds.
"""

from __future__ import annotations

import logging

from oxplow.contracts import CONTRACTS
from oxplow.feedback.live import BadCall, LiveJudge, observed_table
from oxplow.ops.table import OpTable

__all__ = ["shadowed"]

_log = logging.getLogger(__name__)
_MOST_BYTES = 64 << 20  # of one call's inputs: pools are copied before the call


def shadowed(ops: OpTable, every: int) -> tuple[OpTable, LiveJudge | None]:
    """Return the table to serve with, and the judge that watches it (None for `every` 0).

    Calls whose inputs exceed 64 MiB, such as those on large cache pools, are counted as skipped.
    """
    if every == 0:
        return ops, None
    judge = LiveJudge(CONTRACTS, every=every, most_bytes=_MOST_BYTES, tell=_tell)
    return observed_table(ops, judge.wrap), judge


def _tell(bad: BadCall) -> None:
    _log.error(
        "shadow: call %d of %s breaks its law at %s: %s; see oxplow check --only ops:%s",
        bad.number, bad.op, bad.tensor, bad.reason, bad.op,
    )  # fmt: skip
