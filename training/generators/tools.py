"""Tool-call and JSON conversations: names, schemas and values are drawn fresh each time.

Owns the two families. Invariant: every argument stands in the prompt; values are typed by their
schema.
"""

from __future__ import annotations

import json

from oxplow.feedback.exam import families as exam
from training.chat import Call, Conversation, JsonValue, Turn
from training.families import ARGUMENTS, FIELDS, JSON_WISHES, TOOL_OBJECTS, TOOL_VERBS, TOOL_WISHES
from training.generators.phrases import connector, wish
from training.generators.source import Source, schema_type, spell

EXAM_NAMES = frozenset(form.name for form in exam.TOOLS)
EXAM_FIELDS = frozenset(
    field.name for form in exam.TOOLS + exam.JSON_FORMS for field in form.fields
)
PLACES = (
    "in the {}",
    "for the {}",
    "from the {}",
    "of a {}",
    "to {}",
    "on {}",
    "with the {}",
    "at the {}",
)


def field_name(source: Source) -> str:
    """Draw a field name that the examination does not use."""
    rng = source.rng
    while True:
        kind = rng.random()
        if kind < 0.4:
            name = rng.choice(FIELDS)
        elif kind < 0.7:
            name = source.word()
        elif kind < 0.9:
            name = f"{source.word()}_{source.word()}"
        else:
            name = source.word() + source.word().title()
        if name not in EXAM_FIELDS:
            return name


def draw_fields(
    source: Source, low: int, high: int
) -> tuple[dict[str, JsonValue], dict[str, object]]:
    """Draw values by field and the JSON schema that types them."""
    rng = source.rng
    values: dict[str, JsonValue] = {}
    properties: dict[str, object] = {}
    for _ in range(rng.randint(low, high)):
        name = field_name(source)
        value, kind = source.argument()
        values[name], properties[name] = value, schema_type(value, kind)
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        schema["required"] = list(properties)
    return values, schema


def draw_tool(source: Source) -> tuple[dict[str, object], str, str, dict[str, JsonValue]]:
    """Draw a tool: its OpenAI form, its name, the task in words, values for its arguments."""
    rng = source.rng
    known = rng.random() < 0.5
    verb = rng.choice(TOOL_VERBS) if known else source.word()
    thing = rng.choice(TOOL_OBJECTS) if known else source.word()
    article = rng.choice(("the", "the", "a", "some", "my"))
    extra = " " + rng.choice(PLACES).format(source.word()) if rng.random() < 0.4 else ""
    task = f"{verb.replace('_', ' ')} {article} {thing}{extra}"
    joined = rng.choice(("_", "_", ".", ""))
    name = verb + joined + (thing if joined else thing.title())
    if name in EXAM_NAMES:
        return draw_tool(source)
    values, schema = draw_fields(source, 1, 4)
    description = task.capitalize() + rng.choice((".", ".", ""))
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}, name, task, values


def list_arguments(source: Source, values: dict[str, JsonValue]) -> str:
    """Write the arguments as prose in one style, in a random order."""
    rng = source.rng
    known = rng.random() < 0.35
    style = rng.choice(ARGUMENTS) if known else connector(source, len(values) > 1)
    pairs = list(values.items())
    if rng.random() < 0.3:
        rng.shuffle(pairs)
    words = [style.format(k=key, v=spell(value)) for key, value in pairs]
    if len(words) > 1 and rng.random() < 0.5:
        return ", ".join(words[:-1]) + " and " + words[-1]
    return rng.choice((", ", ", ", "; ")).join(words)


def write_wish(source: Source, name: str, task: str, values: dict[str, JsonValue]) -> str:
    """Phrase what the user wants of one tool."""
    if source.rng.random() < 0.6:
        return wish(source, task, list_arguments(source, values))
    names = {"task": task, "Task": task[0].upper() + task[1:], "name": name}
    return source.rng.choice(TOOL_WISHES).format(arguments=list_arguments(source, values), **names)


def tool_conversation(source: Source) -> Conversation:
    """Offer one to four tools, have one or two called, answer from the responses."""
    rng = source.rng
    tools: dict[str, tuple[dict[str, object], str, dict[str, JsonValue]]] = {}
    for _ in range(rng.randint(1, 4)):
        form, name, task, values = draw_tool(source)
        tools[name] = (form, task, values)
    forms = tuple(form for form, _, _ in tools.values())
    if rng.random() < 0.08:
        turn = Turn(
            "Hello!",
            "Hello! How can I help you?",
            "No tool is needed." if rng.random() < 0.5 else None,
        )
        return Conversation((turn,), tools=forms)
    names = rng.sample(list(tools), 2 if len(tools) > 1 and rng.random() < 0.12 else 1)
    wanted = " Then: ".join(write_wish(source, n, tools[n][1], tools[n][2]) for n in names)
    calls = tuple(Call(n, tools[n][2]) for n in names)
    responses, told = [], []
    for _ in names:
        result = {field_name(source): source.argument()[0] for _ in range(rng.randint(1, 2))}
        responses.append(json.dumps(result))
        told.append(", ".join(f"{key} is {spell(value)}" for key, value in result.items()))
    reasoning = f"Use {' and '.join(names)}." if rng.random() < 0.4 else None
    turn = Turn(
        wanted, f"Done: {'; '.join(told)}.", reasoning, calls=calls, responses=tuple(responses)
    )
    return Conversation((turn,), tools=forms, effort=rng.choice(("Max", "Max", "High", "Low")))


def json_conversation(source: Source) -> Conversation:
    """Ask for one JSON object by schema; values stand in the prompt, keys come in schema order."""
    rng = source.rng
    values, schema = draw_fields(source, 1, 5)
    topic = source.word()
    task = rng.choice((topic, topic, f"{source.word()} {topic}"))
    arguments, form = list_arguments(source, values), json.dumps(schema)
    if rng.random() < 0.5:
        ask = rng.choice(JSON_WISHES).format(arguments=arguments, schema=form, topic=task)
    else:
        verb = (
            source.word()
            if rng.random() < 0.4
            else rng.choice(("write", "make", "give", "form", "put"))
        )
        order = [f"{verb} a {task}", form] if rng.random() < 0.5 else [form, f"{verb} the {task}"]
        glue = rng.choice(
            (" ", " in ", " with ", " as ", ": ", " from ", ", ", "\n", " following ", " by ")
        )
        ask = wish(source, glue.join(order), arguments)
    reasoning = f"Keys: {', '.join(values)}." if rng.random() < 0.25 else None
    return Conversation((Turn(ask, json.dumps(values), reasoning),))
