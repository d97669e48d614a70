"""Op benchmarks: verdicts of made-up timings, real ones against each other, and the commands."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from oxplow.contracts import CONTRACTS
from oxplow.errors import ConfigError
from oxplow.feedback.calibrate import Floor, MachineProfile, calibrate
from oxplow.feedback.finding import Verdict
from oxplow.feedback.measure import Comparison, Interval
from oxplow.feedback.op_bench import OpPlan, OpTiming, op_finding, roofline, service_case, time_op
from oxplow.ops.table import Kernel
from oxplow.serve.cli import app

LINEAR = CONTRACTS["linear"]


@pytest.fixture(scope="module")
def profile() -> MachineProfile:
    return calibrate(torch.device("cpu"), 1, budget_s=0.6)


def _plan() -> OpPlan:
    cpu = torch.device("cpu")
    case = LINEAR.case("several_panels")
    return OpPlan(contract=LINEAR, case=case, dtype=torch.float32, device=cpu, pairs=7)


def _timing(ratio: Interval, control: Interval, best: float = 1.0, other: str = "b") -> OpTiming:
    seconds = {"a": (1.0, 1.1, 1.2), "b.": (1.0, 1.0, 1.0)}
    told = Comparison(seconds=seconds, ratio=ratio, control=control)
    return OpTiming(
        kernel="a", other=other, seconds=1.1, best_s=best, calls=4,
        floor=Floor(seconds=0.5, bound_by="bytes"), comparison=told,
    )  # fmt: skip


def _interval(low: float, high: float) -> Interval:
    return Interval(ratio=(low + high) / 2, low=low, high=high)


@pytest.mark.parametrize(
    ("timing", "verdict"),
    [
        (_timing(_interval(0.5, 0.6), _interval(0.9, 1.1)), Verdict.FAIL),
        (_timing(_interval(1.5, 1.6), _interval(0.9, 1.1)), Verdict.PASS),
        (_timing(_interval(0.9, 1.2), _interval(0.9, 1.1)), Verdict.INCONCLUSIVE),
        (_timing(_interval(0.92, 0.97), _interval(0.9, 1.1)), Verdict.INCONCLUSIVE),
        (_timing(_interval(0.5, 0.6), _interval(1.2, 1.4)), Verdict.INCONCLUSIVE),
        (_timing(_interval(0.5, 0.6), _interval(0.9, 1.1), best=0.3), Verdict.INVALID),
        (_timing(_interval(0.9, 1.1), _interval(0.9, 1.1), other=""), Verdict.PASS),
    ],
)
def test_a_timing_is_judged_by_noise_and_floor(
    timing: OpTiming, verdict: Verdict, profile: MachineProfile
) -> None:
    assert op_finding(_plan(), timing, profile, repro="x", cost_s=1.0).verdict is verdict


def _kernel(name: str, run: Any) -> Kernel:
    return Kernel(op="linear", name=name, run=run)


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


def test_a_kernel_four_times_as_slow_is_seen_and_a_wrong_one_is_not_timed(
    profile: MachineProfile,
) -> None:
    def slow(**args: Any) -> torch.Tensor:
        began = time.perf_counter()
        result = _plain(**args)
        end = time.perf_counter() + 3 * (time.perf_counter() - began)
        while time.perf_counter() < end:
            pass
        return result

    timing = time_op(_plan(), _kernel("plain", _plain), _kernel("slow", slow), profile)
    assert timing.comparison.ratio.ratio > 1.5
    assert timing.floor.seconds > 0 and timing.calls >= 1 and timing.is_possible
    wrong = _kernel("zero", lambda x, weight, bias: x.new_zeros(len(x), len(weight)))
    with pytest.raises(ConfigError, match="a wrong kernel is not timed"):
        time_op(_plan(), wrong, None, profile)


def test_every_timed_call_has_inputs_of_its_own(profile: MachineProfile) -> None:
    seen: list[tuple[int, float]] = []
    kept: list[torch.Tensor] = []

    def watch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        kept.append(x)
        seen.append((x.data_ptr(), float(x.flatten()[0])))
        return _plain(x, weight, bias)

    time_op(replace(_plan(), pairs=3), _kernel("watch", watch), None, profile)
    timed = seen[10:]
    # one round runs both sides and the control on the same numbers: a third are new
    assert len({value for _, value in timed}) > 0.3 * len(timed)
    assert len({pointer for pointer, _ in timed}) == len(timed)


def test_the_roof_bends_where_memory_and_arithmetic_meet(profile: MachineProfile) -> None:
    curve = roofline({"linear": (10**9, 10**7, 0.1), "none": (0, 0, 1.0)}, profile)
    roof = curve.series["roof (memory)"]
    assert roof[-1][1] == pytest.approx(profile.flops_s["float32"])
    assert curve.series["linear"][0] == (100.0, pytest.approx(1e10))
    assert service_case(LINEAR, profile).name.startswith(("decode(", "prefill"))


def test_the_commands_end_with_one_line_of_json(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    runner = CliRunner()
    for words in (
        ["bench", "op", "rms_norm", "--pairs", "3", "--json", "--report", str(page)],
        ["bench", "step", "itl", "--rounds", "3", "--json"],
        ["bench", "serve", "--requests", "3", "--rate", "20", "--tokens", "16", "4", "--json"],
    ):
        told = runner.invoke(app, words)
        assert told.exit_code == 0, told.output
        row = json.loads(told.stdout.splitlines()[-1])
        assert row
    assert "bench.roofline" in page.read_text()
    wrong = runner.invoke(app, ["bench", "op", "nothing"])
    assert wrong.exit_code != 0
