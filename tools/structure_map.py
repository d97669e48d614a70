"""Keep the module map of docs/structure.md: one line per module, from the module's own docstring.

    python tools/structure_map.py            write the map
    python tools/structure_map.py --check    exit 1 when the map is not what the modules say

Owns the text between the two markers and nothing else of the page. Needs only the standard library.
Invariant: what the map says of a module is the first sentence of its docstring, so the two agree.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
START = "<!-- map: written by `make structure`, do not edit by hand -->"
END = "<!-- end of map -->"


def module_map(root: Path) -> str:
    """Return the map of the package below `root`: a table of path and first docstring line."""
    rows = ["| module | what it owns |", "| --- | --- |"]
    package = root / "oxplow"
    # A folder sorts before what is in it; the files beside it come first, as in the design.
    for path in sorted(package.rglob("*.py"), key=lambda p: (p.parent != package, p.as_posix())):
        shown = path.relative_to(root)
        name = f"{shown.parent.as_posix()}/" if path.stem == "__init__" else shown.as_posix()
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append(f"| `{name}` | {_first_line(told)} |")
    return "\n".join(rows) + "\n"


def with_map(page: str, text: str) -> str:
    """Return `page` with `text` between its markers; raises ValueError where they are missing."""
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{PAGE.name} lacks the line {START!r} or {END!r}")
    return f"{before}{START}\n\n{text}\n{END}{after}"


def _first_line(docstring: str) -> str:
    line = docstring.strip().splitlines()[0] if docstring.strip() else "(no docstring)"
    return line.replace("|", "\\|")


def main() -> int:
    """Write or check the map; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_map(page, module_map(ROOT))
    if page == wanted:
        print("structure: the map is up to date")
        return 0
    if "--check" in sys.argv:
        print("structure: docs/structure.md is not what the modules say; run `make structure`")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    print("structure: wrote docs/structure.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
