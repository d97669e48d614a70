"""The type of a tool argument: raw text or JSON, decided by the tool's schema.

Owns the reading of schemas for this one question. Knows no markup.
Invariant: a value whose schema allows text only stays the text that it was, digit for digit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = ["ValueKind", "json_of", "property_schema", "value_kind", "with_definitions"]

_DEPTH = 16  # references may form rings
_PYTHON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class ValueKind(Enum):
    """Say how the text of a value becomes JSON."""

    TEXT = "text"  # only text is allowed
    JSON = "json"  # text is not allowed
    EITHER = "either"  # both: JSON only where it cannot be meant as text
    UNKNOWN = "unknown"  # the schema says nothing: JSON where it parses


def property_schema(parameters: Mapping[str, Any], key: str) -> Any:
    """Return the schema of one argument, {} where none is declared."""
    root = _resolved(parameters, parameters, _DEPTH)
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    extra = root.get("additionalProperties")
    return extra if isinstance(extra, Mapping) else {}


def value_kind(schema: Any, parameters: Mapping[str, Any]) -> ValueKind:
    """Tell how values of `schema` are written; `parameters` holds the definitions it refers to."""
    types = _types(schema, parameters, _DEPTH)
    if not types:
        return ValueKind.UNKNOWN
    if "string" not in types:
        return ValueKind.JSON
    return ValueKind.TEXT if types == {"string"} else ValueKind.EITHER


def json_of(text: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    """Return the JSON text of a raw value.

    What does not parse stays text. Where text and other types are allowed, a number stays text: "1"
    may be meant as such.
    """
    kind = value_kind(schema, parameters)
    if kind is not ValueKind.TEXT:
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            value = text
        if kind is ValueKind.EITHER:
            allowed = _types(schema, parameters, _DEPTH) - {"integer", "number"}
            if _PYTHON_TYPES[type(value)] not in allowed:
                value = text
        if not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        if kind in (ValueKind.JSON, ValueKind.UNKNOWN) and value != text:
            return json.dumps(value, ensure_ascii=False)  # the model wrote the quotes itself
    return json.dumps(text, ensure_ascii=False)


def with_definitions(schema: Any, parameters: Mapping[str, Any]) -> Any:
    """Return a property's schema that stands alone: the tool's definitions travel with it."""
    if not isinstance(schema, Mapping):
        return schema
    shared = {k: parameters[k] for k in ("$defs", "definitions") if k in parameters}
    return {**shared, **schema}


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Return the JSON types that a schema allows; empty: it does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    schema = _resolved(schema, root, depth)
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {t for t in declared if isinstance(t, str)}
    if "const" in schema:
        return {_PYTHON_TYPES.get(type(schema["const"]), "object")}
    if isinstance(schema.get("enum"), list):
        return {_PYTHON_TYPES.get(type(v), "object") for v in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            branches = [_types(branch, root, depth - 1) for branch in schema[key]]
            return set().union(*branches) if all(branches) else set()
    if isinstance(schema.get("allOf"), list):
        told = [t for t in (_types(b, root, depth - 1) for b in schema["allOf"]) if t]
        return set.intersection(*told) if told else set()
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    """Follow `$ref` inside the tool's own schema."""
    while depth and isinstance(schema.get("$ref"), str):
        depth -= 1
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            if part:
                part = part.replace("~1", "/").replace("~0", "~")
                target = target.get(part) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = target
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
