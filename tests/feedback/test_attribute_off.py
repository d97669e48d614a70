"""Off means off: what instruments cost an engine that runs without them, counted without a clock.

Bytecode instructions stand in for machine instructions: they are exact, need no other program, and
hold everything that Python code of ours could add to a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from oxplow.cache.plan import exact_plan
from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.engine.request import Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.feedback.attribute import clocked_table
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, OpTable, select
from oxplow.serve.speed_arms import WORK, ArmSpec, SpeedArms
from oxplow.trace import EventRing
from tests.oracles.fixtures import GlmBuilder


class _Opcodes:
    """Counts bytecode instructions of the package, by file."""

    def __init__(self) -> None:
        self.by_file: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.by_file.values())

    def run(self, work: Callable[[], object]) -> None:
        def trace(frame: FrameType, event: str, argument: object) -> Any:
            name = frame.f_code.co_filename
            if "/oxplow/" not in name:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                self.by_file[name] = self.by_file.get(name, 0) + 1
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)


@pytest.fixture(scope="module")
def table() -> OpTable:
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32)
    return select(builtin_kernels(), CONTRACTS, facts)


@pytest.fixture(scope="module")
def model(table: OpTable, glm_oracle: GlmBuilder) -> HybridModel:
    return load_model(glm_oracle(), table, LoadOptions(block_size=16))


def _core(model: HybridModel, table: OpTable, ring: EventRing | None) -> EngineCore:
    plan = exact_plan(trunk_components(model), 16, num_blocks=16, num_slots=4, num_snapshots=4)
    core = EngineCore(
        model, table, plan, revision="off", ring=ring, clock=iter(range(10**6)).__next__
    )
    for number in range(3):
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        ids = [1 + (number + i) % 50 for i in range(20)]
        core.add(Request(request_id=str(number), prompt_ids=ids, params=params))
    core.step()
    core.step()
    return core


def _steps(model: HybridModel, table: OpTable, ring: EventRing | None = None) -> _Opcodes:
    core, counted = _core(model, table, ring), _Opcodes()
    counted.run(lambda: (core.step(), core.step()))
    return counted


def test_instruments_that_were_used_and_put_away_leave_a_step_as_it_was(
    model: HybridModel, table: OpTable, glm_oracle: GlmBuilder
) -> None:
    before = _steps(model, table)
    arms = SpeedArms(glm_oracle(), device=torch.device("cpu"), dtype=torch.float32)
    arms.measured(ArmSpec(), WORK["itl"])(0)
    clocked_table(table)
    after = _steps(model, table)
    assert before.total > 1000
    assert after.total <= 1.005 * before.total


def test_a_ring_that_is_off_costs_the_step_at_most_half_a_percent(
    model: HybridModel, table: OpTable
) -> None:
    counted = _steps(model, table, EventRing(0))
    ring = sum(n for name, n in counted.by_file.items() if name.endswith("trace/ring.py"))
    assert ring <= 0.005 * counted.total, f"{ring} of {counted.total}"


def test_the_count_sees_what_is_added(model: HybridModel, table: OpTable) -> None:
    plain, (clocked, _) = _steps(model, table), clocked_table(table, time.perf_counter)
    timed = _steps(model, clocked)  # the sampler's op is bound from this table
    assert timed.total > plain.total
