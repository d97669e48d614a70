"""One parameter swept: a response curve, its cliffs, and a winner that holds on other shapes.

Owns the search and its judgement. Knows no op: what is timed is a callable of setting, shape and
seed. Invariant: a winner is chosen on tuning shapes and blamed or praised only on held-out ones,
with fresh samples; the default runs beside itself; a point that fails or cannot run is told.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from oxplow.errors import ContractError
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.measure import Interval, interval

__all__ = ["Space", "Swept", "sweep"]

_CLIFF = 1.3  # a neighbour's time, beyond which a step of the curve is a cliff
_LEAST_GAIN = 0.97

Timed: TypeAlias = Callable[[float, str, int], float]
"""(setting, shape, seed) -> seconds. Raises ContractError where a setting cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is swept: settings of `parameter` of `op` in order, the `default` among them."""

    op: str
    parameter: str
    settings: tuple[float, ...]
    default: float
    tuning: tuple[str, ...]
    held_out: tuple[str, ...]
    rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        if self.default not in self.settings or not self.held_out or not self.tuning:
            raise ContractError("a sweep needs its default, tuning and held-out shapes")
        if set(self.tuning) & set(self.held_out):
            raise ContractError("a held-out shape was tuned on", got=self.held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Ratios to the default by shape and setting; cliffs; the winner, and how it held."""

    ratios: Mapping[str, Mapping[float, float]]
    cliffs: tuple[tuple[str, float, float, float], ...]
    winner: float
    held: Interval
    control: Interval
    failed: Mapping[float, str]

    @property
    def holds(self) -> bool:
        """Tell whether the winner beats the default on held-out shapes, beyond equal runs."""
        return self.held.high < min(self.control.low, _LEAST_GAIN)


def sweep(space: Space, timed: Timed, *, repro: str) -> tuple[Swept, Finding]:
    """Time every setting on the tuning shapes, then the winner against the default on the others.

    The finding fails where another setting than the default holds its gain: the default is wrong.
    """
    began = time.perf_counter()
    rng = random.Random(space.seed)
    failed: dict[float, str] = {}
    ratios: dict[str, dict[float, float]] = {}
    for shape in space.tuning:
        ratios[shape] = _curve(space, timed, shape, failed, rng)
    open_ = [s for s in space.settings if s not in failed]
    winner = min(open_, key=lambda s: statistics.mean(ratios[shape][s] for shape in ratios))
    top, base, again = [], [], []
    for shape in space.held_out:
        for _ in range(space.rounds):
            seed = rng.randrange(1 << 30)
            took = _round(timed, {"top": winner, "base": space.default, "again": space.default},
                          shape, seed, rng)  # fmt: skip
            top.append(took["top"])
            base.append(took["base"])
            again.append(took["again"])
    swept = Swept(
        ratios=ratios, cliffs=_cliffs(ratios), winner=winner, held=interval(top, base, rng),
        control=interval(again, base, rng), failed=failed,
    )  # fmt: skip
    return swept, _finding(space, swept, repro, time.perf_counter() - began)


def _curve(
    space: Space, timed: Timed, shape: str, failed: dict[float, str], rng: random.Random
) -> dict[float, float]:
    taken: dict[float, list[float]] = {s: [] for s in space.settings if s not in failed}
    for setting in list(taken):
        try:
            timed(setting, shape, space.seed)
        except ContractError as error:
            if setting == space.default:
                raise
            failed[setting] = str(error)
            del taken[setting]
    for _ in range(space.rounds):
        seed = rng.randrange(1 << 30)
        order = list(taken)
        rng.shuffle(order)
        for setting in order:
            taken[setting].append(timed(setting, shape, seed))
    base = taken[space.default]
    return {
        s: statistics.median(a / b for a, b in zip(t, base, strict=True)) for s, t in taken.items()
    }


def _round(
    timed: Timed, arms: Mapping[str, float], shape: str, seed: int, rng: random.Random
) -> dict[str, float]:
    order = list(arms)
    rng.shuffle(order)
    return {name: timed(arms[name], shape, seed) for name in order}


def _cliffs(
    ratios: Mapping[str, Mapping[float, float]],
) -> tuple[tuple[str, float, float, float], ...]:
    found = []
    for shape, curve in ratios.items():
        known = sorted(curve.items())
        for (a, left), (b, right) in zip(known, known[1:], strict=False):
            step = max(left, right) / min(left, right)
            if step > _CLIFF:
                found.append((shape, a, b, round(right / left, 3)))
    return tuple(found)


def _finding(space: Space, swept: Swept, repro: str, cost_s: float) -> Finding:
    held = swept.held
    effect = Effect(
        name="winner / default, held out", value=held.ratio, unit="ratio", low=held.low,
        high=held.high, n=space.rounds * len(space.held_out),
    )  # fmt: skip
    series = {shape: tuple(sorted(curve.items())) for shape, curve in swept.ratios.items()}
    curve = Curve(
        title=f"{space.op}: time against {space.parameter}", x_label=space.parameter,
        y_label="time / default", series=series, log_x=min(space.settings) > 0,
    )  # fmt: skip
    name = f"{space.parameter} = {swept.winner:g}"
    if swept.winner == space.default:
        verdict, said = Verdict.PASS, f"the default {name} is the best of {len(space.settings)}"
    elif swept.holds:
        verdict, said = Verdict.FAIL, f"{name} takes {held.ratio:.2f} of the default's time"
    elif held.excludes_one and held.low > 1:
        verdict, said = Verdict.PASS, f"{name} won on tuning shapes and loses on held-out ones"
    else:
        verdict, said = Verdict.INCONCLUSIVE, f"{name} won on tuning shapes only, within noise"
    return Finding(
        probe="sweep", verdict=verdict, summary=said, effect=effect, cost_s=cost_s, repro=repro,
        locus=Locus(component="ops", op=space.op, parameter=space.parameter), curves=(curve,),
        excitation={"tuning": list(space.tuning), "held out": list(space.held_out)},
        evidence={
            "cliffs": [list(c) for c in swept.cliffs],
            "cannot run": {str(s): why for s, why in swept.failed.items()},
            "equal": [swept.control.low, swept.control.high],
        },
    )  # fmt: skip


def grid(low: int, high: int, factor: float = 2.0) -> Sequence[int]:
    """Return whole settings from `low` to `high`, each `factor` times the one before."""
    made, value = [], float(low)
    while round(value) <= high:
        made.append(round(value))
        value *= factor
    return made
