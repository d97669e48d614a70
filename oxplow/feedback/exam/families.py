"""Words, templates and sources that only the examination uses.

Owns plain data. Training draws from its own lists and from its corpus's words minus `WORDS`, so
nothing here may move to training.
Invariant: every list is non-empty, lower-case words are unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["word", "phrase", "code", "integer", "number", "boolean", "digits"]

ADJECTIVES: tuple[str, ...] = (
    "copper",
    "velvet",
    "crooked",
    "polished",
    "frozen",
    "wicker",
    "dusty",
    "scarlet",
    "turquoise",
    "ivory",
    "plaid",
    "gilded",
    "mossy",
    "hollow",
    "striped",
    "painted",
    "woollen",
    "granite",
    "walnut",
    "smoky",
    "weathered",
    "emerald",
    "bronze",
    "lacquered",
)
NOUNS: tuple[str, ...] = (
    "lighthouse",
    "accordion",
    "compass",
    "telescope",
    "violin",
    "greenhouse",
    "typewriter",
    "teapot",
    "windmill",
    "chandelier",
    "hammock",
    "barometer",
    "carousel",
    "wheelbarrow",
    "tapestry",
    "submarine",
    "gramophone",
    "scarecrow",
    "cello",
    "hourglass",
    "kayak",
    "observatory",
    "rickshaw",
    "sundial",
    "trombone",
    "vineyard",
    "waterfall",
    "xylophone",
    "aquarium",
    "boathouse",
)
PLACES: tuple[str, ...] = (
    "lisbon",
    "oslo",
    "nairobi",
    "quito",
    "hanoi",
    "tallinn",
    "ankara",
    "bergen",
    "cusco",
    "dakar",
    "galway",
    "havana",
    "izmir",
    "kyoto",
    "leipzig",
    "malaga",
)
WORDS: frozenset[str] = frozenset(ADJECTIVES) | frozenset(NOUNS) | frozenset(PLACES)


@dataclass(frozen=True, slots=True)
class FactTemplate:
    """How a fact is written into a haystack and asked for; both take {key}, one also {value}."""

    statement: str
    question: str


FACTS: tuple[FactTemplate, ...] = (
    FactTemplate(
        " Please note that the {key} is registered as {value}. ", "How is the {key} registered?"
    ),
    FactTemplate("\n- {key}: filed under {value}\n", "Under which entry is the {key} filed?"),
    FactTemplate(
        "\nREGISTRY['{key}'] = '{value}'\n", "Which entry does REGISTRY hold for '{key}'?"
    ),
    FactTemplate(" They say that the {key} answers to {value}. ", "What does the {key} answer to?"),
    FactTemplate("\n/* {key} maps onto {value} */\n", "Onto what does the {key} map?"),
    FactTemplate(
        " In the ledger, {key} appears next to {value}. ",
        "Which ledger item appears next to {key}?",
    ),
)


@dataclass(frozen=True, slots=True)
class Field:
    """One typed field of a tool or a JSON schema."""

    name: str
    kind: ValueKind


@dataclass(frozen=True, slots=True)
class Form:
    """A tool or a JSON schema: name, description (a tool's wish is phrased from it), fields."""

    name: str
    description: str
    fields: tuple[Field, ...]


TOOLS: tuple[Form, ...] = (
    Form(
        "reserve_berth",
        "reserve a berth in the marina",
        (Field("vessel", "phrase"), Field("nights", "integer")),
    ),
    Form(
        "water_plants",
        "water the plants",
        (Field("greenhouse_bay", "word"), Field("litres", "number")),
    ),
    Form(
        "translate_menu",
        "translate the menu",
        (Field("tongue", "word"), Field("keep_prices", "boolean")),
    ),
    Form(
        "dispatch_courier",
        "dispatch a courier",
        (Field("parcel_ref", "code"), Field("doorstep", "phrase")),
    ),
    Form(
        "brew_coffee",
        "brew some coffee",
        (Field("roast", "word"), Field("cups", "integer"), Field("decaf", "boolean")),
    ),
    Form(
        "tune_instrument",
        "tune the instrument",
        (Field("pitch_hz", "number"), Field("instrument", "word")),
    ),
    Form(
        "renewLibraryLoan",
        "renew the library loan",
        (Field("card_digits", "digits"), Field("weeks", "integer")),
    ),
    Form(
        "lockVault",
        "lock the vault",
        (Field("vault_wing", "word"), Field("silent_mode", "boolean")),
    ),
    Form(
        "orbit.adjust",
        "adjust the orbit",
        (Field("satellite", "phrase"), Field("delta_v", "number")),
    ),
    Form("kiln.preheat", "preheat the kiln", (Field("celsius", "integer"), Field("glaze", "word"))),
    Form(
        "appraise_painting",
        "appraise the painting",
        (Field("artist", "phrase"), Field("insured", "boolean")),
    ),
    Form(
        "charter_bus",
        "charter a bus",
        (Field("seats", "integer"), Field("route_code", "code"), Field("depot", "word")),
    ),
    Form(
        "sharpen_skates",
        "sharpen the skates",
        (Field("rink", "word"), Field("hollow_mm", "number")),
    ),
    Form(
        "publishBulletin",
        "publish the bulletin",
        (Field("headline", "phrase"), Field("edition_no", "digits")),
    ),
)
JSON_FORMS: tuple[Form, ...] = (
    Form(
        "harvest",
        "a harvest report",
        (Field("orchard", "word"), Field("crates", "integer"), Field("ripe", "boolean")),
    ),
    Form(
        "ferry",
        "a ferry crossing",
        (Field("harbour", "word"), Field("knots", "number"), Field("skipper", "phrase")),
    ),
    Form("recital", "a recital", (Field("pianist", "phrase"), Field("encores", "integer"))),
    Form(
        "meteorite",
        "a meteorite",
        (Field("crater", "phrase"), Field("grams", "number"), Field("catalogued", "boolean")),
    ),
    Form(
        "locksmith", "a locksmith's ticket", (Field("keyhole", "code"), Field("apprentice", "word"))
    ),
    Form(
        "aviary",
        "an aviary",
        (Field("finches", "integer"), Field("keeper", "phrase"), Field("heated", "boolean")),
    ),
    Form(
        "stamp",
        "a postage stamp",
        (Field("perforation", "number"), Field("watermark", "word"), Field("sheet_no", "digits")),
    ),
)
TOOL_WISHES: tuple[str, ...] = (
    "I need you to {task}. {arguments}.",
    "Could you {task} for me? {arguments}.",
    "Time to {task}; {arguments}, thanks.",
)
TOOL_ARGUMENT = "{name} should be {value}"
JSON_REQUESTS: tuple[str, ...] = (
    "Describe {task} as JSON that follows the schema {schema} given that {arguments}.",
    "Fill in {schema} for {task}. Known: {arguments}. Reply with the JSON object alone.",
)
JSON_ARGUMENT = "{name} equals {value}"

DIGIT_QUESTIONS: tuple[str, ...] = (
    "What numeral can you make out here?",
    "Read the digit in this picture.",
)
SHAPE_QUESTIONS: tuple[str, ...] = (
    "What form has been drawn here?",
    "Tell me the shape in this picture.",
)
COLOUR_QUESTIONS: tuple[str, ...] = (
    "In what colour is the figure painted?",
    "Tell me the colour of the figure.",
)
PICTURE_SEED = 7_000_000

HELD_OUT_CODE: tuple[str, ...] = ("networkx", "pygments")
HELD_OUT_PROSE: tuple[str, ...] = ("pydoc_data.topics",)
