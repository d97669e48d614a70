"""The source tree as guards see it: parsed once, with module names and import targets."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "oxplow"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One Python file: `name` is its dotted module name, `shown` its path for messages."""

    path: Path
    shown: str
    name: str
    is_package: bool
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The part after the package's name; empty for the package itself and its __main__."""
        parts = self.name.split(".")
        return "" if len(parts) == 1 or parts[1] == "__main__" else parts[1]


def read_package(root: Path) -> list[Source]:
    """Parse every module of the package that lies in `root`."""
    sources = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        sources.append(
            Source(
                path=path,
                shown=path.relative_to(root).as_posix(),
                name=".".join(parts[:-1] if is_package else parts),
                is_package=is_package,
                text=text,
                tree=ast.parse(text, filename=str(path)),
            )
        )
    return sources


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted target) of every import, also inside functions and by a literal name.

    `from a import b` yields both "a" and "a.b", since b may be a module.
    """
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(source, node)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def _base(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.name.split(".")
    package = parts if source.is_package else parts[:-1]
    kept = package[: len(package) - (node.level - 1)]
    return ".".join([*kept, node.module] if node.module else kept)


def _is_dynamic_import(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in {"import_module", "__import__"}
