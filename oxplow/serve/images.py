"""Turn the bytes of a picture into the patch rows that the vision tower reads.

Owns decoding under limits, the conversion to RGB, the canvas arithmetic and the order of patches.
Must not know torch, transformers, prompts or the engine.
Invariant: for an RGB picture the rows equal those of the reference processor (transformers 5.24
`Glm5NextImageProcessorPil`) bit by bit; nothing but RequestError leaves `decode_image`.

Decided here, because the reference leaves it open or does harm:
- transparency (alpha band, palette entry or key colour) is laid over white;
- the EXIF orientation is applied; damaged EXIF data counts as none and is logged;
- 16-bit gray is brought to 8 bits by v / 257; the reference clips everything above 255 to white;
- CMYK, YCbCr and LAB go through Pillow; colour profiles are ignored; float pixels are refused;
- of an animated file the first frame is the picture (clips: `oxplow.serve.video`).
"""

import io
import logging
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from oxplow.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
# What Pillow raises on damaged files of these formats; anything else is a fault of ours.
DECODE_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
# The only values of these processor fields that this module computes.
_FIXED_FIELDS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": int(Image.Resampling.BICUBIC),
    "patch_expand_factor": 1,
}
_INTEGER_FIELDS = (
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "min_image_tokens",
    "max_image_tokens",
)
_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

__all__ = [
    "DECODE_ERRORS",
    "DEFAULT_LIMITS",
    "FORMATS",
    "Canvas",
    "ImageLimits",
    "ImageSettings",
    "PreparedImage",
    "check_size",
    "cut_frame",
    "decode_image",
    "fit_canvas",
    "num_image_tokens",
    "place_on_canvas",
    "prepare_image",
    "to_rgb",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Say how pictures become patch rows; the defaults are those of the released model.

    One token covers `patch_size * merge_size` pixels squared and `temporal_patch_size` frames.
    `min_image_tokens` and `max_image_tokens` bound the canvas of one picture, or of one whole clip.
    Raises ConfigError on values that no canvas can satisfy.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_image_tokens: int = 16
    max_image_tokens: int = 8000
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        """Refuse sizes below one, crossed bounds and means that are not three numbers."""
        for name in _INTEGER_FIELDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse_field(name, value, "an integer above zero")
        if self.max_image_tokens < self.min_image_tokens:
            wanted = f"at least min_image_tokens = {self.min_image_tokens}"
            _refuse_field("max_image_tokens", self.max_image_tokens, wanted)
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                _refuse_field(name, getattr(self, name), "three numbers")
        if min(self.image_std) <= 0:
            _refuse_field("image_std", self.image_std, "numbers above zero")

    @classmethod
    def from_processor_config(
        cls, config: Mapping[str, Any], section: str = "image_processor"
    ) -> "ImageSettings":
        """Read the parsed `processor_config.json`, or a flat `preprocessor_config.json`.

        Fields that do not change a picture are ignored; one that asks for other arithmetic than
        ours raises ConfigError. An absent field keeps the default.
        """
        values = config.get(section, config)
        if not isinstance(values, Mapping):
            _refuse_field(section, values, "an object")
        for name, wanted in _FIXED_FIELDS.items():
            if values.get(name) is not None and values[name] != wanted:
                _refuse_field(name, values[name], wanted)
        known = {name: values[name] for name in cls.__slots__ if values.get(name) is not None}
        for name in ("image_mean", "image_std"):
            if name in known:
                known[name] = _three_numbers(name, known[name])
        return cls(**known)

    @property
    def token_side(self) -> int:
        """Return the side of the square of pixels that one token covers."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Bound what one encoded picture may cost: bytes as sent, and pixels after decoding.

    Pillow itself refuses more than twice `Image.MAX_IMAGE_PIXELS`, about 179 million.
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 89_478_485


DEFAULT_LIMITS = ImageLimits()


@dataclass(frozen=True, slots=True)
class Canvas:
    """Hold the aligned canvas and the part of it, from the top left, that the picture fills."""

    height: int
    width: int
    content_height: int
    content_width: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """Hold one picture for the tower.

    `pixel_values` is fp32 [grid_h * grid_w, 3 * temporal_patch_size * patch_size**2]; rows go by
    merge block (block row, block column, row, column), columns by (colour, slot, row, column).
    `grid_thw` counts patches; the still picture fills both temporal slots, so t is 1.
    """

    pixel_values: NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    num_tokens: int


def decode_image(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, where: str = "image"
) -> Image.Image:
    """Decode one picture to upright RGB.

    The size in the header is checked before any pixel is decoded. Raises RequestError (field
    `where`) for bytes that are no picture, damaged or cut short, and for too many bytes or pixels.
    """
    if len(data) > limits.max_bytes:
        raise RequestError(
            "the picture file is too large",
            got=f"{len(data)} bytes",
            wanted=f"at most {limits.max_bytes}",
            where=where,
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as file:
            check_size(file.width, file.height, limits.max_pixels, where)
            file.load()
            return to_rgb(_upright(file, where), where)
    except UnidentifiedImageError as error:
        raise RequestError(
            "the bytes are not a picture",
            got=f"{len(data)} bytes that begin with {data[:8]!r}",
            wanted=", ".join(FORMATS),
            where=where,
        ) from error
    except DECODE_ERRORS as error:
        raise RequestError(
            "the picture cannot be decoded",
            got=f"{type(error).__name__}: {error}",
            wanted="a complete, undamaged file",
            where=where,
        ) from error


def check_size(width: int, height: int, max_pixels: int, where: str) -> None:
    """Raise RequestError if a header names no pixels, or more than `max_pixels`."""
    if not 0 < width * height <= max_pixels:
        raise RequestError(
            "the picture has too many pixels" if width * height else "the picture is empty",
            got=f"{width} x {height}",
            wanted=f"1 to {max_pixels} pixels",
            where=where,
        )


def to_rgb(image: Image.Image, where: str = "image") -> Image.Image:
    """Return the picture as 8-bit RGB; an RGB picture without a key colour is returned itself."""
    if image.mode == "F":
        raise RequestError(
            "the picture has floating point pixels",
            got="mode F",
            wanted="8 or 16 bits a channel",
            where=where,
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        image = _gray_to_8_bits(image, where)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def fit_canvas(height: int, width: int, num_frames: int, settings: ImageSettings) -> Canvas:
    """Choose the canvas of a picture (`num_frames` = temporal_patch_size) or of a whole clip.

    The canvas is the smallest aligned one that holds the picture, grown or shrunk into the budget
    of tokens; the picture keeps its proportions and is enlarged only if it is below the budget.
    The floating point steps are the reference's: another order of them moves whole canvases.
    Raises RequestError if not even one token for each temporal patch fits the budget.
    """
    side, slots = settings.token_side, settings.temporal_patch_size
    pixels_per_token = slots * side * side
    fewest = settings.min_image_tokens * pixels_per_token
    most = settings.max_image_tokens * pixels_per_token
    frames = max(slots, round(num_frames / slots) * slots)

    def align(pixels: int) -> int:
        return -(-pixels // side) * side

    def volume(content_height: int) -> int:
        content_width = max(1, width * content_height // height)
        return frames * align(content_height) * align(content_width)

    canvas_height, canvas_width = align(height), align(width)
    if frames * canvas_height * canvas_width < fewest:
        scale = math.sqrt(fewest / (num_frames * height * width))
        canvas_height = align(max(1, math.ceil(height * scale)))
        canvas_width = align(max(1, math.ceil(width * scale)))
    if frames * canvas_height * canvas_width > most:
        # `volume` never falls, so the heights that fit come first: their number is the largest.
        content = bisect_right(range(1, height + 1), most, key=volume)
        if frames * side * side > most:
            raise RequestError(
                "the clip has too many frames for its token budget",
                got=f"{num_frames} frames",
                wanted=f"at most {settings.max_image_tokens * slots}",
            )
        canvas_height = align(content) if content else side
        canvas_width = align(max(1, width * content // height)) if content else side

    scale = min(canvas_height / height, canvas_width / width)
    if num_frames * height * width >= fewest:
        scale = min(1.0, scale)
    return Canvas(
        height=canvas_height,
        width=canvas_width,
        content_height=max(1, min(canvas_height, math.floor(height * scale))),
        content_width=max(1, min(canvas_width, math.floor(width * scale))),
    )


def num_image_tokens(height: int, width: int, settings: ImageSettings) -> int:
    """Return how many prompt tokens a picture of this size takes, without its two markers."""
    canvas = fit_canvas(height, width, settings.temporal_patch_size, settings)
    return canvas.height * canvas.width // settings.token_side**2


def prepare_image(image: Image.Image, settings: ImageSettings) -> PreparedImage:
    """Resize, pad and cut one picture into patch rows; other modes than RGB go through `to_rgb`."""
    rgb = to_rgb(image)
    slots = settings.temporal_patch_size
    canvas = fit_canvas(rgb.height, rgb.width, slots, settings)
    patches = cut_frame(place_on_canvas(rgb, canvas), settings)
    filled = np.repeat(patches[:, :, None], slots, axis=2)
    grid = (1, canvas.height // settings.patch_size, canvas.width // settings.patch_size)
    num_tokens = canvas.height * canvas.width // settings.token_side**2
    return PreparedImage(filled.reshape(len(patches), -1), grid, num_tokens)


def place_on_canvas(rgb: Image.Image, canvas: Canvas) -> NDArray[np.uint8]:
    """Return the canvas [height, width, 3]: the picture, resized if need be, then zeros."""
    size = (canvas.content_width, canvas.content_height)
    content = rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)
    pixels = np.zeros((canvas.height, canvas.width, 3), dtype=np.uint8)
    pixels[: canvas.content_height, : canvas.content_width] = np.asarray(content)
    return pixels


def cut_frame(pixels: NDArray[np.uint8], settings: ImageSettings) -> NDArray[np.float32]:
    """Normalise one frame [height, width, 3] and cut it into [patches, 3, patch, patch].

    Patches go by merge block: block row, block column, row in the block, column in the block.
    """
    patch, merge = settings.patch_size, settings.merge_size
    height, width, _ = pixels.shape
    down, across = height // (patch * merge), width // (patch * merge)
    values = np.empty(pixels.shape, dtype=np.float32)
    for colour, table in enumerate(_normalised(settings)):
        values[:, :, colour] = table[pixels[:, :, colour]]
    blocks = values.reshape(down, merge, patch, across, merge, patch, 3)
    return blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)


def _normalised(settings: ImageSettings) -> NDArray[np.float32]:
    """Return [3, 256]: what each 8-bit value of each colour becomes, rounded as the reference."""
    scaled = (np.arange(256, dtype=np.float64) * settings.rescale_factor).astype(np.float32)
    mean = np.array(settings.image_mean, dtype=np.float32)[:, None]
    std = np.array(settings.image_std, dtype=np.float32)[:, None]
    return (scaled - mean) / std


def _upright(file: Image.Image, where: str) -> Image.Image:
    """Apply the EXIF orientation of a loaded picture."""
    try:
        orientation = file.getexif().get(_EXIF_ORIENTATION)
    except DECODE_ERRORS as error:
        log.warning("%s: damaged EXIF data is ignored: %s", where, error)
        return file
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return file if turn is None else file.transpose(turn)


def _gray_to_8_bits(image: Image.Image, where: str) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise RequestError(
            "the picture has more than 16 bits a pixel",
            got=f"values from {values.min()} to {values.max()}",
            wanted="0 to 65535",
            where=where,
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _three_numbers(name: str, value: object) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (float(value),) * 3
    if not isinstance(value, list | tuple) or not all(isinstance(v, int | float) for v in value):
        _refuse_field(name, value, "three numbers")
    return tuple(float(v) for v in value)


def _refuse_field(name: str, got: object, wanted: object) -> NoReturn:
    raise ConfigError(
        f"picture processor field {name} is not supported with this value",
        got=got,
        wanted=wanted,
        where="processor_config.json",
    )
