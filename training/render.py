"""Draws training pictures on the device from small descriptions.

Owns the atlas of glyph masks and the renderer: workers send 20 numbers a picture instead of pixels.
Invariant: what is drawn is one glyph in one colour on one ground, inside the content, zeros outside
it, as the processor pads.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional

from training.canvas import MEAN, STD
from training.lists import words
from training.vision import MAX_PATCHES, Pictures, patch_places

ATLAS_SIDE = 96
FIELDS = 20
FONT_FILES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSansMono",
    "STIXGeneral",
    "cmr10",
    "DejaVuSans-Oblique",
)
SHAPE_NAMES = ("circle", "square", "triangle", "cross", "ring", "bar", "star", "diamond")
# 5x7 digits, row by row, the oldest screen font there is.
MATRIX_DIGITS = words(
    "01110100011000110001100011000101110 00100011000010000100001000010001110 "
    "01110100010000100010001000100011111 11111000100010000010000011000101110 "
    "00010001100101010010111110001000010 11111100001111000001000011000101110 "
    "00110010001000011110100011000101110 11111000010001000100010000100001000 "
    "01110100011000101110100011000101110 01110100011000101111000010001001100"
)


def fonts() -> list[ImageFont.FreeTypeFont]:
    """Return pillow's own font (twice, as the common one) and matplotlib's, where installed."""
    found = [ImageFont.load_default(size=104), ImageFont.load_default(size=104)]
    try:
        import matplotlib as mpl
    except ImportError:
        return found
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    files = [folder / f"{name}.ttf" for name in FONT_FILES]
    return found + [ImageFont.truetype(str(file), 100) for file in files if file.exists()]


def digit_mask(font: ImageFont.FreeTypeFont, digit: str) -> Image.Image:
    """Draw a digit centred in the atlas cell."""
    cell = Image.new("L", (ATLAS_SIDE, ATLAS_SIDE))
    draw = ImageDraw.Draw(cell)
    x0, y0, x1, y1 = font.getbbox(digit)
    place = ((ATLAS_SIDE - (x1 - x0)) / 2 - x0, (ATLAS_SIDE - (y1 - y0)) / 2 - y0)
    draw.text(place, digit, font=font, fill=255)
    return cell


def polygon_mask(corners: list[tuple[float, float]]) -> Image.Image:
    """Fill a polygon given in unit coordinates, four times oversampled."""
    side = 4 * ATLAS_SIDE
    cell = Image.new("L", (side, side))
    ImageDraw.Draw(cell).polygon([(x * side, y * side) for x, y in corners], fill=255)
    return cell.resize((ATLAS_SIDE, ATLAS_SIDE), Image.Resampling.BOX)


def shape_mask(name: str, variant: int) -> np.ndarray:
    """Return one shape's mask [96, 96] in 0..1; the variant changes thickness or proportion."""
    y, x = (np.mgrid[0:ATLAS_SIDE, 0:ATLAS_SIDE] + 0.5) / ATLAS_SIDE * 2 - 1
    radius = np.sqrt(x * x + y * y)
    thick = (0.33, 0.25, 0.4)[variant]
    if name == "star":
        inner = (0.42, 0.38, 0.5)[variant]
        angles = [math.pi * (i / 5 - 0.5) for i in range(10)]
        reach = [0.5 if i % 2 == 0 else 0.5 * inner for i in range(10)]
        corners = [
            (0.5 + r * math.cos(a), 0.5 + r * math.sin(a))
            for r, a in zip(reach, angles, strict=True)
        ]
        return np.asarray(polygon_mask(corners), np.float32) / 255
    masks = {
        "circle": radius < 1,
        "square": np.ones_like(x, bool),
        "triangle": np.abs(x) < (y + 1) / 2,
        "cross": (np.abs(x) < thick) | (np.abs(y) < thick),
        "ring": (radius < 1) & (radius > 1 - thick - 0.07),
        "bar": np.abs(y) < thick,
        "diamond": np.abs(x) + np.abs(y) < 1,
    }
    return masks[name].astype(np.float32)


def build_atlas() -> tuple[list[str], Tensor]:
    """Return the name of every cell and the masks [K, 96, 96] fp32."""
    names, masks = [], []
    for font in fonts():
        for digit in "0123456789":
            names.append(digit)
            masks.append(np.asarray(digit_mask(font, digit), np.float32) / 255)
    for digit, bits in enumerate(MATRIX_DIGITS):
        cell = np.zeros((ATLAS_SIDE, ATLAS_SIDE), np.float32)
        block = np.kron(
            np.array([int(b) for b in bits], np.float32).reshape(7, 5), np.ones((12, 12))
        )
        cell[6:90, 18:78] = block
        names.append(str(digit))
        masks.append(cell)
    for name in SHAPE_NAMES:
        for variant in range(3):
            names.append(name)
            masks.append(shape_mask(name, variant))
    return names, torch.from_numpy(np.stack(masks))


class Renderer:
    """Draws described pictures; its constants live on the device, so that a captured graph copies
    nothing from the host.
    """

    def __init__(self, atlas: Tensor, device: torch.device) -> None:
        self.atlas = atlas.to(device)
        self.mean, self.std = (
            torch.from_numpy(a).to(device).view(1, 1, 3, 1, 1) for a in (MEAN, STD)
        )

    def __call__(self, described: Tensor) -> Pictures:
        """Draw [N, 20]: cell, centre y x, size y x, angle, ink rgb, ground rgb, content h w, grid
        rows cols, noise, gain.
        """
        d = described.float()
        rows, cols, valid = patch_places(d[:, 14:16].long())
        inside = torch.arange(14, device=d.device) + 0.5
        y = (rows[..., None] * 14 + inside)[..., None]
        x = (cols[..., None] * 14 + inside)[..., None, :]

        def at(index: int) -> Tensor:
            return d[:, index].view(-1, 1, 1, 1)

        dy, dx = y - at(1), x - at(2)
        cos, sin = at(5).cos(), at(5).sin()
        where = torch.stack(
            [(cos * dx + sin * dy) / (at(4) / 2), (cos * dy - sin * dx) / (at(3) / 2)], -1
        ).flatten(1, 2)
        cells = self.atlas[d[:, 0].long()][:, None]
        mask = functional.grid_sample(cells, where, align_corners=False).view(
            -1, MAX_PATCHES, 14, 14
        )
        mask = ((mask - 0.5) * at(17) + 0.5).clamp(0, 1)[:, :, None]
        ink, ground = (d[:, i : i + 3].view(-1, 1, 3, 1, 1) for i in (6, 9))
        pixels = ground + (ink - ground) * mask
        pixels = pixels + torch.randn_like(pixels) * d[:, 16].view(-1, 1, 1, 1, 1)
        content = ((y < at(12)) & (x < at(13)))[:, :, None]
        pixels = (pixels.clamp(0, 255) * content / 255 - self.mean) / self.std
        return Pictures(pixels.flatten(2), rows, cols, valid)
