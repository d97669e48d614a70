"""Answers at temperature 0 do not depend on the company: bit for bit in the deterministic mode.

Outside it only near ties may flip; the gap is measured and held far below any clear answer's.
"""

from __future__ import annotations

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.engine.events import Event, TokenOut
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import Request, SamplingParams
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, OpTable, select
from tests.engine.build import BLOCK, Make, ask, drain, make_core, text
from tests.oracles.fixtures import GlmBuilder

PROMPT = text(1, 50)
SCORED = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)

Scores = list[tuple[int, float]]


def scores_of(events: list[Event], name: str) -> Scores:
    """Return each token of a request with its log-probability."""
    return [
        (e.token_id, e.logprob.logprob)
        for e in events
        if isinstance(e, TokenOut) and e.request_id == name and e.logprob is not None
    ]


def in_company(core: EngineCore, others: int, seed: int) -> Scores:
    """Run the prompt in the middle of others that come and go."""
    for i in range(others):
        core.add(
            Request(request_id=f"{i}", prompt_ids=text(seed + i, 7 + 23 * i % 90), params=SCORED)
        )
        if i == others // 2:
            core.step()
            core.add(Request(request_id="a", prompt_ids=PROMPT, params=SCORED))
    return scores_of(drain(core), "a")


@pytest.fixture(scope="module")
def strict_ops() -> OpTable:
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32, invariant=True)
    return select(builtin_kernels(), CONTRACTS, facts)


@pytest.fixture(scope="module")
def strict_model(strict_ops: OpTable, glm_oracle: GlmBuilder) -> HybridModel:
    return load_model(glm_oracle(), strict_ops, LoadOptions(block_size=BLOCK))


def test_the_deterministic_mode_changes_no_bit(
    strict_model: HybridModel, strict_ops: OpTable
) -> None:
    alone = scores_of(ask(make_core(strict_model, strict_ops), PROMPT, SCORED), "a")
    for others, slots, budget in ((1, 2, 64), (6, 3, 16), (9, 8, 48)):
        core = make_core(strict_model, strict_ops, slots=slots, budget=budget)
        assert in_company(core, others, seed=10 * others) == alone, (others, slots, budget)


def test_the_deterministic_mode_survives_preemption_and_prefix_hits(
    strict_model: HybridModel, strict_ops: OpTable
) -> None:
    alone = scores_of(ask(make_core(strict_model, strict_ops), PROMPT, SCORED), "a")
    memory = MemoryOptions(output_share=0.0, swap_min_tokens=10**9)
    core = make_core(strict_model, strict_ops, slots=1, budget=16, memory=memory)
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=SCORED, priority=5))
    events: list[Event] = []
    while len(scores_of(events, "a")) < 4:
        events += core.step()
    core.add(Request(request_id="b", prompt_ids=text(2, 9), params=SCORED, priority=1))
    events += drain(core)
    assert core.stats().preemptions == 1
    assert scores_of(events, "a") == alone
    assert scores_of(ask(core, PROMPT, SCORED), "a") == alone
    assert core.stats().prefix_hit_tokens > 0


def test_outside_it_only_rounding_differs(
    make: Make, record_property: pytest.RecordProperty
) -> None:
    alone = scores_of(ask(make(), PROMPT, SCORED), "a")
    worst = 0.0
    for others, slots, budget in ((1, 2, 64), (6, 3, 16), (15, 16, 64)):
        got = in_company(make(slots=slots, budget=budget, blocks=160), others, seed=10 * others)
        assert [t for t, _ in got] == [t for t, _ in alone]
        gaps = [abs(a - b) for (_, a), (_, b) in zip(got, alone, strict=True)]
        worst = max(worst, *gaps)
    record_property("largest_logprob_gap", worst)
    assert worst < 1e-4, "float32 rounding; a clear answer has a gap of more than 0.1"
