"""Picture conversations: a description for the renderer, questions and answers.

Owns what is drawn and asked. Invariant: seeds lie below the examination's; an answer cannot be had
from its question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.canvas import Canvas, fit_canvas
from training.chat import PICTURE, Conversation, Turn
from training.families import (
    COLOUR_QUESTIONS,
    DESCRIBE_QUESTIONS,
    DIGIT_QUESTIONS,
    GROUND_QUESTIONS,
    SHAPE_QUESTIONS,
)
from training.generators.source import Source
from training.render import FIELDS
from training.vision import MAX_BLOCKS

INKS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 220, 40),
    "purple": (150, 50, 190),
    "orange": (250, 140, 20),
    "white": (250, 250, 250),
    "black": (8, 8, 8),
}


THINGS: dict[str, tuple[str, ...]] = {
    "digit": ("digit", "number", "numeral", "figure", "number sign", "cipher"),
    "shape": ("shape", "form", "figure", "outline", "geometric shape", "kind of shape"),
}
OPENINGS = (
    "Name",
    "Give",
    "Say",
    "Tell us",
    "Write",
    "State",
    "Spell out",
    "Find",
    "Report",
    "Please name",
    "Identify",
    "Guess",
)


SEEN = ("shown", "drawn", "seen", "given", "visible", "painted", "pictured")
WHERE = ("", "", " here", " there", " in it", " in the picture", " in that image", " on the canvas")
TARGETS = (" of the ", " of that ", " has the ", " for the ")


@dataclass(frozen=True, slots=True)
class Drawn:
    """One picture: the renderer's numbers [20], its canvas, and what is true of it."""

    numbers: np.ndarray
    canvas: Canvas
    name: str
    ink: str
    ground: str

    @property
    def kind(self) -> str:
        """digit or shape."""
        return "digit" if self.name.isdigit() else "shape"


def draw_canvas(source: Source) -> Canvas:
    """Draw a picture size whose canvas fits the slots."""
    rng = source.rng
    while True:
        if rng.random() < 0.5:
            side = rng.randint(48, 168)
            height, width = side, side + rng.randint(-8, 8)
        else:
            height, width = rng.randint(40, 230), rng.randint(40, 230)
        canvas = fit_canvas(height, width)
        if (
            canvas.num_tokens <= MAX_BLOCKS
            and min(canvas.content_height, canvas.content_width) >= 50
        ):
            return canvas


def draw_picture(source: Source, names: list[str]) -> Drawn:
    """Draw one picture; `names` are the atlas cells' names. Digits and shapes come up equally
    often.
    """
    rng = source.rng
    canvas = draw_canvas(source)
    digits = [i for i, name in enumerate(names) if name.isdigit()]
    shapes = [i for i, name in enumerate(names) if not name.isdigit()]
    cell = rng.choice(digits if rng.random() < 0.55 else shapes)
    ink, ground = rng.sample(list(INKS), 2)
    height, width = canvas.content_height, canvas.content_width
    side = rng.uniform(0.45, 0.95) * min(height, width)
    tall, wide = side * rng.uniform(0.92, 1), side * rng.uniform(0.92, 1)
    numbers = np.zeros(FIELDS, np.float32)
    numbers[0] = cell
    numbers[1] = rng.uniform(tall / 2, height - tall / 2)
    numbers[2] = rng.uniform(wide / 2, width - wide / 2)
    numbers[3:5] = tall, wide
    numbers[5] = rng.uniform(-0.12, 0.12) if rng.random() < 0.5 else 0.0
    for start, name in ((6, ink), (9, ground)):
        numbers[start : start + 3] = [
            min(255, max(0, c + rng.randint(-14, 14))) for c in INKS[name]
        ]
    numbers[12:16] = height, width, canvas.rows, canvas.cols
    numbers[16] = rng.choice((0.0, 0.0, 3.0, 8.0))
    numbers[17] = rng.choice((1.0, 2.0, 6.0))
    return Drawn(numbers, canvas, names[cell], ink, ground)


def made_up_question(source: Source, things: tuple[str, ...], of: str | None = None) -> str:
    """Phrase a question for one of the things, in a frame of drawn words."""
    rng = source.rng
    thing = rng.choice(things)
    verb = rng.choice((*SEEN, source.word()))
    where = rng.choice(WHERE)
    target = "" if of is None else rng.choice(TARGETS) + of
    see = f"{rng.choice(('can', 'do', 'may'))} you {rng.choice(('see', 'find', source.word()))}"
    by, opening = rng.choice(("In", "With", "By", "Of")), rng.choice(OPENINGS)
    frames = (
        f"{opening} the {thing}{target}{where}{rng.choice(('.', '!', '', ' please.'))}",
        f"{opening} which {thing}{target} is {verb}{where}.",
        f"What {thing}{target} is {verb}{where}?",
        f"What {thing}{target} {see}{where}?",
        f"Which {thing}{target} has been {verb}{where}?",
        f"{by} what {thing}{target} was {'this' if of is None else 'it'} {verb}?",
        f"The {thing}{target}{where}?",
        f"{source.word().title()} {source.word()}: {thing}{target}{where}?",
    )
    return rng.choice(frames)


def ask(source: Source, drawn: Drawn) -> tuple[str, str]:
    """Return one question about the picture and its answer."""
    rng = source.rng
    kind = drawn.kind
    draw = rng.random()
    if draw < 0.6:
        known = DIGIT_QUESTIONS if kind == "digit" else SHAPE_QUESTIONS
        return rng.choice(known) if rng.random() < 0.4 else made_up_question(
            source, THINGS[kind]
        ), drawn.name
    if draw < 0.8:
        word = rng.choice((kind, kind, "figure", "object", "sign", "drawing", "thing"))
        if rng.random() < 0.6:
            return made_up_question(source, ("colour", "color", "tint", "hue"), word), drawn.ink
        return rng.choice(COLOUR_QUESTIONS).format(kind=word), drawn.ink
    if draw < 0.88:
        return rng.choice(GROUND_QUESTIONS).format(kind=kind), drawn.ground
    what = f"digit {drawn.name}" if kind == "digit" else drawn.name
    return rng.choice(DESCRIBE_QUESTIONS), f"A {drawn.ink} {what} on a {drawn.ground} background."


def picture_conversation(
    source: Source, names: list[str], image_token: int
) -> tuple[Conversation, Drawn]:
    """Show one picture and ask one to three questions about it."""
    rng = source.rng
    drawn = draw_picture(source, names)
    turns: list[Turn] = []
    for index in range(rng.choice((1, 1, 2, 3))):
        question, answer = ask(source, drawn)
        user: str | list[str | list[int]] = question
        if index == 0:
            rows = [image_token] * drawn.canvas.num_tokens
            before, after = ("", question) if rng.random() < 0.8 else (question, "")
            user = [before + "<|begin_of_image|>", rows, "<|end_of_image|>" + after]
        reasoning = f"The picture shows a {drawn.kind}." if rng.random() < 0.1 else None
        turns.append(Turn(user, answer, reasoning, weight=PICTURE))
    return Conversation(tuple(turns)), drawn
