"""How sure a figure is: intervals of shares and means, and the exact test of paired flips.

Owns the formulas. Knows no question and no model.
Invariant: every interval is two-sided at 95%, and nothing here draws a random number, so a record
evaluated twice gives the same digits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from oxplow.errors import ConfigError

__all__ = ["Interval", "mcnemar", "mean_interval", "paired_share", "ratio_interval", "wilson"]

_Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95% interval; the ends are NaN where there is too little to tell."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True when the figure differs from 0 for sure."""
        return self.low > 0 or self.high < 0


def wilson(num_right: int, num_items: int) -> Interval:
    """Return a share with its Wilson score interval, which stays inside 0 to 1 even at the ends.

    Raises ConfigError without items.  Source: E. B. Wilson, JASA 22 (1927).
    """
    if num_items < 1 or not 0 <= num_right <= num_items:
        raise ConfigError("no share of this", got=f"{num_right} of {num_items}")
    share, z2 = num_right / num_items, _Z * _Z
    middle = (share + z2 / (2 * num_items)) / (1 + z2 / num_items)
    half = math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    half *= _Z / (1 + z2 / num_items)
    # At the ends the formula gives 0 and 1 but for rounding.
    low = 0.0 if num_right == 0 else middle - half
    high = 1.0 if num_right == num_items else middle + half
    return Interval(share, low, high)


def mcnemar(num_lost: int, num_gained: int) -> float:
    """Return the two-sided exact p-value that losses and gains are one coin's falls.

    Only items that changed count. Source: Q. McNemar, Psychometrika 12 (1947), binomial form.
    """
    changed, fewer = num_lost + num_gained, min(num_lost, num_gained)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(2 * tail / 2**changed)) if changed else 1.0


def paired_share(num_lost: int, num_gained: int, num_items: int) -> Interval:
    """Return the change of a share between two paired runs, with its Wald interval.

    Raises ConfigError without items.
    """
    if num_items < 1:
        raise ConfigError("no share of this", got=f"{num_lost}, {num_gained} of {num_items}")
    change = (num_gained - num_lost) / num_items
    spread = num_gained + num_lost - (num_gained - num_lost) ** 2 / num_items
    half = _Z * math.sqrt(max(0.0, spread)) / num_items
    return Interval(change, change - half, change + half)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with Student's interval; one value alone has none (NaN)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = _student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(tops: Sequence[float], bottoms: Sequence[float]) -> Interval:
    """Return sum(tops) / sum(bottoms) with Student's interval over the pairs.

    The spread is that of the linearised ratio: each pair's residual over the mean bottom.
    Raises ConfigError where the bottoms sum to nothing.
    """
    total = sum(bottoms)
    if not total > 0:
        raise ConfigError("no ratio of this", got=f"{len(bottoms)} parts that sum to {total}")
    ratio, mean = sum(tops) / total, total / len(bottoms)
    residuals = [(t - ratio * b) / mean for t, b in zip(tops, bottoms, strict=True)]
    spread = mean_interval(residuals)
    return Interval(ratio, ratio + spread.low - spread.value, ratio + spread.high - spread.value)


def _student(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t.

    Exact for 1 and 2 degrees of freedom, else Cornish-Fisher, off by less than 0.3% from 3 on.
    Source: Abramowitz and Stegun 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**k for k, term in enumerate(terms))
