"""Words, templates and sources that only training uses.

Owns plain data and the word filter. The examination's half lies in
`oxplow/feedback/exam/families.py`; a test intersects the two. Invariant: no template, tool name,
schema field, value word, haystack source or picture seed stands in both.
"""

from __future__ import annotations

import re
from collections import Counter

from oxplow.feedback.exam import families as exam
from training import dev
from training.lists import words

HELD_OUT: frozenset[str] = frozenset(
    name.split(".")[0] for name in exam.HELD_OUT_CODE + exam.HELD_OUT_PROSE
)
PICTURE_SEED = 1_000_000
PICTURE_SEED_END = exam.PICTURE_SEED

# How a fact stands in the text, and how it is asked. {a} {n}: the key's two words, {v}: the value.
FACTS: tuple[tuple[str, str], ...] = (
    (" The secret code for the {a} {n} is {v}. ", "What is the secret code for the {a} {n}?"),
    ('\n{a}_{n} = "{v}"\n', "What is the value of {a}_{n}?"),
    ("\n# note: the {a} {n} was moved to {v}\n", "Where was the {a} {n} moved to?"),
    (' "{a} {n}": "{v}", ', "Which value has the key {a} {n}?"),
    (" Remember: {a} {n} = {v}. ", "What did I say about {a} {n}?"),
    (" The password of the {a} {n} is {v}. ", "Give me the password of the {a} {n}."),
    ("\n{a} {n}: {v}\n", "{a} {n}?"),
    (" You will find the {a} {n} at {v}. ", "Where will I find the {a} {n}?"),
    ("\nset {a}.{n} {v}\n", "What was {a}.{n} set to?"),
    (" The {a} {n} belongs to {v}. ", "Who does the {a} {n} belong to?"),
    ("\n<{a}-{n}>{v}</{a}-{n}>\n", "What is inside the element {a}-{n}?"),
    (" Our {a} {n} has the number {v}. ", "Which number has our {a} {n}?"),
    ("\n    {a}_{n}: {v}\n", "Look up {a}_{n}."),
    (" It was decided that the {a} {n} is called {v}. ", "How is the {a} {n} called?"),
    ("\n| {a} {n} | {v} |\n", "What stands in the table row of the {a} {n}?"),
    (" The key to the {a} {n} is {v}. ", "What is the key to the {a} {n}?"),
    ("\nconst {a}_{n} = '{v}';\n", "Which constant is {a}_{n}?"),
    (" Someone left {v} beside the {a} {n}. ", "What was left beside the {a} {n}?"),
    ("\n{v} -> {a} {n}\n", "What points to the {a} {n}?"),
    (" The price of the {a} {n} was {v}. ", "Tell me the price of the {a} {n}."),
    ("\n@{a}/{n} {v}\n", "Which tag has @{a}/{n}?"),
    (" {v} is the address of the {a} {n}. ", "State the address of the {a} {n}."),
    ("\nexport {a}_{n}={v}\n", "To what was {a}_{n} exported?"),
    (" We traded the {a} {n} for {v}. ", "For what did we trade the {a} {n}?"),
    ("\nfield('{a} {n}', '{v}')\n", "Find the field '{a} {n}'."),
    (" The label on the {a} {n} reads {v}. ", "Read me the label on the {a} {n}."),
)
SINGLE_FACTS: tuple[tuple[str, str], ...] = (
    (" The code of {n} is {v}. ", "What is the code of {n}?"),
    ('\n{n} = "{v}"\n', "What is {n}?"),
    ("\n{n}: {v}\n", "Give me {n}."),
    (" Note that {n} means {v}. ", "What does {n} mean here?"),
)

TOOL_VERBS: tuple[str, ...] = words(
    "get set list create delete update send search start stop open close move copy rename "
    "schedule cancel convert measure book find play pause add remove check order print scan "
    "upload download count sort filter show hide turn_on turn_off lookup fetch reset enable "
    "disable archive restore assign merge split"
)
TOOL_OBJECTS: tuple[str, ...] = words(
    "light file user order ticket volume sensor message report alarm camera door task invoice "
    "server backup playlist flight room timer weather email event contact photo document "
    "account session device payment reminder song video hotel table product price note folder "
    "calendar thermostat window printer route"
)
FIELDS: tuple[str, ...] = words(
    "name level size color path city date count mode limit target priority format user_id "
    "zone speed title unit language email location query amount id type status message time "
    "start end duration category address phone age price quantity description enabled verbose "
    "recursive force public tags width height value key label country state currency "
    "brightness temperature subject body owner version host port total score rating"
)
TOOL_WISHES: tuple[str, ...] = (
    "Please {task} with {arguments}.",
    "{Task}: {arguments}",
    "Call {name} with {arguments}.",
    "I want to {task}. Use {arguments}.",
    "Can you {task}? {arguments}",
    "Use the tool to {task}, {arguments}.",
    "{arguments}. Now {task}.",
    "Hi! {Task} please. {arguments}.",
    "We have to {task} ({arguments}).",
    "Let us {task}: {arguments}.",
    "Would you {task}, please? {arguments}.",
    "The next step is to {task}. {arguments}. Thank you.",
)
ARGUMENTS: tuple[str, ...] = (
    "{k} {v}",
    "{k} = {v}",
    "{k}: {v}",
    "{k} set to {v}",
    "{k} is {v}",
    "the {k} is {v}",
    "{k} of {v}",
    "{v} as {k}",
    "{v} for {k}",
    "{k} must be {v}",
    "{k} will be {v}",
    "a {k} of {v}",
)
# What stands between a field and its value.
CONNECTORS: tuple[str, ...] = words(
    "shall be|needs to be|has to be|ought to be|would be|can be|stays|becomes|reads|gets|"
    "takes|means|holds|stands at|comes to|amounts to|matches|being|->|=>|==|:=|~|at|to|"
    "with value|with the value|having value|given as|specified as|chosen as|fixed at|"
    "noted as|marked|listed as|entered as|=|:|is|as|of|was|goes to|turns into|is now|is just|"
    "will be|must be|may be|equal to|is equal to|exactly|like|per|under|in",
    "|",
)
SEPARATORS: tuple[str, ...] = (
    ": ",
    " = ",
    "=",
    " -> ",
    " => ",
    " | ",
    " :: ",
    " ~ ",
    " .. ",
    " == ",
    " := ",
    "\t",
    " - ",
    " / ",
)
LEADS: tuple[str, ...] = (
    "please ",
    "kindly ",
    "I would like to ",
    "you should ",
    "it is time we ",
    "do ",
    "go ahead and ",
    "we must ",
    "today ",
    "remember that ",
    "for the record, ",
    "I heard that ",
    "someone said that ",
    "it turns out that ",
    "as agreed, ",
    "by the way, ",
    "according to the list, ",
    "we know that ",
    "note: ",
    "help me ",
    "can we ",
    "may I ask you to ",
    "now ",
    "then ",
    "first ",
    "next, ",
    "my boss wants to ",
    "let me ",
    "try to ",
    "quick: ",
)
TAILS: tuple[str, ...] = (
    ".",
    ".",
    "",
    "!",
    "?",
    " please.",
    ", please.",
    " now.",
    " today.",
    ". Thanks.",
    ". Cheers!",
    " for us.",
)
JSON_WISHES: tuple[str, ...] = (
    "Write a JSON object with {arguments}.",
    "Answer with JSON that matches this schema: {schema}\n{arguments}.",
    "{arguments}\nReturn this {topic} as JSON. Schema: {schema}",
    "Extract the {topic} as JSON with the schema {schema}. Text: {arguments}.",
    "Schema: {schema}\nData: {arguments}.\nJSON:",
    "Give me the {topic} in JSON. {arguments}.",
    "Make a JSON {topic}: {arguments}. It must be valid against {schema}.",
    "Using {schema}, encode this {topic}: {arguments}.",
    "Produce one JSON object for the {topic}. Facts: {arguments}. Schema: {schema}.",
    "Turn the {topic} into JSON ({schema}); {arguments}.",
)

DIGIT_QUESTIONS: tuple[str, ...] = (
    "Which digit is shown?",
    "What digit is this?",
    "Which number do you see?",
    "Name the digit.",
    "What number is in the picture?",
    "Which numeral is drawn?",
    "Can you read the number?",
    "Tell me the number.",
    "Digit?",
)
SHAPE_QUESTIONS: tuple[str, ...] = (
    "Which shape is shown?",
    "What shape is this?",
    "Name the shape.",
    "What form do you see?",
    "Which figure is in the picture?",
    "What is drawn here?",
    "Tell me the form.",
    "Shape?",
)
COLOUR_QUESTIONS: tuple[str, ...] = (
    "What colour is the {kind}?",
    "Which colour has the {kind}?",
    "Name the colour of the {kind}.",
    "What color is the {kind}?",
    "In which colour is the {kind} drawn?",
    "Tell me the color of the {kind}.",
    "Colour of the {kind}?",
)
GROUND_QUESTIONS: tuple[str, ...] = (
    "What colour is the background?",
    "Which color is behind the {kind}?",
    "Name the background colour.",
)
DESCRIBE_QUESTIONS: tuple[str, ...] = (
    "Describe the picture.",
    "What do you see?",
    "What is in this image?",
    "Describe this image in one sentence.",
)


# Words that carry the examination's templates: made-up phrasings must not rebuild them.
EXAM_PHRASE_WORDS: frozenset[str] = frozenset(
    words(
        "registered register registry filed ledger answers answer maps map equals entry "
        "known fill reply follows "
    )
)
WORD = re.compile(r"(?<![A-Za-z0-9_.])[A-Za-z][a-z]{2,11}(?![A-Za-z0-9_])")


def training_words(text: str, least: int = 2) -> list[str]:
    """Return the lower-case words that stand at least `least` times in a text, without those of the
    examination and of `dev`.
    """
    counts = Counter(word.lower() for word in WORD.findall(text))
    allowed = {word for word, count in counts.items() if count >= least}
    return sorted(allowed - exam.WORDS - EXAM_PHRASE_WORDS - dev.WORDS)
