"""One op's kernel against the clock: paired, beside itself, and held against the machine's floor.

Owns the timing of contract cases and its finding. Knows no engine. Invariant: nothing is timed
before the gate has passed it; every timed call has inputs of its own that no call has seen; equal
work runs beside, and where that looks different nothing is claimed; a time under the floor is
invalid, never fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.schema import Args, Case, CaseKind, OpContract, Role
from oxplow.errors import ConfigError
from oxplow.feedback.calibrate import Floor, MachineProfile, settle
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.gate import cast_args, examine
from oxplow.feedback.measure import Comparison, Work, compare
from oxplow.feedback.shapes import grown_case
from oxplow.ops.table import Kernel

__all__ = ["OpPlan", "OpTiming", "op_finding", "roofline", "service_case", "time_op"]

_SAMPLE_S = 2e-3  # of work in one timed sample: well over the clock's and the scheduler's grain
_MOST_CALLS = 256
_MOST_BYTES = 1 << 27  # of inputs held for one sample
_FLOOR_SLACK = 0.8
_SERVICE_FLOOR_S = 2e-5
_WIDEST = 0.25  # half width, as a ratio, beyond which a sample says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """What to time: one case in one dtype on one device, `pairs` rounds."""

    contract: OpContract
    case: Case
    dtype: torch.dtype
    device: torch.device
    pairs: int = 15
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTiming:
    """What was timed. `seconds` is one call's median, `comparison` per sample of `calls` calls.

    Its ratio is other / kernel, or kernel / kernel where there is no other.
    """

    kernel: str
    other: str
    seconds: float
    best_s: float
    calls: int
    floor: Floor
    comparison: Comparison

    @property
    def floor_share(self) -> float:
        """Floor over median: 1 is as fast as this machine can be."""
        return self.floor.seconds / self.seconds

    @property
    def is_possible(self) -> bool:
        """False where even the best sample is under what the machine can do."""
        return self.best_s >= _FLOOR_SLACK * self.floor.seconds


def service_case(contract: OpContract, profile: MachineProfile) -> Case:
    """Return an ordinary case grown until its floor is well over a call's cost, else the first."""
    ordinary = [c for c in contract.cases if c.kind is CaseKind.ORDINARY]
    for case in ordinary:
        grown = grown_case(
            contract, case, lambda a: profile.floor(contract.cost(a)).seconds >= _SERVICE_FLOOR_S
        )
        if grown is not None:
            return grown
    return ordinary[0]


def time_op(
    plan: OpPlan, kernel: Kernel, other: Kernel | None, profile: MachineProfile
) -> OpTiming:
    """Gate both kernels on the case, then time them. Raises ConfigError for one that fails."""
    for candidate in (kernel, other):
        if candidate is not None:
            told = examine(
                plan.contract, candidate.name, candidate.run, plan.case,
                dtype=plan.dtype, device=plan.device,
            )  # fmt: skip
            if not told.ok:
                raise ConfigError("a wrong kernel is not timed", got=str(told))
    args = _inputs(plan, plan.seed)
    calls = _calls(plan, kernel.run, args)
    first = (kernel.name, _work(plan, kernel.run, calls))
    second = first if other is None else (f"{other.name}.", _work(plan, other.run, calls))
    told_times = compare(first, second, pairs=plan.pairs, seed=plan.seed)
    taken = told_times.seconds[kernel.name]
    return OpTiming(
        kernel=kernel.name,
        other="" if other is None else other.name,
        seconds=told_times.median(kernel.name) / calls,
        best_s=min(taken) / calls,
        calls=calls,
        floor=profile.floor(plan.contract.cost(args), _width(plan.dtype)),
        comparison=told_times,
    )


def op_finding(
    plan: OpPlan, timing: OpTiming, profile: MachineProfile, *, repro: str, cost_s: float
) -> Finding:
    """Judge a timing: invalid under the floor, inconclusive in noise, fail where the other wins.

    Without another kernel a sound timing passes; its share of the floor is told, not judged.
    """
    ratio, control = timing.comparison.ratio, timing.comparison.control
    shown = timing.comparison.ratio if timing.other else control
    effect = Effect(
        name=f"{timing.other or timing.kernel} / {timing.kernel}", value=shown.ratio, unit="ratio",
        low=shown.low, high=shown.high, n=plan.pairs,
    )  # fmt: skip
    locus = Locus(component="ops", op=plan.contract.name, parameter=timing.kernel)
    best = timing.floor.seconds / timing.best_s
    told = f"{timing.seconds * 1e6:.1f} us, {timing.floor_share:.0%} of the limit (best {best:.0%})"
    wide = control.high / control.low > (1 + _WIDEST) ** 2
    verdict = Verdict.PASS
    if not timing.is_possible:
        verdict = Verdict.INVALID
        told += (
            f": under the floor of {timing.floor.seconds * 1e6:.1f} us ({timing.floor.bound_by})"
        )
    elif not timing.comparison.is_sound:
        verdict = Verdict.INCONCLUSIVE
        told += f"; equal work differs by {abs(control.ratio - 1):.0%} here: too busy to tell"
    elif not timing.other:
        told += "; too noisy for a comparison" if wide else ""
    elif not ratio.excludes_one:
        verdict = Verdict.INCONCLUSIVE
        told += f"; {timing.other} takes {ratio.low:.2f} to {ratio.high:.2f} of its time"
    elif ratio.high < control.low:
        verdict = Verdict.FAIL
        told += f"; {timing.other} takes only {ratio.ratio:.2f} of its time"
    elif ratio.low > control.high:
        told += f"; {timing.other} takes {ratio.ratio:.2f} times as long"
    else:
        verdict = Verdict.INCONCLUSIVE
        told += f"; {timing.other} is within what equal work shows"
    return Finding(
        probe="bench.op",
        verdict=verdict,
        summary=told,
        locus=locus,
        effect=effect,
        excitation={"case": plan.case.name, "dtype": str(plan.dtype), "device": str(plan.device)},
        cost_s=cost_s,
        repro=repro,
        evidence={
            "seconds": timing.seconds,
            "floor_s": timing.floor.seconds,
            "bound_by": timing.floor.bound_by,
            "floor_share": timing.floor_share,
            "calls_a_sample": timing.calls,
            "control": [control.low, control.high],
            "profile": profile.origin(),
        },
    )


def roofline(points: dict[str, tuple[int, int, float]], profile: MachineProfile) -> Curve:
    """Return (flops, bytes, seconds) of ops under the roof of `profile`, as one curve."""
    peak, rate = profile.flops_s["float32"], profile.bandwidth(1 << 27)
    intensities = [flops / moved for flops, moved, _ in points.values() if moved and flops] or [1.0]
    low, high = min(*intensities, peak / rate) / 2, max(*intensities, peak / rate) * 2
    roof = tuple((x, min(peak, x * rate)) for x in (low, peak / rate, high))
    series = {"roof (memory)": roof}
    series |= {
        op: ((flops / moved, flops / seconds),)
        for op, (flops, moved, seconds) in points.items()
        if moved and flops and seconds
    }
    return Curve(
        title="Roofline", x_label="flops a byte", y_label="flops a second", series=series,
        log_x=True, log_y=True,
    )  # fmt: skip


def _inputs(plan: OpPlan, seed: int) -> Args:
    args = plan.case.build(torch.Generator().manual_seed(seed))
    cast = cast_args(plan.contract, args, plan.dtype)
    return {n: v.to(plan.device) if isinstance(v, Tensor) else v for n, v in cast.items()}


def _copies(plan: OpPlan, args: Args, turn: int = 0) -> Args:
    """Return inputs in memory of their own; activations are turned by `turn`, so no two calls of
    a sample see the same numbers in the same places.
    """
    made: Args = {}
    for name, value in args.items():
        if isinstance(value, Tensor):
            value = value.clone()
            if plan.contract.inputs[name].role is Role.ACT and value.ndim > 1:
                value = value.roll(turn, -1)
        made[name] = value
    return made


def _calls(plan: OpPlan, run: Callable[..., Any], args: Args) -> int:
    size = sum(v.numel() * v.element_size() for v in args.values() if isinstance(v, Tensor))
    once = min(_timed(plan, run, [_copies(plan, args)]) for _ in range(3))
    return max(1, min(round(_SAMPLE_S / once), _MOST_CALLS, _MOST_BYTES // max(1, size)))


def _work(plan: OpPlan, run: Callable[..., Any], calls: int) -> Work:
    def once(seed: int) -> float:
        args = _inputs(plan, plan.seed + 7919 * seed)
        return _timed(plan, run, [_copies(plan, args, n) for n in range(calls)])

    return once


def _timed(plan: OpPlan, run: Callable[..., Any], sets: list[Args]) -> float:
    settle(plan.device)
    began = time.perf_counter()
    for args in sets:
        run(**args)
    settle(plan.device)
    return time.perf_counter() - began


def _width(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
