"""Print the size of the house: files, lines, and median and longest function of each room.

    python tools/size_table.py            a table, then one JSON object on the last line

Owns how sizes are counted; the guards in tests/guards use the same functions. Needs only the
standard library. Invariant: a file or function counts the same here and in the guards.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSize:
    """State the size of one room; lines of functions run from `def` to the last line."""

    room: str
    files: int
    lines: int
    longest_file: int
    functions: int
    median_function: float
    longest_function: int


def functions_of(tree: ast.AST) -> Iterator[FunctionNode]:
    """Yield every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def length_of(node: FunctionNode) -> int:
    """Count the lines of a function from its `def` to its end; decorators are left out."""
    assert node.end_lineno is not None  # the parser always sets it
    return node.end_lineno - node.lineno + 1


def room_of(path: Path, root: Path) -> str:
    """Name the room of a file under `root`: its first folder, or its own stem."""
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else path.stem


def measure(root: Path) -> list[RoomSize]:
    """Measure every room below `root`, and the whole as the last row."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.py")):
        rooms.setdefault(room_of(path, root), []).append(path)
    sizes = [_size(room, paths) for room, paths in sorted(rooms.items())]
    return [*sizes, _size("total", [path for paths in rooms.values() for path in paths])]


def _size(room: str, paths: list[Path]) -> RoomSize:
    texts = [path.read_text(encoding="utf-8") for path in paths]
    lines = [text.count("\n") for text in texts]
    lengths = [length_of(node) for text in texts for node in functions_of(ast.parse(text))]
    return RoomSize(
        room=room,
        files=len(paths),
        lines=sum(lines),
        longest_file=max(lines, default=0),
        functions=len(lengths),
        median_function=float(median(lengths)) if lengths else 0.0,
        longest_function=max(lengths, default=0),
    )


def main() -> None:
    """Print the table and the JSON line."""
    sizes = measure(Path(__file__).resolve().parent.parent / "oxplow")
    print(
        f"{'room':<12}{'files':>7}{'lines':>8}{'longest':>9}{'functions':>11}{'median':>8}{'max':>6}"
    )
    for s in sizes:
        print(
            f"{s.room:<12}{s.files:>7}{s.lines:>8}{s.longest_file:>9}{s.functions:>11}"
            f"{s.median_function:>8.1f}{s.longest_function:>6}"
        )
    print(json.dumps({"rooms": [asdict(s) for s in sizes]}))


if __name__ == "__main__":
    main()
