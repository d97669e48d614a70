"""`oxplow check`: green on a sound engine; each planted fault turns its own rung red."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oxplow.cache.manager import CacheManager
from oxplow.engine.handover import HandOver
from oxplow.engine.state import StateStore
from oxplow.feedback.finding import Finding, Verdict
from oxplow.feedback.record import read_records
from oxplow.serve.cli import app
from oxplow.serve.engine_cuts import WAYS, DeterministicBench, way_finding
from oxplow.serve.model_probes import (
    ModelUnderTest,
    cut_findings,
    judge_forward,
    repeat_finding,
)
from oxplow.serve.rungs import Bringup
from tests.faults.swap import kernels_of
from tests.oracles.fixtures import GlmBuilder

CPU = torch.device("cpu")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(glm_oracle: GlmBuilder) -> Path:
    return glm_oracle(0)


def _verdicts(findings: list[Finding]) -> set[Verdict]:
    return {f.verdict for f in findings}


def test_the_probes_of_the_model_pass(tiny: Path) -> None:
    target = ModelUnderTest(directory=tiny, device=CPU)
    assert judge_forward(target, 12, "oxplow check").ok
    assert repeat_finding(target, 9, "oxplow check").ok
    exact = ModelUnderTest(directory=tiny, device=CPU, invariant=True)
    assert _verdicts(cut_findings(target, 37, "oxplow check")) == {Verdict.PASS}
    assert _verdicts(cut_findings(exact, 37, "oxplow check")) == {Verdict.PASS}


def test_a_fault_of_one_layer_is_found_there(tiny: Path) -> None:
    def in_bfloat16(run: Run) -> Run:
        def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **named: Any) -> Any:
            return run(x.bfloat16().float(), weight, bias, **named)

        return wrong

    with kernels_of("router", make=in_bfloat16):
        found = judge_forward(ModelUnderTest(directory=tiny, device=CPU), 24, "oxplow check")
    assert found.verdict is Verdict.FAIL
    assert found.locus.op == "router"
    assert found.locus.layer is not None


def test_a_state_that_is_not_carried_fails_the_cuts(tiny: Path) -> None:
    def forgetful(run: Run) -> Run:
        def wrong(*args: Any, **named: Any) -> Any:
            if "has_state" in named:
                named["has_state"] = torch.zeros_like(named["has_state"])
            else:
                args = tuple(
                    torch.zeros_like(a) if isinstance(a, torch.Tensor) and a.dtype is torch.bool
                    else a for a in args
                )  # fmt: skip
            return run(*args, **named)

        return wrong

    for invariant in (False, True):
        target = ModelUnderTest(directory=tiny, device=CPU, invariant=invariant)
        with kernels_of("kda_prefill", make=forgetful):
            told = cut_findings(target, 48, "oxplow check")
        found = {f.excitation["cut"]: f.verdict for f in told}
        assert found["two pieces"] is Verdict.FAIL
        assert found["other places"] is Verdict.PASS


def test_the_ways_pass_and_a_lost_state_fails_the_right_ones(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = DeterministicBench(directory=tiny)
    for name in WAYS:
        assert way_finding(name, bench, "oxplow check").ok, name
    monkeypatch.setattr(StateStore, "copy_slot", lambda self, source, target: None)
    found = {name: way_finding(name, bench, "oxplow check").verdict for name in WAYS}
    assert found["cached"] is Verdict.FAIL
    assert found["in company"] is Verdict.PASS


def test_a_way_that_did_not_happen_is_no_pass(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "snapshot", lambda self, *args: None)
    bench = DeterministicBench(directory=tiny)
    assert way_finding("cached", bench, "oxplow check").verdict is Verdict.INVALID


def test_a_wrong_adoption_fails_the_restart(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = HandOver.export

    def forgetful(self: HandOver, choice: Any) -> Any:
        manifest = real(self, choice)
        nudged = {
            name: value * (1 + 2.0**-20) if value.is_floating_point() else value
            for name, value in manifest.tensors.items()
        }
        return replace(manifest, tensors=nudged)

    monkeypatch.setattr(HandOver, "export", forgetful)
    found = way_finding("restarted", DeterministicBench(directory=tiny), "oxplow check")
    assert found.verdict is Verdict.FAIL
    assert found.locus.component == "engine.handover"


def _damaged(tiny: Path, folder: Path, harm: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    folder.mkdir()
    for path in tiny.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            harm(tensors)
            save_file(tensors, folder / path.name, metadata={"format": "pt"})
        elif path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_bad_weights_stop_the_climb_with_their_name(tiny: Path, tmp_path: Path) -> None:
    def harm(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if name.endswith("layers.1.input_layernorm.weight"):
                value[0] = float("nan")

    bad = _damaged(tiny, tmp_path / "bad", harm)
    told = CliRunner().invoke(app, ["check", "--model", str(bad), "--quick", "--json"])
    last = json.loads(told.stdout.splitlines()[-1])
    assert told.exit_code == 1
    assert [r["verdict"] for r in last["rungs"]] == ["pass", "fail"]
    assert "layers.1.input_layernorm.weight" in last["rungs"][1]["locus"]
    assert "ops" in last["not_climbed"]


def test_one_part_of_a_rung_with_record_and_report(tiny: Path, tmp_path: Path) -> None:
    words = ["check", "--model", str(tiny), "--only", "ops:rms_norm", "--json"]
    words += ["--record", str(tmp_path / "r.jsonl"), "--report", str(tmp_path / "r.html")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout.splitlines()[-1])["rungs"][0]["findings"] == 1
    assert read_records(tmp_path / "r.jsonl")[0].body["probe"] == "op:rms_norm"
    assert "rms_norm" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("only", ["nonsense", "ops:nonsense", "requests:nonsense"])
def test_an_unknown_rung_or_part_is_told(tiny: Path, only: str) -> None:
    told = CliRunner().invoke(app, ["check", "--model", str(tiny), "--only", only])
    assert told.exit_code != 0


def test_the_repro_of_a_red_op_repeats_the_verdict(tiny: Path) -> None:
    def too_large(run: Run) -> Run:
        return lambda *a, **k: run(*a, **k) * (1 + 2.0**-10)

    with kernels_of("swiglu", make=too_large):
        rungs = Bringup(directory=tiny, device=CPU, quick=True, only="ops").rungs()
        red = [f for f in rungs[0].run() if f.verdict is Verdict.FAIL]
        assert [f.locus.op for f in red] == ["swiglu"]
        told = CliRunner().invoke(app, red[0].repro.split()[1:])
    assert told.exit_code == 1
