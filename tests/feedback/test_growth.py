"""Growth of errors: sound kernels stay within the law, biased and positional faults stand out."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from oxplow.contracts import CONTRACTS
from oxplow.errors import ContractError
from oxplow.feedback.finding import Finding, Verdict
from oxplow.feedback.growth import SWEEPS, growth_finding
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts
from oxplow.serve.cli import app
from oxplow.serve.rungs import Bringup
from tests.oracles.fixtures import GlmBuilder

REPRO = "oxplow check --only growth"
FACTS = Facts(device=torch.device("cpu"), dtype=torch.float32)
SOUND = [k for k in builtin_kernels() if k.op in SWEEPS and k.supports(FACTS).ok]
Run = Callable[..., Any]


def _kernel(op: str) -> Run:
    return next(k.run for k in SOUND if k.op == op)


def _found(op: str, run: Run, seed: int = 0) -> Finding:
    sweep = replace(SWEEPS[op], draws=5)
    return growth_finding(CONTRACTS[op], run, sweep, seed=seed, repro=REPRO)


@pytest.mark.parametrize("kernel", SOUND, ids=lambda k: f"{k.op}-{k.name}")
@pytest.mark.parametrize("seed", [0, 1])
def test_sound_kernels_grow_within_the_law(kernel: Any, seed: int) -> None:
    found = _found(kernel.op, kernel.run, seed)
    assert found.ok, found


def _biased(run: Run) -> Run:
    """A decay that is one rounding too strong at each token."""

    def wrong(**named: Any) -> Any:
        return run(**{**named, "g": named["g"] - 2.0**-21})

    return wrong


def test_a_bias_of_each_token_is_seen_to_add_up() -> None:
    found = _found("kda_prefill", _biased(_kernel("kda_prefill")))
    assert found.verdict is Verdict.FAIL
    assert found.locus.op == "kda_prefill"
    assert found.effect is not None
    assert found.effect.low is not None
    assert found.effect.low > 0.25  # more than random rounding, in every draw
    assert "adds up" in found.summary


def test_a_state_kept_in_bf16_is_seen_without_growth() -> None:
    sound = _kernel("kda_prefill")

    def wrong(state: Tensor, **named: Any) -> Any:
        out = sound(state=state, **named)
        state.copy_(state.bfloat16())
        return out

    found = _found("kda_prefill", wrong)
    assert found.verdict is Verdict.FAIL
    assert found.locus.parameter == "state"
    assert "fewer bits" in found.summary


def test_a_sum_that_truncates_is_seen_to_grow() -> None:
    """Rounding toward zero of a running sum: each addition errs to the same side."""

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        total = torch.zeros(x.shape[0], weight.shape[0])
        for i in range(0, x.shape[1], 8):
            exact = total.double() + x[:, i : i + 8].double() @ weight[:, i : i + 8].double().T
            total = exact.float()
            over = total.double().abs() > exact.abs()
            total = torch.where(over, torch.nextafter(total, torch.zeros_like(total)), total)
        return total if bias is None else total + bias

    def positive(size: int, g: torch.Generator) -> dict[str, Any]:
        args = SWEEPS["linear"].build(size, g)
        return {**args, "x": args["x"].abs(), "weight": args["weight"].abs(), "bias": None}

    sweep = replace(SWEEPS["linear"], build=positive, draws=5)
    linear = CONTRACTS["linear"]
    assert growth_finding(linear, _kernel("linear"), sweep, repro=REPRO).ok
    found = growth_finding(linear, wrong, sweep, repro=REPRO)
    assert found.verdict is Verdict.FAIL, found


def test_a_rotary_base_a_little_off_goes_by_position() -> None:
    sound = _kernel("vision_attention")
    found = _found("vision_attention", lambda theta, **named: sound(theta=theta * 1.001, **named))
    assert found.verdict is Verdict.FAIL
    assert found.curves[0].series["kernel"][0][1] < found.curves[0].series["kernel"][-1][1]


def test_the_rung_is_green_and_its_repro_repeats_a_red_one(
    glm_oracle: GlmBuilder,
) -> None:
    def rung(only: str) -> list[Finding]:
        bringup = Bringup(directory=glm_oracle(0), device=FACTS.device, quick=True, only=only)
        return list(bringup.rungs()[0].run())

    assert [f.verdict for f in rung("growth")] == [Verdict.PASS] * len(SWEEPS)
    planted = [(k, k.run) for k in SOUND if k.op == "kda_prefill"]
    for kernel, real in planted:
        object.__setattr__(kernel, "run", _biased(real))
    try:
        red = next(f for f in rung("growth") if f.verdict is Verdict.FAIL)
        assert red.locus.op == "kda_prefill"
        told = CliRunner().invoke(app, shlex.split(red.repro)[1:])
    finally:
        for kernel, real in planted:
            object.__setattr__(kernel, "run", real)
    assert told.exit_code == 1, told.output


def test_a_slope_needs_points_and_draws() -> None:
    sweep = replace(SWEEPS["linear"], points=(1, 2))
    with pytest.raises(ContractError, match="a slope needs"):
        growth_finding(CONTRACTS["linear"], _kernel("linear"), sweep, repro=REPRO)
