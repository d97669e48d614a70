"""Shadow mode: off means the raw kernels; on, faults are logged and no answer changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.feedback.live import LiveJudge, observed_table
from oxplow.model.load import LoadOptions, load_model
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import OpTable
from oxplow.serve.shadow import shadowed
from oxplow.serve.workbench import Workbench, ask, run
from tests.model.build import our_table
from tests.oracles.fixtures import GlmBuilder


def test_off_means_the_kernels_themselves() -> None:
    table = our_table()
    same, judge = shadowed(table, 0)
    assert same is table
    assert judge is None
    raw = {(k.op, k.name): k.run for k in builtin_kernels()}
    for op, kernel in same.kernels.items():
        assert getattr(same, op) is raw[op, kernel.name]


def _answers(directory: Path, table: OpTable) -> list[int]:
    bench = Workbench(directory=directory)
    bench.__dict__["table"] = table
    bench.__dict__["model"] = load_model(directory, table, LoadOptions(block_size=16))
    core: EngineCore = bench.core()
    return run(core, [ask("one", bench.prompt(20), 4)])["one"].token_ids


def test_on_it_changes_no_answer_and_tells_a_fault_at_work(
    glm_oracle: GlmBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    directory = glm_oracle(0)
    plain = _answers(directory, our_table())
    table, judge = shadowed(our_table(), 7)
    with caplog.at_level(logging.ERROR):
        assert _answers(directory, table) == plain
    assert judge is not None
    assert sum(judge.judged.values()) > 10
    assert not caplog.records

    def broken(op: str, run: Any) -> Any:
        def wrong(*args: Any, **named: Any) -> Any:
            return run(*args, **named) * (1 + 2.0**-11)

        return wrong if op == "swiglu" else run

    table, judge = shadowed(observed_table(our_table(), broken), 7)
    with caplog.at_level(logging.ERROR):
        _answers(directory, table)
    assert {r.args[1] for r in caplog.records if isinstance(r.args, tuple)} == {"swiglu"}


def test_large_inputs_are_skipped_and_counted() -> None:
    judge = LiveJudge(CONTRACTS, most_bytes=1000)
    table = observed_table(our_table(), judge.wrap)
    table.rms_norm(torch.ones(100, 32), torch.ones(32), eps=1e-5)
    assert judge.skipped == {"rms_norm": 1}
    assert not judge.judged
