"""The judge and the call log: they see a planted fault where it is, and nothing where none is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.errors import ContractError
from oxplow.feedback.finding import Finding, Verdict
from oxplow.feedback.live import (
    CallLog,
    LiveJudge,
    divergence_finding,
    fingerprint,
    first_divergence,
    judged_finding,
    observed_table,
)
from oxplow.ops.table import OpTable
from tests.model.build import our_table

BASE = Finding(probe="p", verdict=Verdict.INVALID, summary="", repro="oxplow check")
Run = Callable[..., Any]


def _work(table: OpTable, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 32, generator=g)
    for _ in range(3):
        x = table.rms_norm(x, torch.ones(32), eps=1e-5)
        x = table.linear(x, torch.randn(32, 32, generator=g), None)


@pytest.mark.parametrize("place", range(64))
def test_one_ulp_anywhere_changes_the_fingerprint(place: int) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    y = x.clone()
    y.view(torch.int32).view(-1)[place] ^= 1
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x) != fingerprint(y)


def test_the_fingerprint_depends_on_order_shape_and_type() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert fingerprint(x) != fingerprint(x.flip(0))
    assert fingerprint(x) != fingerprint(x.view(4, 3))
    assert fingerprint(x) != fingerprint(x.view(torch.int32))
    assert fingerprint(x[:, :3]) == fingerprint(x[:, :3].clone())
    tail = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert fingerprint(tail) != fingerprint(tail.flip(0))


def test_the_judge_passes_our_kernels_and_counts_calls() -> None:
    judge = LiveJudge(CONTRACTS)
    _work(observed_table(our_table(), judge.wrap))
    found = judged_finding(judge, BASE)
    assert found.ok, found
    assert judge.judged == {"rms_norm": 3, "linear": 3}


def test_the_judge_names_op_tensor_and_row() -> None:
    def broken(op: str, run: Run) -> Run:
        if op != "rms_norm":
            return run

        def wrong(*args: Any, **named: Any) -> Any:
            y = run(*args, **named)
            y[3] *= 1 + 2.0**-12  # a tf32-sized error in one row
            return y

        return wrong

    judge = LiveJudge(CONTRACTS)
    _work(observed_table(observed_table(our_table(), broken), judge.wrap))
    found = judged_finding(judge, BASE)
    assert found.verdict is Verdict.FAIL
    assert (found.locus.op, found.locus.parameter, found.locus.position) == ("rms_norm", "y", 3)


def test_the_judge_judges_from_copies_taken_before_the_call() -> None:
    """A kernel that changes its input cannot make the truth agree with it."""

    def broken(op: str, run: Run) -> Run:
        def wrong(x: torch.Tensor, *args: Any, **named: Any) -> Any:
            x.zero_()
            return run(x, *args, **named)

        return wrong if op == "rms_norm" else run

    judge = LiveJudge(CONTRACTS)
    _work(observed_table(observed_table(our_table(), broken), judge.wrap))
    assert judged_finding(judge, BASE).verdict is Verdict.FAIL


def test_one_call_in_so_many_is_judged() -> None:
    judge = LiveJudge(CONTRACTS, every=2)
    _work(observed_table(our_table(), judge.wrap))
    assert judge.seen["rms_norm"] == 3
    assert judge.judged["rms_norm"] == 2
    with pytest.raises(ContractError, match="one call in so many"):
        LiveJudge(CONTRACTS, every=0)


def test_a_judge_that_saw_nothing_is_no_pass() -> None:
    assert judged_finding(LiveJudge(CONTRACTS), BASE).verdict is Verdict.INVALID


def _log(wrap: Callable[[str, Run], Run] | None = None, seed: int = 0) -> CallLog:
    log = CallLog(CONTRACTS)
    table = our_table() if wrap is None else observed_table(our_table(), wrap)
    _work(observed_table(table, log.wrap), seed)
    return log


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("op", ["rms_norm", "linear"])
def test_the_first_call_with_equal_inputs_and_another_output_is_named(op: str, number: int) -> None:
    calls = 0

    def one_ulp(name: str, run: Run) -> Run:
        def wrong(*args: Any, **named: Any) -> Any:
            nonlocal calls
            y = run(*args, **named)
            if name == op:
                calls += 1
                if calls == number + 1:
                    y.view(torch.int32).view(-1)[7] ^= 1
            return y

        return wrong

    one, other = _log(), _log(one_ulp)
    found = first_divergence(one.calls, other.calls)
    assert found is not None
    assert (found.op, found.inputs_equal) == (op, True)
    assert found.place == 2 * number + (op == "linear")
    assert divergence_finding(found, len(one.calls), BASE).locus.component == "ops"


def test_other_inputs_convict_the_caller_not_the_op() -> None:
    found = first_divergence(_log().calls, _log(seed=1).calls)
    assert found is not None
    assert not found.inputs_equal
    assert divergence_finding(found, 6, BASE).locus.component == "engine.batch"


def test_equal_runs_do_not_part_and_shorter_ones_do() -> None:
    one, other = _log(), _log()
    assert first_divergence(one.calls, other.calls) is None
    assert divergence_finding(None, 6, BASE).ok
    assert divergence_finding(None, 0, BASE).verdict is Verdict.INVALID
    found = first_divergence(one.calls, other.calls[:4])
    assert found is not None
    assert (found.place, found.tensor) == (4, "call")
