"""Planted faults never ship: the build backend's own list of files holds no test and no fault."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.guards.source import ROOT

_LIST = """
import contextlib, io, sys
from setuptools import Distribution
dist = Distribution({"script_name": "setup.py"})
dist.parse_config_files(["pyproject.toml"])
command = dist.get_command_obj("build_py")
with contextlib.redirect_stdout(io.StringIO()):
    command.ensure_finalized()
    files = command.get_outputs()
print("\\n".join(files))
"""


def test_wheel_holds_no_planted_fault() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = done.stdout.split()
    assert any(f.endswith("oxplow/serve/commands/faults.py") for f in files)
    assert len(files) > 100
    packed = [f.split("lib/")[-1] for f in files]
    assert all(f.startswith("oxplow/") for f in packed)
    assert not [f for f in packed if "tests" in f.split("/") or "planted" in f]


def test_package_does_not_import_planted_faults() -> None:
    for path in (ROOT / "oxplow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            assert not [n for n in names if n.split(".")[0] == "tests"], path
