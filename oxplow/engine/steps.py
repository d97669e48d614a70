"""One step, as data: whose tokens are computed, and what it did to others.

Owns the records that the scheduler hands to the batch builder and the core. Knows no tensor and no
policy.
Invariant: a choice appears at most once in a step, and decode rows come first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oxplow.engine.request import Choice


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Rows of one choice in a step: tokens [start, stop) of its sequence."""

    choice: Choice
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """How many rows."""
        return self.stop - self.start

    @property
    def is_decode(self) -> bool:
        """Tell whether this is one token on top of existing state."""
        return self.start > 0 and self.num_tokens == 1

    @property
    def reaches_end(self) -> bool:
        """Tell whether the last row predicts a token that is not known yet."""
        return self.stop == len(self.choice.token_ids)


@dataclass(slots=True)
class StepPlan:
    """What the next step computes, decode rows first, and who lost memory for it."""

    rows: list[Scheduled] = field(default_factory=list)
    preempted: list[Choice] = field(default_factory=list)
    admitted: list[Choice] = field(default_factory=list)

    @property
    def decode_rows(self) -> int:
        """How many choices decode."""
        return sum(r.is_decode for r in self.rows)

    @property
    def prefill_tokens(self) -> int:
        """How many prompt rows there are."""
        return sum(r.num_tokens for r in self.rows if not r.is_decode)

    @property
    def prefill_pairs(self) -> float:
        """How much context all prompt rows read together, in tokens."""
        return sum(
            r.num_tokens * (r.start + r.num_tokens / 2) for r in self.rows if not r.is_decode
        )
