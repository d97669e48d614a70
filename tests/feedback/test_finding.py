"""Findings and their chain: what must hold for any evidence to be believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oxplow.errors import ConfigError, ContractError
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.record import RecordFile, read_records


def _finding(verdict: Verdict = Verdict.FAIL) -> Finding:
    return Finding(
        probe="op",
        verdict=verdict,
        summary="error 3.2 of its bound",
        locus=Locus(component="ops", op="rms_norm", layer=3),
        effect=Effect(name="error", value=3.2, unit="bounds", bound=1.0),
        repro="oxplow check --only op:rms_norm",
        curves=(
            Curve(title="e", x_label="n", y_label="error", series={"a": ((1.0, 2.0),)}, log_y=True),
        ),
    )


def test_a_failure_needs_locus_and_command() -> None:
    with pytest.raises(ContractError, match="without locus"):
        Finding(probe="p", verdict=Verdict.FAIL, summary="s", repro="oxplow check")
    with pytest.raises(ContractError, match="repro"):
        Finding(probe="p", verdict=Verdict.FAIL, summary="s", locus=Locus(op="x"))


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_only_a_pass_is_ok(verdict: Verdict) -> None:
    assert not _finding(verdict).ok
    assert _finding(Verdict.PASS).ok


def test_chain_survives_reopening(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for _ in range(3):
        RecordFile(path).append("finding", _finding().row())
    records = read_records(path)
    assert [r.body["verdict"] for r in records] == ["fail"] * 3
    assert records[1].previous == records[0].digest


@pytest.mark.parametrize("harm", ["change", "drop", "swap", "cut"])
def test_any_change_breaks_the_chain(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordFile(path)
    for i in range(4):
        file.append("finding", {"i": i})
    lines = path.read_text().splitlines()
    if harm == "change":
        row = json.loads(lines[1])
        row["body"]["i"] = 9
        lines[1] = json.dumps(row)
    elif harm == "drop":
        del lines[1]
    elif harm == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines[2] = lines[2][:30]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl:[23]"):
        read_records(path)


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain data"):
        RecordFile(tmp_path / "r.jsonl").append("finding", {"x": float("nan")})
