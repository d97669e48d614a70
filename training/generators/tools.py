"""Tool-call and JSON conversations: names, schemas and values are drawn fresh each time.

Owns the two families. Invariant: every argument stands in the prompt; values are typed by their
schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from oxplow.feedback.exam import families as exam
from training.chat import Call, Conversation, JsonValue, Turn
from training.families import ARGUMENTS, FIELDS, JSON_WISHES, TOOL_OBJECTS, TOOL_VERBS, TOOL_WISHES
from training.generators.names import tool_name
from training.generators.phrases import connector, wish
from training.generators.source import Source, schema_type, spell

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


DESCRIPTIONS = (
    "use this to {}",
    "tool to {}",
    "{} when asked",
    "helps to {} at once",
    "will {} and report",
    "{} (slow)",
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


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: its OpenAI form, its name, the task in words, values for its arguments."""

    form: dict[str, object]
    name: str
    task: str
    values: dict[str, JsonValue]


def draw_tool(source: Source, verbs: list[str], things: list[str]) -> Tool:
    """Draw a tool that does one of the verbs to one of the things."""
    rng = source.rng
    verb, thing = rng.choice(verbs), rng.choice(things)
    article = rng.choice(("the", "the", "a", "some", "my"))
    extra = " " + rng.choice(PLACES).format(source.word()) if rng.random() < 0.4 else ""
    task = f"{verb.replace('_', ' ')} {article} {thing}{extra}"
    name = tool_name(source, verb, thing)
    values, schema = draw_fields(source, 1, 4)
    told = task if rng.random() < 0.8 else rng.choice(DESCRIPTIONS).format(task)
    description = told.capitalize() + rng.choice((".", ".", ""))
    function = {"name": name, "description": description, "parameters": schema}
    return Tool({"type": "function", "function": function}, name, task, values)


def draw_tools(source: Source, count: int) -> dict[str, Tool]:
    """Draw `count` tools by name; often they share verbs or things, so that one word of the task is
    not enough.
    """
    rng = source.rng
    verbs, things = (
        [
            rng.choice(known) if rng.random() < 0.5 else source.word()
            for _ in range(rng.choice((1, 2, count, count, count)))
        ]
        for known in (TOOL_VERBS, TOOL_OBJECTS)
    )
    tools: dict[str, Tool] = {}
    tasks: set[str] = set()
    while len(tools) < count:
        tool = draw_tool(source, verbs, things)
        if tool.task in tasks or tool.name in tools:
            verbs.append(source.word())
            continue
        tasks.add(tool.task)
        tools[tool.name] = tool
    return tools


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


def write_wish(source: Source, tool: Tool) -> str:
    """Phrase what the user wants of one tool."""
    task, arguments = tool.task, list_arguments(source, tool.values)
    if source.rng.random() < 0.6:
        return wish(source, task, arguments)
    names = {"task": task, "Task": task[0].upper() + task[1:], "name": tool.name}
    return source.rng.choice(TOOL_WISHES).format(arguments=arguments, **names)


def tool_conversation(source: Source) -> Conversation:
    """Offer one to four tools, have one or two called, answer from the responses."""
    rng = source.rng
    tools = draw_tools(source, rng.choice((1, 2, 2, 3, 3, 4, 4, 5)))
    forms = tuple(tool.form for tool in tools.values())
    if rng.random() < 0.08:
        turn = Turn(
            "Hello!",
            "Hello! How can I help you?",
            "No tool is needed." if rng.random() < 0.5 else None,
        )
        return Conversation((turn,), tools=forms)
    names = rng.sample(list(tools), 2 if len(tools) > 1 and rng.random() < 0.12 else 1)
    wanted = " Then: ".join(write_wish(source, tools[n]) for n in names)
    calls = tuple(Call(n, tools[n].values) for n in names)
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
