"""The picture processor's geometry and patches, for training and its quick evaluation.

Owns the canvas rule of model.md section 10. Invariant: equals transformers'
`Glm5NextImageProcessorPil` (tests/training/test_pictures.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

BLOCK = 28
MIN_TOKENS = 16
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


@dataclass(frozen=True, slots=True)
class Canvas:
    """Canvas size in blocks of 28 pixels and the content's size on it in pixels."""

    rows: int
    cols: int
    content_height: int
    content_width: int

    @property
    def num_tokens(self) -> int:
        """Language-model rows of the picture."""
        return self.rows * self.cols


def fit_canvas(height: int, width: int) -> Canvas:
    """Return the canvas of a picture of one pixel a side or more, far below the upper budget."""
    rows, cols = math.ceil(height / BLOCK), math.ceil(width / BLOCK)
    if rows * cols < MIN_TOKENS:
        scale = math.sqrt(MIN_TOKENS * BLOCK * BLOCK / (height * width))
        rows = math.ceil(math.ceil(height * scale) / BLOCK)
        cols = math.ceil(math.ceil(width * scale) / BLOCK)
    scale = min(rows * BLOCK / height, cols * BLOCK / width)
    if height * width >= MIN_TOKENS * BLOCK * BLOCK:
        scale = min(1.0, scale)
    content = (math.floor(height * scale), math.floor(width * scale))
    return Canvas(rows, cols, min(rows * BLOCK, content[0]), min(cols * BLOCK, content[1]))


def patches_of(image: Image.Image) -> tuple[np.ndarray, Canvas]:
    """Return normalised still patches [rows*cols*4, 588] in 2x2 merge order, and the canvas."""
    canvas = fit_canvas(image.height, image.width)
    size = (canvas.content_width, canvas.content_height)
    content = image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
    pixels = np.zeros((canvas.rows * BLOCK, canvas.cols * BLOCK, 3), np.float32)
    pixels[: size[1], : size[0]] = np.asarray(content.convert("RGB"), np.float32)
    pixels = (pixels / 255 - MEAN) / STD
    grid = pixels.reshape(canvas.rows, 2, 14, canvas.cols, 2, 14, 3)
    return grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 588), canvas
