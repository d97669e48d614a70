"""Tool-call questions: several tools offered, one asked for, arguments standing in the prompt.

Owns the items; `score` judges answers. Knows no chat template.
Invariant: the right call is the only one that the wish names, and every argument is in the wish
verbatim.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from oxplow.feedback.exam.families import TOOL_ARGUMENT, TOOL_WISHES, TOOLS, Form
from oxplow.feedback.exam.values import JsonValue, draw_value, list_arguments, schema_of


@dataclass(frozen=True, slots=True)
class ToolItem:
    """One wish: messages and tools as an OpenAI client sends them, and the call that is right."""

    messages: list[dict[str, str]]
    tools: list[dict[str, object]]
    name: str
    arguments: dict[str, JsonValue]


def tool_schema(form: Form) -> dict[str, object]:
    """Return the form as an OpenAI function tool."""
    function = {
        "name": form.name,
        "description": form.description.capitalize() + ".",
        "parameters": schema_of(form),
    }
    return {"type": "function", "function": function}


def build_tool_items(count: int, seed: int = 0) -> list[ToolItem]:
    """Build `count` items with two to four tools each."""
    rng = random.Random(f"tools:{seed}")
    items = []
    for _ in range(count):
        offered = rng.sample(TOOLS, rng.randint(2, 4))
        form = rng.choice(offered)
        arguments = {field.name: draw_value(field, rng) for field in form.fields}
        wish = rng.choice(TOOL_WISHES).format(
            task=form.description, arguments=list_arguments(TOOL_ARGUMENT, arguments)
        )
        items.append(
            ToolItem(
                [{"role": "user", "content": wish}],
                [tool_schema(f) for f in offered],
                form.name,
                arguments,
            )
        )
    return items
