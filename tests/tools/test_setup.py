"""The set-up script: finds an interpreter, names what is missing, and is instant when done."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.guards.source import ROOT

TOOLS = ("bash", "dirname", "cat", "cksum", "rm", "tee", "awk", "uname", "tail")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Make a checkout with the files that the script reads, and an empty folder of programs."""
    root = tmp_path / "clone"
    (root / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup.sh"):
        shutil.copy(ROOT / name, root / name)
    (root / "bin").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (root / "bin" / name).symlink_to(found)
    return root


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def setup(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(clone / "bin"), "HOME": os.environ.get("HOME", "/")} | variables
    return subprocess.run(
        [shutil.which("bash") or "bash", "tools/setup.sh"],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_no_interpreter_is_said_with_the_package_to_install(clone: Path) -> None:
    program(clone / "bin/python3", "exit 1\n")  # as a shim of a version that is not selected
    done = setup(clone)
    assert done.returncode == 1
    assert "apt-get install python3.11 python3.11-venv" in done.stderr


# Fits, has a version, but lacks the venv module, as Debian's python3 does at first.
NO_VENV = """case "$2" in
  *version_info*"%d.%d"*|*'%d.%d'*) echo 3.12 ;;
  *ensurepip*) exit 1 ;;
  *executable*) echo /usr/bin/python3 ;;
  *) case "$1" in --version) echo Python 3.12.3 ;; esac ;;
esac
"""


def test_missing_venv_module_is_said_with_its_package(clone: Path) -> None:
    program(clone / "bin/python3", NO_VENV)
    done = setup(clone)
    assert done.returncode == 1
    assert "[1/4] Python 3.12.3" in done.stdout
    assert "apt-get install python3.12-venv" in done.stderr


# An environment whose pip succeeds, so that only the script's own steps are run.
FITTING = """case "$*" in
  *ensurepip*) exit 0 ;;
  *'-m venv'*) exit 0 ;;
  --version) echo Python 3.11.7 ;;
  *'pip '*) echo "Collecting x"; echo "$*" >> pip-calls ;;
  *importlib.metadata*) exit "${TORCH_IN_RANGE:-1}" ;;
esac
"""


@pytest.fixture
def fitted(clone: Path) -> Path:
    """A clone whose environment exists already, with stand-ins for its programs."""
    for name in ("python", "oxplow"):
        program(clone / ".venv/bin" / name, FITTING)
    return clone


def calls(clone: Path) -> list[str]:
    path = clone / "pip-calls"
    return path.read_text().splitlines() if path.exists() else []


def test_second_run_does_nothing_until_the_project_changes(fitted: Path) -> None:
    assert setup(fitted).returncode == 0
    first = len(calls(fitted))
    again = setup(fitted)
    assert (again.stdout, len(calls(fitted))) == ("setup: .venv is up to date\n", first)
    with (fitted / "pyproject.toml").open("a") as project:
        project.write("# changed\n")
    assert "[4/4]" in setup(fitted).stdout
    assert len(calls(fitted)) > first


def test_each_stage_is_one_line_and_the_rest_is_in_the_log(fitted: Path) -> None:
    done = setup(fitted)
    stages = [line.split("]")[0] for line in done.stdout.splitlines()]
    assert stages[:4] == [f"setup: [{n}/4" for n in (1, 2, 3, 4)]
    assert len(stages) == 5 and stages[4].startswith("setup: done: ")
    assert (fitted / ".venv/setup.log").read_text().count("Collecting x") == len(calls(fitted)) == 2


def test_moved_checkout_is_set_up_again(fitted: Path) -> None:
    setup(fitted)
    moved = fitted.rename(fitted.with_name("moved"))
    assert "[4/4]" in setup(moved).stdout


def test_torch_in_range_is_kept(fitted: Path) -> None:
    done = setup(fitted, TORCH_IN_RANGE="0")
    assert "in range: kept" in done.stdout
    assert [c for c in calls(fitted) if "torch==" in c] == []


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="other systems take the default wheel")
def test_wheel_on_disk_is_asked_before_any_index(fitted: Path) -> None:
    assert setup(fitted).returncode == 0
    asked = [c for c in calls(fitted) if "torch==" in c]
    assert len(asked) == 1
    assert "--no-index" in asked[0]


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="other systems take the default wheel")
def test_cpu_index_that_does_not_answer_leads_to_the_default(fitted: Path) -> None:
    refusing = FITTING.replace("*'pip '*)", "*--no-index*|*--index-url*) exit 1 ;;\n  *'pip '*)")
    program(fitted / ".venv/bin/python", refusing)
    done = setup(fitted)
    assert done.returncode == 0, done.stderr
    assert "the CPU index did not answer" in done.stdout
    assert calls(fitted)[0].endswith("torch==2.13.0")


def test_cuda_device_leads_to_the_default_build(fitted: Path) -> None:
    program(fitted / "bin/nvidia-smi", "echo GPU 0\n")
    done = setup(fitted)
    assert "for the CUDA device" in done.stdout
    assert "--no-index" not in calls(fitted)[0]


def test_failed_install_leaves_no_stamp(fitted: Path) -> None:
    program(
        fitted / ".venv/bin/python",
        FITTING.replace("*'pip '*)", "*--editable*) echo 'ERROR: no x'; exit 1 ;;\n  *'pip '*)"),
    )
    done = setup(fitted, TORCH_IN_RANGE="0")
    assert done.returncode == 1
    assert "ERROR: no x" in done.stderr
    assert "the whole log is .venv/setup.log" in done.stderr
    assert not (fitted / ".venv/.setup-stamp").exists()
