"""Versions of a repository side by side, the probe run in each, and a commit's diff by hunks.

Owns the git calls, the worktrees and the reading of a probe's answer. Knows no statistics.
Invariant: the caller's own checkout is never touched; every worktree is removed at the end; a probe
that gives no number gives None, never a made-up value.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from oxplow.errors import ConfigError

__all__ = ["Checkouts", "Hunk", "between", "describe", "function_at", "hunks_of", "run_probe"]

_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One hunk of a commit: its file, the first changed line after it, and its patch alone."""

    path: str
    line: int
    patch: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def between(repo: Path, good: str, bad: str) -> list[str]:
    """Return the commits after `good` up to `bad`, oldest first, along first parents.

    Raises ConfigError where `good` is no ancestor of `bad`, or they are the same.
    """
    first, last = (_git(repo, "rev-parse", "--verify", f"{c}^{{commit}}") for c in (good, bad))
    told = _git(repo, "rev-list", "--first-parent", "--reverse", f"{first}..{last}").split()
    base = _git(repo, "merge-base", first, last)
    if base != first or not told:
        raise ConfigError(
            "the first commit is no ancestor of the second", got=f"{good}..{bad}", where=str(repo)
        )
    return [first, *told]


def describe(repo: Path, commit: str) -> str:
    """Return the short hash and the subject of a commit."""
    return _git(repo, "show", "-s", "--format=%h %s", commit)


def hunks_of(repo: Path, commit: str) -> list[Hunk]:
    """Return the hunks of a commit against its first parent; binary files have none."""
    text = _git(repo, "diff", "--no-color", "--no-ext-diff", "-U1", f"{commit}^", commit, raw=True)
    found: list[Hunk] = []
    head: list[str] = []
    body: list[str] = []
    path = ""

    def close() -> None:
        if body and path:
            patch = "".join(f"{line}\n" for line in (*head, *body))
            found.append(Hunk(path=path, line=_first_change(body), patch=patch))
        body.clear()

    for line in text.splitlines():
        if line.startswith("diff --git"):
            close()
            head, path = [line], ""
        elif line.startswith("@@"):
            close()
            body.append(line)
        elif body:
            body.append(line)
        else:
            head.append(line)
            if line.startswith("+++ b/"):
                path = line[6:]
            elif line.startswith("--- a/"):
                path = path or line[6:]
    close()
    return found


def function_at(path: Path, line: int) -> str:
    """Return the innermost function or class around a line of a Python file, "" where none is."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ""
    best, name = 1 << 30, ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno
            if node.lineno <= line <= (node.end_lineno or node.lineno) and length < best:
                best, name = length, node.name
    return name


class Checkouts:
    """Worktrees of one repository in a folder of its own; use it in a `with`."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self._folder = Path(tempfile.mkdtemp(prefix="oxplow-bisect-"))
        self._known: dict[str, Path] = {}

    def __enter__(self) -> Checkouts:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._known.values():
            subprocess.run(
                ["git", "-C", str(self.repo), "worktree", "remove", "--force", str(path)],
                capture_output=True, check=False,
            )  # fmt: skip
        shutil.rmtree(self._folder, ignore_errors=True)

    def at(self, commit: str, without: Hunk | None = None) -> Path | None:
        """Return a worktree of `commit`, `without` one of its hunks; None where that has no end.

        A hunk cannot always be taken out alone: others may stand on it.
        """
        key = commit if without is None else f"{commit}-{without}"
        if key not in self._known:
            path = self._folder / str(len(self._known))
            _git(self.repo, "worktree", "add", "--detach", "--quiet", str(path), commit)
            self._known[key] = path
            if without is not None and not _taken_out(path, without):
                return None
        return self._known[key]


def run_probe(command: str, folder: Path, timeout_s: float) -> float | None:
    """Run a command in a worktree; return the number it told, None where it told none.

    The last line that is JSON counts: a number, or an object's `value`; a line without either, or
    no such line, leaves the exit code: 0 is 0.0, else 1.0. `oxplow` and `python` run with this
    interpreter and the worktree's own package. A timeout or a signal is None.
    """
    words = shlex.split(command)
    if not words:
        raise ConfigError("the probe is empty", wanted="a command")
    if words[0] == "oxplow":
        words = [sys.executable, "-m", "oxplow", *words[1:]]
    elif words[0] in ("python", "python3"):
        words = [sys.executable, *words[1:]]
    try:
        told = subprocess.run(
            ["env", f"PYTHONPATH={folder}", "PYTHONDONTWRITEBYTECODE=1", *words],
            cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if told.returncode < 0 or told.returncode in (126, 127):
        return None
    number = _number(told.stdout)
    if number is not None:
        return number
    crashed = "Traceback (most recent call last)" in told.stderr
    return None if crashed else float(told.returncode != 0)


def _number(text: str) -> float | None:
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            value = value.get("value")
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return None
    return None


def _taken_out(path: Path, hunk: Hunk) -> bool:
    """Reverse one hunk in a worktree; False where it does not come out."""
    done = subprocess.run(
        ["git", "-C", str(path), "apply", "--reverse", "--unidiff-zero", "-"],
        input=hunk.patch, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode == 0


def _first_change(body: list[str]) -> int:
    match = _HUNK.match(body[0])
    line = int(match.group(2)) if match else 1
    for text in body[1:]:
        if text.startswith(("+", "-")):
            return line
        line += 1
    return line


def _git(repo: Path, *words: str, raw: bool = False) -> str:
    done = subprocess.run(
        ["git", "-C", str(repo), *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(
            f"git {words[0]} failed: {done.stderr.strip()}", got=" ".join(words), where=str(repo)
        )
    return done.stdout if raw else done.stdout.strip()
