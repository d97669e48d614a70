"""Rules about habits: log calls, environment, broad excepts, module state and machine paths."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.guards.source import Source

_LOG_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
_ENV_NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
# Each of these records what it caught, and re-raises it or answers with it.
BROAD_EXCEPTS = frozenset(
    {
        "oxplow/serve/api/app.py",  # HTTP handler: the client gets an answer
        "oxplow/disagg/workers.py",  # worker loop: the request fails, the worker lives
        "oxplow/serve/text.py",  # the tokenizer library raises bare Exception for a damaged file
        "oxplow/feedback/isolate.py",  # child process: the parent gets the evidence
        "oxplow/feedback/gate.py",  # candidate kernel: whatever it raises is its verdict
    }
)
_TEXT_SUFFIXES = frozenset(
    {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".json", ".jsonl", ".cfg", ""}
)
# Folders that exist on one machine only. Written in parts, so that this file does not match itself.
_MACHINE_PATH = re.compile(
    r"(?<![\w./-])/(?:"
    + "|".join(("work", "root", r"home/\w+", r"Users/\w+", "tmp", "mnt"))
    + r")/"
)


def lazy_log_calls(sources: list[Source]) -> list[str]:
    """Refuse a log call whose text is built before the level is known."""
    return [
        f"{s.shown}:{node.lineno}: the text of a log call is built eagerly; use %s and arguments"
        for s in sources
        for node in ast.walk(s.tree)
        if isinstance(node, ast.Call) and _is_log_call(node.func)
        for text in [a for a in node.args[:2] if _is_eager(a)]
    ]


def environment(sources: list[Source]) -> list[str]:
    """Refuse a read of the environment outside the room `config`."""
    return [
        f"{s.shown}:{line}: the environment is read in config only"
        for s in sources
        if s.room != "config"
        for line in _environment_lines(s.tree)
    ]


def broad_excepts(sources: list[Source]) -> list[str]:
    """Refuse `except:`, `except Exception` and wider, but for the named places."""
    found = []
    for s in sources:
        for node in ast.walk(s.tree):
            if not isinstance(node, ast.ExceptHandler) or s.shown in BROAD_EXCEPTS:
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            caught = {
                getattr(k, "id", getattr(k, "attr", "")) if k else "everything" for k in kinds
            }
            for kind in sorted(caught & {"everything", "Exception", "BaseException"}):
                found.append(f"{s.shown}:{node.lineno}: a broad except of {kind}")
    return found


def module_state(sources: list[Source]) -> list[str]:
    """Refuse `global`, by which a function would change state of its module."""
    return [
        f"{s.shown}:{node.lineno}: global {', '.join(node.names)} is module state"
        for s in sources
        for node in ast.walk(s.tree)
        if isinstance(node, ast.Global)
    ]


def machine_paths(root: Path) -> list[str]:
    """Refuse a path of the machine that wrote it, in any tracked text file."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}: a path of one machine: {line.strip()[:80]}"
        for path in tracked_text(root)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if _MACHINE_PATH.search(line)
    ]


def tracked_text(root: Path) -> list[Path]:
    """Return the text files under git, or every one where `root` is no repository of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    )
    if (root / ".git").exists() and listed.returncode == 0:
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        paths = list(root.rglob("*"))
    return sorted(p for p in paths if p.is_file() and p.suffix in _TEXT_SUFFIXES)


def _is_log_call(func: ast.expr) -> bool:
    if not isinstance(func, ast.Attribute) or func.attr not in _LOG_CALLS:
        return False
    owner = func.value
    if isinstance(owner, ast.Call):
        owner = owner.func
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return "log" in name.lower()


def _is_eager(text: ast.expr) -> bool:
    if isinstance(text, ast.JoinedStr):
        return True
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Mod | ast.Add):
        return any(isinstance(n, ast.Constant | ast.JoinedStr) for n in (text.left, text.right))
    return (
        isinstance(text, ast.Call)
        and isinstance(text.func, ast.Attribute)
        and text.func.attr == "format"
    )


def _environment_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, names = getattr(node.value, "id", ""), {node.attr}
        elif isinstance(node, ast.ImportFrom):
            owner, names = node.module or "", {alias.name for alias in node.names}
        else:
            continue
        if owner in {"os", "posix"} and names & _ENV_NAMES:
            yield node.lineno
