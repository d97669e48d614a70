"""Does a kernel's error grow faster with length or position than its arithmetic must?

Owns the sweep, the slope with its interval and the finding. Knows contracts and callables, no
model. Invariant: kernel and plain float32 are both held against float64, never against each other
alone; a sweep says which power random rounding may have, and a slope fails only if all draws exceed
that and the baseline's own slope.

Source: feedback-and-agent.md 2.4. Errors of a sum or a recurrence grow like sqrt(length) at most
where they are random and like length where they are biased: 1/4 over the first separates the two. A
rotary angle is rounded in proportion to its position, in the baseline too: there nothing is added
to the baseline's power. An error over 8 times the baseline's fails whatever its slope.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS, kda_cases
from oxplow.contracts.laws import UNIT_ROUNDOFF
from oxplow.contracts.schema import Args, OpContract
from oxplow.errors import ContractError
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.gate import reference_values
from oxplow.feedback.shapes import resized

__all__ = ["SWEEPS", "GrowthSweep", "growth_finding"]

Run: TypeAlias = Callable[..., Any]
Build: TypeAlias = Callable[[int, torch.Generator], Args]

_MOST_RATIO = 8.0
_EXCESS = 0.25
_RANDOM = 0.5  # the power of random rounding in a sum
_GROWING = 0.75  # halfway from random to biased
_LEAST_ERROR = UNIT_ROUNDOFF[torch.float32] / 4  # a luckier baseline says nothing
_DRAWS = 7  # the median of 7 slopes lies between the least and the largest in 98.4%


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSweep:
    """What is grown: `build(point, generator)` makes inputs; `along` names the quantity.

    `power` is how fast random rounding may let the error grow where the baseline's does not.
    """

    op: str
    along: str
    points: Sequence[int]
    build: Build
    power: float = _RANDOM
    draws: int = _DRAWS
    device: torch.device = torch.device("cpu")


def _axis(op: str, axis: str, size: int, g: torch.Generator) -> Args:
    contract = CONTRACTS[op]
    args = contract.cases[0].build(g)
    return resized(contract, args, {axis: size}, g)


def _kda(tokens: int, g: torch.Generator) -> Args:
    """A kept state, weak decay and weak writes: strong ones would overwrite what went wrong."""
    args = kda_cases.prompts(g, lengths=(tokens,), sizes=(2, 16, 16), gate=kda_cases.weak)
    return {**args, "beta": args["beta"] * 0.01}


def _patches(distance: int, g: torch.Generator) -> Args:
    """Patches `distance` apart: the rotary angles grow, all else stays."""
    args = CONTRACTS["vision_attention"].case("one_image").build(g)
    return {**args, "coords": args["coords"] * distance}


SWEEPS: Mapping[str, GrowthSweep] = {
    "kda_prefill": GrowthSweep(
        op="kda_prefill", along="tokens of one prompt, little forgotten",
        points=(32, 64, 128, 256, 512), build=_kda,
    ),
    "linear": GrowthSweep(
        op="linear", along="length of the sum",
        points=(32, 128, 512, 2048), build=partial(_axis, "linear", "K"),
    ),
    "rms_norm": GrowthSweep(
        op="rms_norm", along="width of a row",
        points=(32, 128, 512, 2048), build=partial(_axis, "rms_norm", "D"),
    ),
    "vision_attention": GrowthSweep(
        op="vision_attention", along="distance of neighbouring patches",
        points=(1, 4, 16, 64), build=_patches, power=0.0,
    ),
}  # fmt: skip
"""The ops whose error has a direction to grow in, by name."""


def growth_finding(
    contract: OpContract, run: Run, sweep: GrowthSweep, *, seed: int = 0, repro: str
) -> Finding:
    """Measure the errors at each point and how much faster they grow than they may.

    `run` is called with the contract's inputs by name. Effect: the excess of the kernel's power
    over the greater of the baseline's and the sweep's, with the least and largest of the draws.
    Raises ContractError under 3 points or draws.
    """
    if len(sweep.points) < 3 or sweep.draws < 3:
        raise ContractError(
            "a slope needs points and draws",
            got=f"{len(sweep.points)}, {sweep.draws}",
            wanted=">= 3 each",
        )
    began = time.perf_counter()
    errors = [
        [_errors(contract, run, sweep, _generator(seed, d, p), p) for p in sweep.points]
        for d in range(sweep.draws)
    ]
    own = [_power(sweep.points, [mine for mine, _, _ in row]) for row in errors]
    plain = [_power(sweep.points, [base for _, base, _ in row]) for row in errors]
    excess = sorted(a - max(b, sweep.power) for a, b in zip(own, plain, strict=True))
    ratios = [statistics.median(row[i][0] / row[i][1] for row in errors)
              for i in range(len(sweep.points))]  # fmt: skip
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    power, tensor = statistics.median(own), errors[0][worst][2]
    told = (
        f"{sweep.op}: over {sweep.along} the error of {tensor} grows with power {power:+.2f}"
        f" (plain float32: {statistics.median(plain):+.2f}) and is {ratios[worst]:.3g} times plain"
        f" float32's at {sweep.points[worst]}"
    )
    base = Finding(
        probe="growth",
        verdict=Verdict.PASS,
        summary=told,
        effect=Effect(
            name="excess power of the error", value=statistics.median(excess), unit="power",
            low=excess[0], high=excess[-1], bound=_EXCESS, n=sweep.draws,
        ),
        excitation={"op": sweep.op, "along": sweep.along, "points": list(sweep.points),
                    "draws": sweep.draws, "seed": seed},
        evidence={"ratios": ratios, "power": power, "plain_power": statistics.median(plain)},
        curves=(_curve(sweep, errors),),
        repro=repro,
        cost_s=time.perf_counter() - began,
    )  # fmt: skip
    if excess[0] <= _EXCESS and ratios[worst] <= _MOST_RATIO:
        return base
    kind = "it adds up or goes by position" if power > _GROWING else "a stage keeps fewer bits"
    locus = Locus(component="ops", op=sweep.op, parameter=tensor)
    return replace(base, verdict=Verdict.FAIL, summary=f"{told}: {kind}", locus=locus)


def _generator(seed: int, draw: int, point: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1009 + draw) * 100_003 + point)


def _errors(
    contract: OpContract, run: Run, sweep: GrowthSweep, g: torch.Generator, point: int
) -> tuple[float, float, str]:
    """Return the relative errors of kernel and baseline at the worst tensor, and its name."""
    args = sweep.build(point, g)
    truth = reference_values(contract, args, torch.float64)
    plain = reference_values(contract, args, torch.float32)
    handed = {
        n: v.to(sweep.device, copy=True) if isinstance(v, Tensor) else v for n, v in args.items()
    }
    out = run(**handed)
    values = () if out is None else out if isinstance(out, tuple) else (out,)
    got = dict(zip(contract.outputs, values, strict=True))
    got |= {n: handed[n] for n in contract.mutates}
    told = []
    for name, value in got.items():
        if value.is_floating_point():
            mine, base = (_relative(v, truth[name]) for v in (value, plain[name]))
            told.append((mine, max(base, _LEAST_ERROR), name))
    return max(told, key=lambda entry: entry[0] / entry[1])


def _relative(value: Tensor, truth: Tensor) -> float:
    """Return the root mean square error over that of the truth, where the truth is finite."""
    finite = truth.isfinite()
    wanted = truth[finite].double()
    error = (value.detach().cpu().double()[finite] - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return float(error) if bool(error.isfinite()) else 1e30


def _power(points: Sequence[int], errors: Sequence[float]) -> float:
    """Return the least-squares power of `errors` over `points`."""
    x = [math.log(p) for p in points]
    y = [math.log(max(e, _LEAST_ERROR)) for e in errors]
    return statistics.linear_regression(x, y).slope


def _curve(sweep: GrowthSweep, errors: Sequence[Sequence[tuple[float, float, str]]]) -> Curve:
    def series(which: int, times: float = 1.0) -> tuple[tuple[float, float], ...]:
        rows = ([float(row[i][which]) for row in errors] for i in range(len(sweep.points)))
        medians = (max(statistics.median(row) * times, 1e-12) for row in rows)
        return tuple((float(p), m) for p, m in zip(sweep.points, medians, strict=True))

    return Curve(
        title=f"Error of {sweep.op}",
        x_label=sweep.along,
        y_label="relative error against float64",
        series={"kernel": series(0), "plain float32": series(1),
                "allowed": series(1, _MOST_RATIO)},
        log_x=True,
        log_y=True,
    )  # fmt: skip
