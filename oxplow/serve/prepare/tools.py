"""The tools of a request, the choice between them, and the enforced form of the answer.

Owns `tools`, `tool_choice` and `response_format`. Knows no template and no engine.
Invariant: a tool type that cannot be served is dropped, a malformed function is refused by name;
what must be enforced becomes a grammar that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oxplow.serve.grammar import AnswerRule, ToolShape
from oxplow.serve.prepare.fields import Fields, field_error

__all__ = ["Toolbox", "answer_rule", "read_tools"]

_UNSEEN = frozenset({"strict", "defer_loading", "cache_control"})  # settings, not for the model
_MOST_TOOLS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolbox:
    """Hold the tools: as the template shows them, as shapes, and which of them must be called.

    `must_call` is empty where the model may decide; `may_call` False forbids calls.
    """

    shown: tuple[Mapping[str, Any], ...] = ()
    shapes: tuple[ToolShape, ...] = ()
    must_call: tuple[ToolShape, ...] = ()
    may_call: bool = True
    is_parallel: bool = True


def read_tools(fields: Fields) -> Toolbox:
    """Read `tools`, the older `functions`, `tool_choice` and `parallel_tool_calls`."""
    listed = fields.items("tools")
    name = "tools"
    if listed is None:
        functions = fields.items("functions") or []
        listed = [{"type": "function", "function": f} for f in functions]
        name = "functions"
    if len(listed) > _MOST_TOOLS:
        raise field_error(name, f"{len(listed)} tools", f"at most {_MOST_TOOLS}")
    shown: list[Mapping[str, Any]] = []
    shapes: dict[str, ToolShape] = {}
    for number, tool in enumerate(listed):
        function = _function(tool, f"{name}.{number}")
        if function is not None:
            shown.append({"type": "function", "function": function})
            parameters = function.get("parameters") or {}
            shapes[function["name"]] = ToolShape(name=function["name"], parameters=parameters)
    box = Toolbox(
        shown=tuple(shown),
        shapes=tuple(shapes.values()),
        is_parallel=fields.flag("parallel_tool_calls") is not False,
    )
    choice = fields.values.get("tool_choice", fields.values.get("function_call"))
    return _chosen(box, choice, shapes)


def _function(tool: Any, where: str) -> dict[str, Any] | None:
    """Return one function without its settings; None for a tool of another type."""
    if not isinstance(tool, Mapping):
        raise field_error(where, tool, "an object")
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise field_error(f"{where}.type", kind, "text")
    if kind != "function":
        return None
    function = tool.get("function")
    if function is None and "name" in tool:
        function = {k: v for k, v in tool.items() if k != "type"}  # the flat form of /v1/responses
    if not isinstance(function, Mapping):
        raise field_error(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > 256:
        raise field_error(f"{where}.function.name", name, "text of 1 to 256 characters")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise field_error(f"{where}.function.parameters", parameters, "a JSON schema object")
    return {k: v for k, v in function.items() if k not in _UNSEEN}


def _chosen(box: Toolbox, choice: Any, shapes: Mapping[str, ToolShape]) -> Toolbox:
    """Apply `tool_choice`: auto, none, required, a named function, or a list of allowed ones."""
    if choice is None or choice == "auto":
        return box
    if choice == "none":
        return replace(box, may_call=False)
    if choice in ("required", "any"):
        if not box.shapes:
            raise field_error("tool_choice", choice, "tools to choose from")
        return replace(box, must_call=box.shapes)
    if not isinstance(choice, Mapping):
        raise field_error("tool_choice", choice, "auto, none, required or a named function")
    if choice.get("type") == "allowed_tools":
        return _allowed(box, choice, shapes)
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in shapes:
        raise field_error("tool_choice", name, "one of " + (", ".join(shapes) or "the tools"))
    return replace(box, must_call=(shapes[name],), is_parallel=False)


def _allowed(box: Toolbox, choice: Mapping[str, Any], shapes: Mapping[str, ToolShape]) -> Toolbox:
    inner = choice.get("allowed_tools", choice)
    listed = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(listed, list):
        raise field_error("tool_choice.tools", listed, "a list")
    names = [
        (t.get("function") or t).get("name") if isinstance(t, Mapping) else None for t in listed
    ]
    kept = tuple(shapes[n] for n in names if isinstance(n, str) and n in shapes)
    if inner.get("mode") == "required":
        if not kept:
            raise field_error("tool_choice.tools", names, "one of " + ", ".join(shapes))
        return replace(box, must_call=kept)
    return replace(box, shapes=kept)


def answer_rule(fields: Fields, box: Toolbox) -> AnswerRule | None:
    """Return what the answer must be, None where it is free. Reasoning is added by the caller."""
    wanted = _format(fields)
    if box.must_call:
        return AnswerRule(calls=box.must_call, is_parallel=box.is_parallel)
    if wanted is not None and wanted.schema is not None and box.shapes and box.may_call:
        return replace(wanted, calls=box.shapes, is_parallel=box.is_parallel)
    return wanted


def _format(fields: Fields) -> AnswerRule | None:
    """Read `response_format`, or `structured_outputs` and `guided_*` as other servers name it."""
    found = fields.inner("response_format")
    if found is not None:
        return _response_format(found)
    for prefix, source in (
        ("", fields.inner("structured_outputs")),
        ("guided_", fields),
    ):
        if source is not None:
            rule = _guided(source, prefix)
            if rule is not None:
                return rule
    return None


def _response_format(found: Fields) -> AnswerRule | None:
    kind = found.values.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return AnswerRule(schema=True)
        case "json_schema":
            inner = found.inner("json_schema") or found
            schema = inner.values.get("schema")
            if not isinstance(schema, Mapping | bool):
                raise field_error(inner.name("schema"), schema, "a JSON schema")
            return AnswerRule(schema=schema, is_lenient=inner.flag("strict") is not True)
        case "regex":
            pattern = found.text("pattern") or found.text("regex")
            if not pattern:
                raise field_error(found.name("pattern"), pattern, "a pattern")
            return AnswerRule(regex=pattern)
        case "grammar":
            lark = found.text("grammar")
            if not lark:
                raise field_error(found.name("grammar"), lark, "a grammar in Lark form")
            return AnswerRule(lark=lark)
    wanted = "text, json_object, json_schema, regex or grammar"
    raise field_error(found.name("type"), kind, wanted)


def _guided(source: Fields, prefix: str) -> AnswerRule | None:
    schema = source.values.get(f"{prefix}json")
    if schema is not None:
        if not isinstance(schema, Mapping):
            raise field_error(source.name(f"{prefix}json"), schema, "a JSON schema object")
        return AnswerRule(schema=schema)
    if source.flag(f"{prefix}json_object"):
        return AnswerRule(schema=True)
    pattern = source.text(f"{prefix}regex")
    if pattern:
        return AnswerRule(regex=pattern)
    lark = source.text(f"{prefix}grammar")
    if lark:
        return AnswerRule(lark=lark)
    choices = source.texts(f"{prefix}choice", 1024)
    return AnswerRule(regex="(" + "|".join(_literal(c) for c in choices) + ")") if choices else None


def _literal(text: str) -> str:
    """Quote text for a pattern."""
    special = set("\\.+*?()|[]{}^$#&-~")
    return "".join("\\" + c if c in special else c for c in text)
