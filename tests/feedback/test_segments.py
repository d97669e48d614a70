"""Case 1: TF32 in the context-parallel chain of KDA, found by cutting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oxplow.feedback.finding import Verdict
from oxplow.feedback.segments import SegmentSweep, segment_finding
from oxplow.ops import affine
from oxplow.ops.affine import IEEE, TF32, TF32X3, Chain, Form
from oxplow.serve import rungs
from oxplow.serve.rungs import Bringup

SWEEP = SegmentSweep(segments=(1, 4, 16))
REPRO = "oxplow check --only segments"


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("product", [IEEE, TF32X3], ids=lambda p: p.name)
def test_honest_products_pass(product: affine.Product, form: Form) -> None:
    found = segment_finding(Chain.of(product, form), REPRO, SWEEP)
    assert found.ok, found


def test_tf32_is_found_grows_with_segments_and_is_invisible_under_fast_decay() -> None:
    found = segment_finding(Chain.of(TF32, Form.DENSE), REPRO, SWEEP)
    assert found.verdict is Verdict.FAIL
    assert found.locus.op == "kda_affine"
    errors = found.evidence["errors"]
    assert isinstance(errors, dict)
    for regime in ("long memory", "subspace"):
        one, four, sixteen = errors[regime]
        assert 1.5 < four / one < 6
        assert 2.5 < sixteen / four < 6  # linear: a false decay, not a random walk
    clean = segment_finding(Chain.of(IEEE, Form.DENSE), REPRO, SWEEP).evidence["errors"]
    assert isinstance(clean, dict)
    assert max(errors["fast decay"]) <= 2 * max(clean["fast decay"])
    assert "fast decay shows" in found.summary


@pytest.mark.parametrize("site", ["chain_m", "fold"])
def test_the_product_at_fault_is_named(site: str) -> None:
    chain = replace(Chain.of(IEEE, Form.DENSE), **{site: TF32})
    found = segment_finding(chain, REPRO, SegmentSweep(segments=(4,), tokens=192))
    assert found.verdict is Verdict.FAIL
    assert found.locus.parameter == f"{site} (tf32)"


def test_a_chain_that_starts_to_use_tf32_turns_its_rung_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    bringup = Bringup(directory=Path("unused"), device=cpu, quick=True, only="segments")
    assert [f.verdict for f in bringup.rungs()[0].run()] == [Verdict.PASS]
    monkeypatch.setattr(rungs, "choose_product", lambda device: (TF32, "it is quick"))
    [found] = bringup.rungs()[0].run()
    assert found.verdict is Verdict.FAIL
    assert "segments" in found.repro
