"""Draws argument values for the examination's tools and schemas.

Owns the drawing only; the words come from `families`. Knows no question.
Invariant: a value's JSON type follows its field's kind.
"""

from __future__ import annotations

import json
import random

from oxplow.feedback.exam.families import ADJECTIVES, NOUNS, PLACES, Field, Form

JsonValue = str | int | float | bool
JSON_TYPES: dict[str, str] = {"integer": "integer", "number": "number", "boolean": "boolean"}


def draw_value(field: Field, rng: random.Random) -> JsonValue:
    """Draw one value of the field's kind."""
    match field.kind:
        case "word":
            return rng.choice(NOUNS + PLACES)
        case "phrase":
            return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        case "code":
            return f"{rng.choice(PLACES)}-{rng.randint(100, 999)}"
        case "digits":
            return str(rng.randint(1000, 99999))
        case "integer":
            return rng.randint(2, 480)
        case "number":
            return rng.randint(11, 999) / 10
        case "boolean":
            return rng.random() < 0.5


def spell(value: JsonValue) -> str:
    """Write a value as a person would: strings bare, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def schema_of(form: Form) -> dict[str, object]:
    """Return the JSON schema of a form's fields, all of them required."""
    properties = {
        field.name: {"type": JSON_TYPES.get(field.kind, "string")} for field in form.fields
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [field.name for field in form.fields],
    }


def list_arguments(template: str, arguments: dict[str, JsonValue]) -> str:
    """Join the arguments as prose, each through the template."""
    return ", ".join(
        template.format(name=name, value=spell(value)) for name, value in arguments.items()
    )
