"""JSON questions: an object asked for by schema, its values standing in the prompt.

Owns the items; `score` judges answers. Knows no model.
Invariant: an answer is valid if it parses and has the schema's keys and types, right if it equals
`expected`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from oxplow.feedback.exam.families import JSON_ARGUMENT, JSON_FORMS, JSON_REQUESTS
from oxplow.feedback.exam.values import JsonValue, draw_value, list_arguments, schema_of


@dataclass(frozen=True, slots=True)
class JsonItem:
    """One request (thinking off), its schema, and the object that is right."""

    messages: list[dict[str, str]]
    schema: dict[str, object]
    expected: dict[str, JsonValue]


def build_json_items(count: int, seed: int = 0) -> list[JsonItem]:
    """Build `count` items over all schemas."""
    rng = random.Random(f"json:{seed}")
    items = []
    for _ in range(count):
        form = rng.choice(JSON_FORMS)
        values = {field.name: draw_value(field, rng) for field in form.fields}
        schema = schema_of(form)
        request = rng.choice(JSON_REQUESTS).format(
            task=form.description,
            schema=json.dumps(schema),
            arguments=list_arguments(JSON_ARGUMENT, values),
        )
        items.append(JsonItem([{"role": "user", "content": request}], schema, values))
    return items
