"""Rules about shape: sizes, parameters, docstrings, exports and names."""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.guards.source import Source
from tools.size_table import FunctionNode, functions_of, length_of

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 8
MAX_FLAGS = 12  # a command of `oxplow`: each parameter is a flag that a person types
_BAD_STEMS = ("util", "utils", "helper", "helpers", "common", "misc")


def module_size(sources: list[Source]) -> list[str]:
    """Refuse a module of more than 400 lines."""
    return [
        f"{s.shown}: {s.text.count(chr(10))} lines, at most {MAX_MODULE_LINES}"
        for s in sources
        if s.text.count("\n") > MAX_MODULE_LINES
    ]


def function_size(sources: list[Source]) -> list[str]:
    """Refuse a function of more than 60 lines, 120 in ops/kernels."""
    return [
        f"{s.shown}:{node.lineno}: {node.name} has {length_of(node)} lines, at most {cap}"
        for s in sources
        for cap in [
            MAX_KERNEL_LINES if s.name.startswith("oxplow.ops.kernels") else MAX_FUNCTION_LINES
        ]
        for node in functions_of(s.tree)
        if length_of(node) > cap
    ]


def parameter_count(sources: list[Source]) -> list[str]:
    """Refuse more than 8 parameters (a command: 12 flags); op signatures follow their contract."""
    return [
        f"{s.shown}:{node.lineno}: {node.name} takes {count} parameters, at most {most}"
        for s in sources
        if s.room not in {"contracts", "ops"}
        for node in functions_of(s.tree)
        for most in [MAX_FLAGS if _is_command(s, node) else MAX_PARAMETERS]
        for count in [_count(node)]
        if count > most
    ]


def _is_command(source: Source, node: FunctionNode) -> bool:
    """Tell whether a function's parameters are flags: in a command's module, with defaults."""
    args = [*node.args.args, *node.args.kwonlyargs]
    defaults = len(node.args.defaults) + len(node.args.kw_defaults)
    return "serve/commands/" in source.shown and 0 < len(args) <= defaults + 1


def keyword_pass_through(sources: list[Source]) -> list[str]:
    """Refuse a function that forwards its own **kwargs: unknown names would travel unseen."""
    return [
        f"{s.shown}:{call.lineno}: {node.name} forwards **{node.args.kwarg.arg}"
        for s in sources
        for node in functions_of(s.tree)
        if node.args.kwarg is not None
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and any(
            k.arg is None and isinstance(k.value, ast.Name) and k.value.id == node.args.kwarg.arg
            for k in call.keywords
        )
    ]


def docstrings(sources: list[Source]) -> list[str]:
    """Ask for a docstring on each module, public class and public function.

    A module other than an __init__ says what it owns, must not know and keeps: three lines or more.
    """
    found = []
    for s in sources:
        told = ast.get_docstring(s.tree)
        if told is None:
            found.append(f"{s.shown}:1: the module has no docstring")
        elif not s.is_package and not s.name.endswith("__main__") and _lines(told) < 3:
            found.append(f"{s.shown}:1: the module's docstring has fewer than three lines")
        found += [
            f"{s.shown}:{node.lineno}: {name} is public and has no docstring"
            for name, node in _public(s.tree.body, "")
            if ast.get_docstring(node) is None
        ]
    return found


def exports(sources: list[Source]) -> list[str]:
    """Ask that `__all__`, where there is one, is literal, sorted, without repeats, and bound."""
    found = []
    for s in sources:
        for node in s.tree.body:
            names = _all_of(node)
            if names is None:
                continue
            where = f"{s.shown}:{node.lineno}: __all__"
            if names != sorted(set(names), key=_export_order):
                found.append(f"{where} is not sorted or repeats a name")
                continue
            known = set(_bound(s.tree.body))
            if "__getattr__" in known:  # lazy exports are checked by importing them
                continue
            found += [f"{where} names {n}, which is not there" for n in names if n not in known]
    return found


def names(sources: list[Source]) -> list[str]:
    """Refuse grab-bag modules and class names that say what a thing is built from."""
    found = [
        f"{s.shown}: a module is named by what it owns, not {stem}"
        for s in sources
        for stem in [PurePosixPath(s.shown).stem]
        if stem in _BAD_STEMS
    ]
    for s in sources:
        for node in ast.walk(s.tree):
            if isinstance(node, ast.ClassDef) and (
                node.name.startswith("Base")
                or node.name.endswith(("Impl", "Util", "Utils", "Helper"))
            ):
                found.append(f"{s.shown}:{node.lineno}: class {node.name} is not named by its role")
    return found


def _export_order(name: str) -> tuple[int, str]:
    """Order as import sorters do: CONSTANTS, then Classes, then the rest, each by name."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def _lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


def _count(node: FunctionNode) -> int:
    a = node.args
    given = [*a.posonlyargs, *a.args]
    own = 1 if given and given[0].arg in {"self", "cls"} else 0
    return len(given) + len(a.kwonlyargs) + sum(x is not None for x in (a.vararg, a.kwarg)) - own


def _public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, FunctionNode | ast.ClassDef]]:
    """Yield public functions, classes and the public methods of public classes."""
    for node in body:
        if not isinstance(node, FunctionNode | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node.body, f"{prefix}{node.name}.")


def _all_of(node: ast.stmt) -> list[str] | None:
    """Return the names of an `__all__` assignment, None for any other statement."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets, value = [node.target], node.value
    else:
        return None
    if not any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
        return None
    if not isinstance(value, ast.List | ast.Tuple):
        return ["", ""]  # neither sorted nor unique: reported by the caller
    return [str(e.value) if isinstance(e, ast.Constant) else "" for e in value.elts]


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module's top level binds, also inside if and try."""
    for node in body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _bound(node.body)
