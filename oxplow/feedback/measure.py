"""Paired timing: two ways of doing the same work, interleaved in one run, with an interval.

Owns the schedule of repeats, the statistics and the machine's bandwidth ceiling. Knows nothing of
what it times. Invariant: candidates alternate in random order inside one process, every repeat
gets fresh inputs from its maker, the statistic is the median of log ratios with a bootstrap
interval, and a control (the first candidate against itself) tells how wide "equal" is on this
machine today.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from oxplow.errors import ContractError

Work = Callable[[int], float]
"""Does the work once on inputs made from the given seed; returns the seconds that count."""

_BOOTSTRAPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio with its 99% bootstrap interval."""

    ratio: float
    low: float
    high: float

    @property
    def excludes_one(self) -> bool:
        """True when the two sides really differ."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Seconds of every repeat by name, the ratio second/first, and the control first/first."""

    seconds: Mapping[str, tuple[float, ...]]
    ratio: Interval
    control: Interval

    def median(self, name: str) -> float:
        """Return the median seconds of one side."""
        return statistics.median(self.seconds[name])

    @property
    def is_sound(self) -> bool:
        """False when the control itself claims a difference: the machine was too busy to tell."""
        return not self.control.excludes_one


def compare(
    first: tuple[str, Work], second: tuple[str, Work], *, pairs: int, seed: int = 0
) -> Comparison:
    """Time `first` and `second` in `pairs` interleaved rounds after one untimed round each.

    A round runs first, second and first again (the control) in random order on the same fresh seed.
    Raises ContractError for fewer than 3 pairs or a time that is not positive.
    """
    if pairs < 3:
        raise ContractError("paired timing needs repeats", got=pairs, wanted=">= 3 pairs")
    names = {"first": first, "second": second, "control": first}
    rng = random.Random(seed)
    for _, work in (first, second):
        work(seed)
    taken: dict[str, list[float]] = {key: [] for key in names}
    for round_ in range(pairs):
        order = list(names)
        rng.shuffle(order)
        for key in order:
            spent = names[key][1](seed + 1 + round_)
            if not spent > 0:
                raise ContractError("a timed call took no time", got=spent, where=names[key][0])
            taken[key].append(spent)
    return Comparison(
        seconds={first[0]: tuple(taken["first"]), second[0]: tuple(taken["second"])},
        ratio=interval(taken["second"], taken["first"], rng),
        control=interval(taken["control"], taken["first"], rng),
    )


def interval(top: Sequence[float], bottom: Sequence[float], rng: random.Random) -> Interval:
    """Return the median of the paired ratios top/bottom with a 99% bootstrap interval."""
    logs = [math.log(a / b) for a, b in zip(top, bottom, strict=True)]
    medians = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(_BOOTSTRAPS))
    cut = int(0.005 * _BOOTSTRAPS)
    return Interval(
        ratio=math.exp(statistics.median(logs)),
        low=math.exp(medians[cut]),
        high=math.exp(medians[-1 - cut]),
    )


def read_bandwidth(device: torch.device, size_bytes: int = 256 * 2**20, repeats: int = 5) -> float:
    """Return the best measured read bandwidth of `device` in bytes per second (a sum over a
    large array).
    """
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        source.sum().item()  # the item waits for the device
        best = min(best, time.perf_counter() - started)
    return size_bytes / best
