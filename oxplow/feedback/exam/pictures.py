"""Picture questions: one digit or shape in one colour on a plain ground, drawn with pillow.

Owns drawing and asking. Invariant: the answer is one word and cannot be had from the question;
seeds start at `families.PICTURE_SEED`, far from training's. Swapping the pictures between items
must bring accuracy down to chance.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from oxplow.feedback.exam.families import (
    COLOUR_QUESTIONS,
    DIGIT_QUESTIONS,
    PICTURE_SEED,
    SHAPE_QUESTIONS,
)

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 45),
    "green": (45, 175, 65),
    "blue": (55, 85, 225),
    "yellow": (238, 218, 45),
    "purple": (150, 55, 185),
    "orange": (245, 145, 25),
    "white": (248, 248, 248),
    "black": (12, 12, 12),
}
SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "cross",
    "ring",
    "bar",
    "star",
    "diamond",
)
SIZES: tuple[tuple[int, int], ...] = (
    (112, 112),
    (140, 112),
    (112, 168),
    (160, 150),
    (168, 168),
    (90, 120),
    (64, 64),
    (84, 140),
)


@dataclass(frozen=True, slots=True)
class PictureItem:
    """One picture, its question, the one-word answer, and which of the three kinds is asked."""

    image: Image.Image
    question: str
    answer: str
    kind: Literal["digit", "shape", "colour"]


def build_pictures(count: int, seed: int = 0) -> list[PictureItem]:
    """Build `count` items, a third of each kind."""
    items = []
    kinds: tuple[Literal["digit", "shape", "colour"], ...] = ("digit", "shape", "colour")
    for index in range(count):
        items.append(
            _build_one(kinds[index % 3], random.Random(PICTURE_SEED + 100_000 * seed + index))
        )
    return items


def _build_one(kind: Literal["digit", "shape", "colour"], rng: random.Random) -> PictureItem:
    foreground, background = rng.sample(list(COLOURS), 2)
    width, height = rng.choice(SIZES)
    image = Image.new("RGB", (width, height), COLOURS[background])
    draw = ImageDraw.Draw(image)
    side = rng.uniform(0.5, 0.85) * min(width, height)
    left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
    digit = kind == "digit" or (kind == "colour" and rng.random() < 0.5)
    name = str(rng.randint(0, 9)) if digit else rng.choice(SHAPES)
    if digit:
        draw_digit(draw, name, (left, top), side, COLOURS[foreground])
    else:
        draw_shape(draw, name, (left, top), side, COLOURS[foreground], COLOURS[background])
    question, answer = {
        "digit": (rng.choice(DIGIT_QUESTIONS), name),
        "shape": (rng.choice(SHAPE_QUESTIONS), name),
        "colour": (rng.choice(COLOUR_QUESTIONS), foreground),
    }[kind]
    return PictureItem(image, question, answer, kind)


def draw_digit(
    draw: ImageDraw.ImageDraw,
    digit: str,
    corner: tuple[float, float],
    side: float,
    colour: tuple[int, int, int],
) -> None:
    """Draw a digit centred in the square at `corner`, in pillow's built-in outline font."""
    font = ImageFont.load_default(size=side * 1.2)
    x0, y0, x1, y1 = font.getbbox(digit)
    place = (corner[0] + (side - (x1 - x0)) / 2 - x0, corner[1] + (side - (y1 - y0)) / 2 - y0)
    draw.text(place, digit, font=font, fill=colour)


def draw_shape(
    draw: ImageDraw.ImageDraw,
    name: str,
    corner: tuple[float, float],
    side: float,
    colour: tuple[int, int, int],
    ground: tuple[int, int, int],
) -> None:
    """Draw a shape that fills the square at `corner`."""
    x, y = corner
    box = (x, y, x + side, y + side)
    third = side / 3
    match name:
        case "circle":
            draw.ellipse(box, fill=colour)
        case "square":
            draw.rectangle(box, fill=colour)
        case "triangle":
            draw.polygon([(x + side / 2, y), (x + side, y + side), (x, y + side)], fill=colour)
        case "diamond":
            corners = [
                (x + side / 2, y),
                (x + side, y + side / 2),
                (x + side / 2, y + side),
                (x, y + side / 2),
            ]
            draw.polygon(corners, fill=colour)
        case "cross":
            draw.rectangle((x + third, y, x + 2 * third, y + side), fill=colour)
            draw.rectangle((x, y + third, x + side, y + 2 * third), fill=colour)
        case "ring":
            draw.ellipse(box, fill=colour)
            inner = side * 0.2
            draw.ellipse((x + inner, y + inner, x + side - inner, y + side - inner), fill=ground)
        case "bar":
            draw.rectangle((x, y + third, x + side, y + 2 * third), fill=colour)
        case "star":
            draw.polygon(star_corners(x + side / 2, y + side / 2, side / 2), fill=colour)
        case _:
            raise ValueError(f"unknown shape {name!r}, wanted one of {', '.join(SHAPES)}")


def star_corners(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the ten corners of a five-pointed star standing on two points."""
    corners = []
    for index in range(10):
        reach = radius if index % 2 == 0 else radius * 0.42
        angle = math.pi * (index / 5 - 0.5)
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return corners
