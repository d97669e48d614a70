"""The size table counts what the guards count."""

import json
import subprocess
import sys
from pathlib import Path

from tests.guards.source import ROOT
from tools.size_table import measure


def test_rooms_and_functions_are_counted(tmp_path: Path) -> None:
    (tmp_path / "errors.py").write_text("x = 1\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/spec.py").write_text("def f():\n    def g():\n        pass\n\n\nx = 1\n")
    sizes = {s.room: s for s in measure(tmp_path)}
    assert (sizes["cache"].lines, sizes["cache"].functions) == (6, 2)
    assert (sizes["cache"].median_function, sizes["cache"].longest_function) == (2.5, 3)
    assert (sizes["errors"].files, sizes["errors"].functions) == (1, 0)
    assert (sizes["total"].files, sizes["total"].lines) == (2, 7)


def test_program_ends_with_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, "tools/size_table.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rooms = json.loads(done.stdout.splitlines()[-1])["rooms"]
    assert rooms[-1]["room"] == "total"
