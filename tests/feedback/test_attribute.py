"""Attribution: planted slowness is named, its parts sum up, and noise is not blamed on anybody."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.engine.options import SchedulerOptions
from oxplow.errors import ContractError
from oxplow.feedback.attribute import Breakdown, Measured, attribute, clocked_table
from oxplow.feedback.finding import Finding, Verdict
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, select
from oxplow.serve.speed_arms import WORK, ArmSpec, SpeedArms
from tests.oracles.fixtures import GlmBuilder

# Made-up arms: the arithmetic of an attribution, without a clock.


def _arm(noise: float = 0.0, hidden: float = 0.0, **parts: float) -> Measured:
    def once(seed: int) -> Breakdown:
        wobble = noise * ((seed * 2654435761 % 1000) / 1000 - 0.5)
        named = {name.replace("_", ":"): value for name, value in parts.items()}
        return Breakdown(
            total_s=sum(parts.values()) + hidden + wobble, parts=named, counts={"steps": 4}
        )

    return once


def _attribute(base: Measured, suspect: Measured, **more: Any) -> Finding:
    return attribute("bench.itl", base, suspect, repro="oxplow bench step", **more)


def test_the_part_that_grew_is_named_and_its_ablation_confirms_it() -> None:
    base, suspect = _arm(op_linear=1.0, gap=0.5), _arm(op_linear=1.4, gap=0.52)
    told = _attribute(base, suspect, ablate=lambda part: _arm(op_linear=1.0, gap=0.52))
    assert told.verdict is Verdict.FAIL
    assert (told.locus.component, told.locus.op) == ("ops", "linear")
    assert "back" in told.summary and told.suspects[0].op == "between steps"


def test_an_ablation_that_does_not_close_it_acquits() -> None:
    base, suspect = _arm(op_linear=1.0), _arm(op_linear=1.4)
    told = _attribute(base, suspect, ablate=lambda part: suspect)
    assert told.verdict is Verdict.INCONCLUSIVE


def test_a_residual_over_a_tenth_blames_nobody() -> None:
    told = _attribute(_arm(op_linear=1.0), _arm(op_linear=1.2, hidden=0.2))
    assert told.verdict is Verdict.INCONCLUSIVE and "unexplained" in told.summary


def test_equal_arms_pass_and_noise_is_inconclusive_or_passes() -> None:
    assert _attribute(_arm(op_linear=1.0), _arm(op_linear=1.0)).verdict is Verdict.PASS
    assert _attribute(_arm(op_linear=1.0), _arm(op_linear=0.8)).verdict is Verdict.PASS
    with pytest.raises(ContractError):
        _attribute(_arm(op_linear=1.0), _arm(op_linear=1.0), rounds=2)


# A real engine with planted slowness.


@pytest.fixture(scope="module")
def arms(glm_oracle: GlmBuilder) -> SpeedArms:
    torch.set_num_threads(1)
    return SpeedArms(
        glm_oracle(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        clock=time.thread_time,  # the machine that runs tests is shared
    )


def _wait(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def _slowed(op: str, seconds: float) -> dict[str, tuple[str, Callable[..., Any]]]:
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32)
    run = select(builtin_kernels(), CONTRACTS, facts).kernels[op].run

    def slow(*positional: Any, **named: Any) -> Any:
        _wait(seconds)
        return run(*positional, **named)

    return {op: ("slowed", slow)}


def _plain_total(arms: SpeedArms, symptom: str) -> Breakdown:
    run = arms.measured(ArmSpec(), WORK[symptom])
    run(0)
    return min((run(n) for n in range(3)), key=lambda b: b.total_s)


def _probe(arms: SpeedArms, symptom: str, spec: ArmSpec) -> Finding:
    work = WORK[symptom]
    return attribute(
        f"speed.{symptom}", arms.measured(ArmSpec(), work), arms.measured(spec, work), rounds=5,
        ablate=lambda part: arms.ablated(spec, work, part), repro=f"oxplow bench step {symptom}",
    )  # fmt: skip


def test_30_percent_more_time_to_first_token_is_traced_to_the_op(arms: SpeedArms) -> None:
    plain = _plain_total(arms, "ttft")
    each = 0.6 * plain.total_s / plain.counts["calls:kda_prefill"]
    told = _probe(arms, "ttft", ArmSpec(kernels=_slowed("kda_prefill", each)))
    assert told.verdict is Verdict.FAIL, told
    assert (told.locus.component, told.locus.op) == ("ops", "kda_prefill")
    assert told.effect is not None and told.effect.value > 1.2
    assert told.evidence["engagement"]["kda_prefill"]["hits"] > 0  # type: ignore[index]


def test_20_percent_less_output_is_traced_to_the_gap_between_phases(arms: SpeedArms) -> None:
    plain = _plain_total(arms, "throughput")
    each = 0.5 * plain.total_s / plain.counts["steps"]

    def tamper(core: EngineCore) -> None:
        expire = core._expire

        def late() -> None:
            _wait(each)
            expire()

        core._expire = late  # type: ignore[method-assign]

    told = _probe(arms, "throughput", ArmSpec(tamper=tamper))
    assert told.verdict is Verdict.FAIL, told
    assert told.locus.component == "engine.core"


def test_a_setting_that_cuts_prompts_small_is_traced_to_the_scheduler(arms: SpeedArms) -> None:
    small = SchedulerOptions(step_target_s=None, max_prefill_tokens=16)
    told = _probe(arms, "ttft", ArmSpec(scheduler=small))
    assert told.verdict is Verdict.FAIL, told
    assert told.locus.component == "engine.scheduler"


def test_the_same_arm_twice_blames_nobody(arms: SpeedArms) -> None:
    told = _probe(arms, "itl", ArmSpec())
    assert told.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE), told


def test_the_parts_of_a_run_sum_to_its_time(arms: SpeedArms) -> None:
    for symptom in WORK:
        one = _plain_total(arms, symptom)
        assert sum(one.parts.values()) == pytest.approx(one.total_s, rel=0.01)
        assert one.parts["op:linear"] > 0 and all(v >= -1e-6 for v in one.parts.values())


# Off means off.


def test_without_probes_the_bound_callables_are_the_kernels_themselves(
    glm_oracle: GlmBuilder, tmp_path: Path
) -> None:
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32)
    table = select(builtin_kernels(), CONTRACTS, facts)
    known = {(k.op, k.name): k.run for k in builtin_kernels()}
    for op, kernel in table.kernels.items():
        assert getattr(table, op) is kernel.run is known[op, kernel.name]
    clocked, _ = clocked_table(table)
    assert all(getattr(table, op) is k.run for op, k in table.kernels.items())
    assert all(getattr(clocked, op) is not getattr(table, op) for op in table.kernels)
