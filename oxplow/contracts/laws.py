"""The tolerance law: how far a candidate may stand from the float64 reference, and why.

Owns unit roundoffs and the checks that contracts name for their outputs. Knows nothing of kernels.
Invariant: a bound is computed from the inputs, the accumulation length and the declared precision;
nobody writes a number such as 1e-2. Source: Higham, Accuracy and Stability of Numerical Algorithms,
chapter 3 (dot products), and the calibrated three-way rule (candidate against float64, measured in
errors of a declared-precision baseline).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

UNIT_ROUNDOFF: Mapping[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one check: `reason` is empty when it passed, else one sentence with got and
    wanted.

    `worst` is the largest error in units of its bound (1.0 is the limit); 0.0 for exact checks.
    """

    ok: bool
    worst: float = 0.0
    reason: str = ""
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a check sees: the candidate's tensor, the float64 truth and the float32 reference run.

    `baseline` is the same reference run in float32 (before the output cast); `args` are the inputs
    as the candidate saw them, before any mutation; `outputs` are all of the candidate's outputs by
    name, for a check that judges one in the light of another (weights of the experts it picked).
    """

    got: torch.Tensor
    truth: torch.Tensor
    baseline: torch.Tensor
    args: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Check(Protocol):
    """Judges one output of a candidate."""

    def judge(self, evidence: Evidence) -> Verdict:
        """Return the verdict on `evidence.got`."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Every element equals the reference: for indices, copies and counts."""

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare value for value; NaN equals NaN, so that untouched poison passes."""
        got, truth = evidence.got, evidence.truth.to(evidence.got.dtype)
        differ = got != truth
        if got.is_floating_point():
            differ &= ~(got.isnan() & truth.isnan())  # poison that stayed poison
        wrong = differ.nonzero()
        if len(wrong) == 0:
            return Verdict(ok=True)
        at = tuple(wrong[0].tolist())
        return Verdict(
            ok=False,
            worst=float("inf"),
            index=at,
            reason=f"{len(wrong)} of {got.numel()} elements differ, first at {at}: "
            f"got {got[at].item()}, wanted {truth[at].item()}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """Elementwise bound  factor * (u32 * sqrt(length) * scale + baseline error) + roundings *
    u_out * |truth|, and over the whole tensor the same in root mean squares without sqrt(length).

    `length(args)` is the longest accumulation behind one element. `scale` is `magnitude(args)`
    when given (the reference on absolute values: the |A||B| of the dot bound), else the root mean
    square of the truth over the last axis. `calibrated` adds the row-wise error of the float32
    reference, for ops whose conditioning the dot bound does not see (recurrences, softmax,
    Sinkhorn); never the candidate's own. `roundings` counts casts to the output dtype on the way
    (1: only the last). `stored(args)` is for kernels that keep intermediates in the output dtype
    (rotated keys and softmax weights for matrix units, activations between two products): the
    root-sum-square effect on each element of one relative error per intermediate, in units of
    u_out, counted `factor` times.
    """

    length: Callable[[Mapping[str, Any]], int]
    magnitude: Callable[[Mapping[str, Any]], torch.Tensor] | None = None
    calibrated: bool = False
    factor: float = 4.0
    roundings: float = 1.0
    stored: Callable[[Mapping[str, Any]], torch.Tensor] | None = None

    def _terms(self, evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and roundings of every element, float64, not yet times a unit roundoff."""
        truth = evidence.truth.double()
        if self.magnitude is not None:
            scale = self.magnitude(evidence.args).double().expand_as(truth)
        else:
            scale = _row_rms(truth)
        rounded = self.roundings * truth.abs()
        if self.stored is not None:
            rounded = rounded + self.factor * self.stored(evidence.args).double()
        return scale, rounded

    def _bound(
        self, evidence: Evidence, scale: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor:
        """Return the largest allowed absolute error of every element, float64."""
        truth = evidence.truth.double()
        allowed = UNIT_ROUNDOFF[torch.float32] * max(1, self.length(evidence.args)) ** 0.5 * scale
        if self.calibrated:
            allowed = allowed + _row_rms(evidence.baseline.double() - truth)
        return self.factor * allowed + UNIT_ROUNDOFF[evidence.got.dtype] * rounded

    def _norm_verdict(
        self, evidence: Evidence, scale: torch.Tensor, rounded: torch.Tensor
    ) -> Verdict:
        """Judge the root mean square of all errors, where no element stands for the worst case.

        Errors of a sum grow like the partial sums, so their mean stays below u times the scale even
        if it is added up one by one; the square root of the length is for single elements. Operands
        with fewer bits exceed this at any length, the elementwise bound at short ones only.
        """
        truth, got = evidence.truth.double(), evidence.got.double()
        finite = torch.isfinite(truth)
        if not finite.any():
            return Verdict(ok=True)
        allowed = self.factor * UNIT_ROUNDOFF[torch.float32] * _rms(scale[finite])
        if self.calibrated:
            allowed += self.factor * _rms((evidence.baseline.double() - truth)[finite])
        allowed += UNIT_ROUNDOFF[evidence.got.dtype] * _rms(rounded[finite])
        error = _rms((got - truth)[finite])
        if error <= allowed:
            return Verdict(ok=True)
        return Verdict(
            ok=False,
            worst=error / max(allowed, 1e-300),
            reason=f"every element is in its bound, but the root mean square error {error:.3e} is "
            f"{error / max(allowed, 1e-300):.3g} times the law's {allowed:.3e}",
        )

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare elementwise; finite where the truth is not (overwritten poison), the reverse,
        or an infinity in the place of a NaN fails at once.
        """
        if evidence.got.numel() == 0:
            return Verdict(ok=True)
        got, truth = evidence.got.double(), evidence.truth.double()
        alike = torch.isfinite(truth) | (got == truth) | (got.isnan() & truth.isnan())
        foreign = ((torch.isfinite(got) != torch.isfinite(truth)) | ~alike).nonzero()
        if len(foreign):
            at = tuple(foreign[0].tolist())
            return Verdict(
                ok=False,
                worst=float("inf"),
                index=at,
                reason=f"{len(foreign)} elements not finite on one side or unlike, first at {at}: "
                f"got {got[at].item():.6g}, wanted {truth[at].item():.6g}",
            )
        terms = self._terms(evidence)
        error, bound = (got - truth).abs(), self._bound(evidence, *terms)
        # a bound of exactly zero (an all-zero row) still demands exact zeros
        ratio = torch.where(error > 0, error / bound.clamp_min(1e-300), torch.zeros_like(error))
        worst = int(ratio.argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))
        top = float(ratio.flatten()[worst])
        if top <= 1.0:
            norm = self._norm_verdict(evidence, *terms)
            return norm if not norm.ok else Verdict(ok=True, worst=top, index=at)
        return Verdict(
            ok=False,
            worst=top,
            index=at,
            reason=f"error {error[at].item():.3e} at {at} is {top:.3g} times "
            f"the law's {bound[at].item():.3e}: "
            f"got {got[at].item():.9g}, wanted {truth[at].item():.9g}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """Rows of chosen indices (top-k, routing): equal as sets, except across a margin the law
    cannot see.

    `scores(args)` gives the float64 scores [rows, candidates] from which `got` [rows, k] was
    picked (-1 pads); `margin(args)` the largest score error the law allows, [rows] or [rows,
    candidates]. An index that is in one set only must have a score within 2 margins of the cut;
    exact ties go to the lowest index.
    """

    scores: Callable[[Mapping[str, Any]], torch.Tensor]
    margin: Callable[[Mapping[str, Any]], torch.Tensor]

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare row by row; duplicates, out-of-range indices and wrong counts always fail."""
        got, truth = evidence.got, evidence.truth.to(evidence.got.dtype)
        scores, margin = self.scores(evidence.args), self.margin(evidence.args)
        for row in range(got.shape[0]):
            mine = [i for i in got[row].tolist() if i != -1]
            want = [i for i in truth[row].tolist() if i != -1]
            if len(set(mine)) != len(mine) or len(mine) != len(want):
                return _pick_failure(row, mine, want, "duplicates or a wrong count")
            odd = set(mine) ^ set(want)
            if not odd:
                continue
            if any(i < 0 or i >= scores.shape[1] for i in odd):
                return _pick_failure(row, mine, want, "an index outside the candidates")
            cut = min(scores[row, i].item() for i in want)
            slack = 2 * float(margin[row].max())
            gap = max(abs(scores[row, i].item() - cut) for i in odd)
            if gap > slack:
                return _pick_failure(
                    row, mine, want, f"score gap {gap:.3e} over the margin {slack:.3e}"
                )
            extra, lost = sorted(set(mine) - set(want)), sorted(set(want) - set(mine))
            if any(scores[row, e] == scores[row, m] and e > m for e in extra for m in lost):
                return _pick_failure(row, mine, want, "an exact tie went to the higher index")
        return Verdict(ok=True)


def _pick_failure(row: int, mine: list[int], want: list[int], why: str) -> Verdict:
    extra, lost = sorted(set(mine) - set(want))[:8], sorted(set(want) - set(mine))[:8]
    return Verdict(
        ok=False,
        worst=float("inf"),
        index=(row,),
        reason=f"row {row}: {why}; picked {extra} that it should not, missed {lost}",
    )


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def _row_rms(x: torch.Tensor) -> torch.Tensor:
    if x.ndim == 0:
        return x.abs()
    return x.square().mean(-1, keepdim=True).sqrt().expand_as(x)
