"""Bisection over commits: the right commit and hunk under noise, abstention where noise is all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from oxplow.errors import ConfigError
from oxplow.feedback.bisect import Range, bisect
from oxplow.feedback.commits import between, hunks_of, run_probe
from oxplow.feedback.finding import Verdict

_PROBE = """\
import random, time
from work import first, second
noise = random.Random(time.time_ns()).gauss(0, NOISE)
print("chatter")
print('{"value": %f}' % (first() + second() + noise))
"""
_WORK = """\
def first():
    a = 1
    return 10.0 * a


# {note}


def between():
    return None


# a line
# a line
# a line


def second():
    b = 1
    return 5.0 * b
"""


def _git(repo: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repo), "-c", "user.name=t", "-c", "user.email=t@t", *words],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip


def _commit(repo: Path, subject: str, **files: str) -> str:
    for name, text in files.items():
        (repo / f"{name}.py").write_text(text)
    _git(repo, "add", "-A")
    _git(repo, "commit", "-q", "--allow-empty", "-m", subject)
    return _git(repo, "rev-parse", "HEAD")


def _history(repo: Path, noise: float, slow_at: int, broken_at: int = -1) -> list[str]:
    """Make eight commits; from `slow_at` on `second` is dearer, beside a harmless hunk."""
    repo.mkdir()
    _git(repo, "init", "-q")
    made = []
    for n in range(8):
        work = _WORK.format(note=f"turn {n}")
        if n >= slow_at:
            work = work.replace("5.0 * b", "5.0 * b + 3.0").replace("a = 1", "a = 2 - 1")
        if n == broken_at:
            work = "raise ValueError\n"
        made.append(
            _commit(repo, f"turn {n}", work=work, probe=_PROBE.replace("NOISE", str(noise)))
        )
    return made


def _range(repo: Path, **changes: int) -> Range:
    given = {"rounds": 3, "most_rounds": 6} | changes
    return Range(
        repo=repo, good="HEAD~7", bad="HEAD", command="python probe.py",
        rounds=given["rounds"], most_rounds=given["most_rounds"],
    )  # fmt: skip


def test_the_commit_and_the_hunk_are_named_in_spite_of_noise(tmp_path: Path) -> None:
    commits = _history(tmp_path / "r", noise=0.2, slow_at=5, broken_at=3)
    heard: list[str] = []
    told = bisect(_range(tmp_path / "r"), heard.append)
    assert told.verdict is Verdict.FAIL, told.summary
    assert told.locus.parameter == commits[5][:12]
    assert told.locus.op == "second" and told.locus.code.startswith("work.py:")
    assert "turn 5" in told.summary and told.repro.startswith("oxplow diagnose --between")
    assert told.effect is not None and 2 < told.effect.value < 4
    assert any("turn" in line for line in heard)
    assert len(_git(tmp_path / "r", "worktree", "list").splitlines()) == 1


def test_it_abstains_where_equal_versions_differ_as_much(tmp_path: Path) -> None:
    _history(tmp_path / "r", noise=40.0, slow_at=5)
    told = bisect(_range(tmp_path / "r", most_rounds=4))
    assert told.verdict is Verdict.INCONCLUSIVE
    assert "equal versions" in told.summary


def test_a_range_without_an_effect_blames_nobody(tmp_path: Path) -> None:
    _history(tmp_path / "r", noise=0.0, slow_at=99)
    assert bisect(_range(tmp_path / "r", most_rounds=3)).verdict is Verdict.INCONCLUSIVE


def test_the_exit_code_counts_where_no_number_is_told(tmp_path: Path) -> None:
    for text, wanted in (
        ("print(3.5)", 3.5),
        ("print('{\"value\": 2}')", 2.0),
        ("raise SystemExit(1)", 1.0),
        ("pass", 0.0),
        ("1 / 0", None),
        ("import os; os.abort()", None),
        ("import time; time.sleep(9)", None),
    ):
        (tmp_path / "p.py").write_text(text)
        assert run_probe("python p.py", tmp_path, 1.5) == wanted, text


def test_a_wrong_range_is_refused(tmp_path: Path) -> None:
    _history(tmp_path / "r", noise=0.0, slow_at=99)
    with pytest.raises(ConfigError, match="no ancestor"):
        between(tmp_path / "r", "HEAD", "HEAD~2")
    with pytest.raises(ConfigError, match="rev-parse"):
        between(tmp_path / "r", "nowhere", "HEAD")


def test_hunks_come_with_their_place(tmp_path: Path) -> None:
    commits = _history(tmp_path / "r", noise=0.0, slow_at=5)
    hunks = hunks_of(tmp_path / "r", commits[5])
    lines = (tmp_path / "r" / "work.py").read_text().splitlines()
    assert [h.path for h in hunks] == ["work.py"] * 3
    assert "3.0" in lines[hunks[-1].line - 1]
