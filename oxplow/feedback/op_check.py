"""One op's contract on one kernel: the gate's rulings as a finding.

Owns the run over cases and the finding. Knows the gate, no model and no command. Invariant: it
stops at the first case that fails, and that case decides the finding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oxplow.contracts.schema import Case, OpContract
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.gate import Reason, examine
from oxplow.ops.table import Kernel

__all__ = ["OpWork", "check_op"]


@dataclass(frozen=True, slots=True)
class OpWork:
    """What is examined: a kernel on cases of its contract, from one seed, on one device."""

    contract: OpContract
    kernel: Kernel
    cases: Sequence[Case]
    device: torch.device
    seed: int


def check_op(work: OpWork, probe: str, repro: str) -> Finding:
    """Examine case by case in float32; stop at the first that fails."""
    began, worst = time.perf_counter(), 0.0
    op, kernel = work.contract.name, work.kernel
    base = Finding(
        probe=probe,
        verdict=Verdict.PASS,
        summary="",
        excitation={"cases": len(work.cases), "dtype": "float32", "seed": work.seed},
        evidence={"kernel": kernel.name},
        repro=repro,
    )
    for count, case in enumerate(work.cases, 1):
        ruling = examine(
            work.contract, kernel.name, kernel.run, case, device=work.device, seed=work.seed
        )
        worst = max(worst, ruling.worst)
        if ruling.ok:
            continue
        parameter = ruling.tensor or ruling.reason.value
        return replace(
            base,
            verdict=Verdict.FAIL,
            summary=str(ruling),
            locus=Locus(component="ops", op=op, parameter=parameter),
            effect=_effect(ruling.worst, ruling.reason, count),
            excitation={**base.excitation, "case": case.name, "note": case.note},
            evidence={"kernel": kernel.name, "reason": ruling.reason.value},
            cost_s=time.perf_counter() - began,
        )
    return replace(
        base,
        summary=f"{kernel.name}: {len(work.cases)} cases, worst error {worst:.3g} of its bound",
        effect=_effect(worst, Reason.PASSED, len(work.cases)),
        cost_s=time.perf_counter() - began,
    )


def _effect(worst: float, reason: Reason, cases: int) -> Effect | None:
    if reason not in (Reason.PASSED, Reason.NUMERICS) or math.isinf(worst):
        return None
    return Effect(name="error", value=worst, unit="bounds", bound=1.0, n=cases)
