"""The doctor's judgements on machines that this one is not, and its report on this one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oxplow.serve import cli, doctor, machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (doctor.judge_python((3, 11, 0)), "ok"),
        (doctor.judge_python((3, 12, 9)), "ok"),
        (doctor.judge_python((3, 10, 9)), "fail"),
        (doctor.judge_python((3, 13, 0)), "fail"),
        (doctor.judge_torch("2.11.0"), "ok"),
        (doctor.judge_torch("2.14.1+cu130"), "ok"),
        (doctor.judge_torch("2.13.0a0+git1"), "ok"),
        (doctor.judge_torch("2.15.0"), "fail"),
        (doctor.judge_torch("2.9.1"), "fail"),
        (doctor.judge_torch("nightly"), "fail"),
        (doctor.judge_torch(None), "fail"),
        (doctor.judge_threads(2, 2), "ok"),
        (doctor.judge_threads(4, 2), "warn"),
        (doctor.judge_memory(8 * GIB), "ok"),
        (doctor.judge_memory(GIB), "warn"),
        (doctor.judge_memory(None), "note"),
        (doctor.judge_disk(Path("x"), 10 * GIB), "ok"),
        (doctor.judge_disk(Path("x"), GIB // 2), "warn"),
        (doctor.judge_disk(Path("x"), None), "warn"),
        (doctor.judge_shared_memory(GIB), "ok"),
        (doctor.judge_shared_memory(64 << 20), "note"),
        (doctor.judge_shared_memory(None), "note"),
    ],
)
def test_judgement(finding: doctor.Finding, verdict: str) -> None:
    assert finding.verdict == verdict
    assert finding.found
    if verdict in {"warn", "fail"}:
        assert finding.mend


def test_this_machine_is_fit_to_run_the_tests() -> None:
    shown = CliRunner().invoke(cli.app, ["doctor", "--json"])
    report = json.loads(shown.output.strip().splitlines()[-1])
    assert (shown.exit_code, report["failed"]) == (0, [])
    checks = {f["check"] for f in report["findings"]}
    assert checks >= {"python", "torch", "threads", "accelerators", "memory", "disk", "triton"}


def test_failed_check_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [doctor.judge_torch(None)]
    monkeypatch.setattr(doctor, "examine", lambda folder, threads: broken)
    shown = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert shown.exit_code == 1
    assert json.loads(shown.output)["failed"] == ["torch"]


def test_missing_torch_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = {f.check: f.verdict for f in doctor.examine(Path())}
    assert found["torch"] == found["numpy"] == "fail"
    assert found["triton"] == "note"
    assert "accelerators" not in found


CPUINFO = "physical id\t: 0\ncore id\t\t: {}\n\n"


def test_hyperthreads_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    file = tmp_path / "cpuinfo"
    file.write_text("".join(CPUINFO.format(core) for core in (0, 1, 0, 1)))
    assert machine.physical_cores(file) == 2


def test_cores_are_at_most_the_usable_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    file = tmp_path / "cpuinfo"
    file.write_text("".join(CPUINFO.format(core) for core in range(4)))
    assert machine.physical_cores(file) == 1


@pytest.mark.parametrize("text", [None, "processor : 0\n"])
def test_untold_cores_give_the_usable_ones(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert machine.physical_cores(file) == 3


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "5", 4 * GIB), (str(3 * GIB), str(GIB), 2 * GIB), (str(GIB), str(2 * GIB), 0)],
)
def test_container_limit_counts(limit: str, used: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {4 * GIB // 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert machine.available_memory_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_system_that_tells_no_memory_gives_none(tmp_path: Path) -> None:
    assert machine.available_memory_bytes(tmp_path / "absent", tmp_path) is None
    (tmp_path / "meminfo").write_text("nothing of use\n")
    assert machine.available_memory_bytes(tmp_path / "meminfo", tmp_path) is None


def test_disk_of_an_absent_folder_is_not_guessed(tmp_path: Path) -> None:
    assert machine.free_disk_bytes(tmp_path / "absent") is None


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OXPLOW_COMPUTE_THREADS"])
def test_doctor_judges_the_threads_that_the_server_would_take(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv(name, "777")
    shown = CliRunner().invoke(cli.app, ["doctor", "--json"])
    (threads,) = (f for f in json.loads(shown.output)["findings"] if f["check"] == "threads")
    assert threads["found"].startswith("777 of ") and threads["verdict"] == "warn"
