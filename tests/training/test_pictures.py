"""Canvas and patches equal transformers' processor; what is drawn is what is said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

from training.canvas import MEAN, STD, patches_of
from training.families import training_words
from training.generators.pictures import INKS, draw_picture
from training.generators.source import Source
from training.render import Renderer, build_atlas


@pytest.mark.parametrize("size", [(112, 112), (64, 64), (90, 130), (57, 201), (200, 40), (1, 300)])
def test_patches_equal_the_processor(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    ours, canvas = patches_of(image)
    theirs = Glm5NextImageProcessorPil()(images=[image], return_tensors="np")
    grid = theirs["image_grid_thw"][0]
    assert (canvas.rows, canvas.cols) == (grid[1] // 2, grid[2] // 2)
    both = theirs["pixel_values"].reshape(len(ours), 3, 2, 196)
    for slot in range(2):
        assert np.abs(both[:, :, slot].reshape(ours.shape) - ours).max() < 1e-5


def test_the_renderer_draws_the_ink_on_the_ground() -> None:
    names, atlas = build_atlas()
    source = Source(random.Random(2), training_words("a word here " * 2), np.zeros(9, np.uint16))
    draw = Renderer(atlas, torch.device("cpu"))
    for _ in range(40):
        drawn = draw_picture(source, names)
        pictures = draw(torch.from_numpy(drawn.numbers)[None])
        count = int(pictures.valid.sum())
        assert count == 4 * drawn.canvas.num_tokens
        pixels = pictures.patches[0, :count].view(count, 3, 196).permute(0, 2, 1).reshape(-1, 3)
        pixels = (pixels.numpy() * STD + MEAN) * 255
        for name in (drawn.ink, drawn.ground):
            near = np.abs(pixels - np.array(INKS[name])).max(1) < 40
            assert near.mean() > 0.005, (drawn.name, name)
