"""Pictures: equal to the reference processor value by value; hostile files give RequestError."""

import io
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.images import (
    FORMATS,
    ImageLimits,
    ImageSettings,
    check_size,
    decode_image,
    fit_canvas,
    num_image_tokens,
    prepare_image,
)

RELEASED = ImageSettings()
# (width, height): below the budget, at its edge, one pixel thin, above the budget.
SIZES = (
    (1, 1), (1, 5000), (5000, 1), (29, 27), (27, 29), (130, 90), (112, 112), (113, 111),
    (448, 448), (3000, 17), (17, 3000), (300_000, 1), (2600, 2500),
)  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return the reference image processor, which needs pillow only."""
    module = pytest.importorskip(
        "transformers.models.glm5_next.image_processing_pil_glm5_next",
        reason="transformers is the oracle",
    )
    return module.Glm5NextImageProcessorPil()


def noise(width: int, height: int, bands: int = 3, seed: int = 0) -> Image.Image:
    """Return a picture of random bytes."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(values if bands > 1 else values[:, :, 0])


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return the file that Pillow makes of `image`."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def assert_equals_reference(image: Image.Image, shown: Image.Image, reference: Any) -> None:
    """Compare what we make of `image` with what the reference makes of `shown`, bit by bit."""
    ours = prepare_image(image, RELEASED)
    theirs = reference(images=[shown], return_tensors="np")
    assert list(ours.grid_thw) == theirs["image_grid_thw"][0].tolist()
    assert ours.pixel_values.dtype == np.float32
    np.testing.assert_array_equal(ours.pixel_values, theirs["pixel_values"])
    assert ours.num_tokens * 4 == len(ours.pixel_values)
    assert ours.num_tokens == num_image_tokens(shown.height, shown.width, RELEASED)


@pytest.mark.oracle
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_rows_equal_the_reference(size: tuple[int, int], reference: Any) -> None:
    picture = noise(*size)
    assert_equals_reference(picture, picture, reference)


@pytest.mark.oracle
@pytest.mark.slow
def test_rows_of_a_huge_picture_equal_the_reference(reference: Any) -> None:
    picture = noise(900, 700).resize((9000, 7000), Image.Resampling.NEAREST)
    assert_equals_reference(picture, picture, reference)


@pytest.mark.oracle
@settings(max_examples=400)
@given(
    height=st.integers(1, 20_000),
    width=st.integers(1, 20_000),
    frames=st.integers(1, 64),
    fewest=st.integers(1, 64),
    room=st.integers(0, 10_000),
)
def test_canvas_equals_the_reference_for_any_size_and_budget(
    height: int, width: int, frames: int, fewest: int, room: int
) -> None:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize

    budget = ImageSettings(min_image_tokens=fewest, max_image_tokens=fewest + room)
    limits = {"min_pixels": fewest, "max_pixels": fewest + room}
    try:
        wanted = smart_resize(frames, height, width, **limits)
    except ValueError:
        with pytest.raises(RequestError, match="too many frames"):
            fit_canvas(height, width, frames, budget)
        return
    canvas = fit_canvas(height, width, frames, budget)
    assert (canvas.height, canvas.width) == wanted
    assert 1 <= canvas.content_height <= canvas.height
    assert 1 <= canvas.content_width <= canvas.width


def test_padding_is_black_before_normalisation() -> None:
    white = Image.new("RGB", (120, 120), (255, 255, 255))
    rows = prepare_image(white, RELEASED).pixel_values.reshape(-1, 3, 2, 14, 14)
    black = -np.float32(RELEASED.image_mean) / np.float32(RELEASED.image_std)
    # 120 pixels on a canvas of 140: the last patch lies in the padding, the first in the picture.
    np.testing.assert_array_equal(rows[-1, :, 0, -1, -1], black)
    assert (rows[0] > 1).all()


def test_both_temporal_slots_hold_the_still_picture() -> None:
    rows = prepare_image(noise(140, 112), RELEASED).pixel_values.reshape(-1, 3, 2, 196)
    np.testing.assert_array_equal(rows[:, :, 0], rows[:, :, 1])


TRANSPARENT: dict[str, Callable[[], bytes]] = {
    "rgba-png": lambda: encode(noise(50, 40, 4), "PNG"),
    "rgba-webp": lambda: encode(noise(50, 40, 4), "WEBP", lossless=True, exact=True),
    "gray-alpha-png": lambda: encode(noise(50, 40, 2), "PNG"),
    "key-colour-png": lambda: encode(_with_key_colour(), "PNG", transparency=(10, 20, 30)),
    "palette-png": lambda: encode(noise(50, 40).quantize(16), "PNG", transparency=3),
    "palette-gif": lambda: encode(noise(50, 40).quantize(16), "GIF", transparency=3),
}
OPAQUE: dict[str, Callable[[], bytes]] = {
    "png": lambda: encode(noise(50, 40), "PNG"),
    "palette-png": lambda: encode(noise(50, 40).quantize(16), "PNG"),
    "gray-png": lambda: encode(noise(50, 40, 1), "PNG"),
    "one-bit-png": lambda: encode(noise(50, 40).convert("1"), "PNG"),
    "gray-jpeg": lambda: encode(noise(50, 40, 1), "JPEG"),
    "cmyk-jpeg": lambda: encode(noise(50, 40).convert("CMYK"), "JPEG"),
    "progressive-jpeg": lambda: encode(noise(50, 40), "JPEG", progressive=True),
    "bmp": lambda: encode(noise(50, 40), "BMP"),
    "gif": lambda: encode(noise(50, 40), "GIF"),
    "webp": lambda: encode(noise(50, 40), "WEBP"),
}


def _with_key_colour() -> Image.Image:
    picture = noise(50, 40)
    picture.paste((10, 20, 30), (5, 5, 25, 25))
    return picture


@pytest.mark.oracle
@pytest.mark.parametrize("make", [*TRANSPARENT.values(), *OPAQUE.values()])
def test_every_mode_equals_the_reference(make: Callable[[], bytes], reference: Any) -> None:
    data = make()
    assert_equals_reference(decode_image(data), Image.open(io.BytesIO(data)), reference)


@pytest.mark.parametrize("make", TRANSPARENT.values(), ids=TRANSPARENT)
def test_transparency_is_laid_over_white(make: Callable[[], bytes]) -> None:
    data = make()
    layer = Image.open(io.BytesIO(data)).convert("RGBA")
    clear = np.asarray(layer)[:, :, 3] == 0
    if not clear.any():
        pytest.skip("random alpha has no fully clear pixel here")
    assert (np.asarray(decode_image(data))[clear] == 255).all()


def test_16_bit_gray_keeps_its_shades() -> None:
    values = np.array([[0, 128, 129, 257, 1000, 32768, 65535]], dtype=np.uint16)
    shades = np.asarray(decode_image(encode(Image.fromarray(values), "PNG")))[0, :, 0]
    assert shades.tolist() == [0, 0, 1, 1, 4, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(noise(50, 40), "PNG", exif=exif)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(np.asarray(decode_image(data)), np.asarray(wanted))


@pytest.mark.parametrize("exif", [b"Exif\0\0XX*\0\0\0\0\0", b"Exif\0\0II*\0"])
def test_damaged_exif_is_logged_and_ignored(exif: bytes, caplog: pytest.LogCaptureFixture) -> None:
    picture = noise(50, 40)
    data = encode(picture, "PNG", exif=exif)
    decoded = decode_image(data, where="messages[0].content[1]")
    np.testing.assert_array_equal(np.asarray(decoded), np.asarray(picture))
    assert "messages[0].content[1]: damaged EXIF" in caplog.text


def test_first_frame_of_an_animation_is_the_picture() -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


def _png_of_claimed_size(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its data does not have."""
    data = bytearray(encode(noise(10, 10), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a picture"),
    "text": (b"<html>not found</html>", "not a picture"),
    "json": (b'{"error": "gone"}', "not a picture"),
    "tiff": (encode(noise(10, 10), "TIFF"), "not a picture"),
    "svg": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
    "magic-only": (b"\x89PNG\r\n\x1a\n", "picture"),
    "bomb-of-pillow": (_png_of_claimed_size(100_000, 100_000), "cannot be decoded"),
    "bomb": (_png_of_claimed_size(12_000, 8_000), "too many pixels"),
    "lying-header": (_png_of_claimed_size(500, 500), "cannot be decoded"),
    "cut-png": (encode(noise(90, 70), "PNG")[:9000], "cannot be decoded"),
    "cut-jpeg": (encode(noise(90, 70), "JPEG")[:2000], "cannot be decoded"),
    "cut-webp": (encode(noise(90, 70), "WEBP")[:1500], "decoded"),
    "cut-gif": (encode(noise(90, 70), "GIF")[:2000], "cannot be decoded"),
    "cut-bmp": (encode(noise(90, 70), "BMP")[:2000], "cannot be decoded"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_hostile_bytes_are_refused_with_what_got_wanted_where(data: bytes, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_image(data, where="messages[2].content[0]")
    text = str(caught.value)
    assert message in text
    assert "got" in text and "wanted" in text and "messages[2].content[0]" in text


def test_limits_are_the_callers() -> None:
    data = encode(noise(90, 70), "PNG")
    with pytest.raises(RequestError, match="file is too large"):
        decode_image(data, ImageLimits(max_bytes=len(data) - 1))
    with pytest.raises(RequestError, match="too many pixels"):
        decode_image(data, ImageLimits(max_pixels=90 * 70 - 1))
    assert decode_image(data, ImageLimits(max_bytes=len(data), max_pixels=90 * 70)).size == (90, 70)


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check_size(0, 5, 100, "image")


def test_float_pixels_are_refused() -> None:
    with pytest.raises(RequestError, match="floating point"):
        prepare_image(Image.new("F", (40, 40)), RELEASED)


def test_more_than_16_bits_are_refused() -> None:
    deep = Image.fromarray(np.full((40, 40), 70_000, dtype=np.int32))
    with pytest.raises(RequestError, match="more than 16 bits"):
        prepare_image(deep, RELEASED)


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_give_a_picture_or_a_request_error() -> None:
    whole = [make() for make in (*TRANSPARENT.values(), *OPAQUE.values())]
    chance = random.Random(7)
    limits = ImageLimits(max_pixels=1_000_000)
    refused = 0
    for _ in range(1500):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.choice((1, 3, 12))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        del data[chance.randrange(1, 2 * len(data)) :]
        try:
            prepare_image(decode_image(bytes(data), limits), RELEASED)
        except RequestError:
            refused += 1
    assert refused > 500


def test_settings_come_from_the_nested_and_the_flat_file() -> None:
    fields = {"patch_size": 14, "merge_size": 2, "max_image_tokens": 64, "image_mean": 0.5}
    wanted = ImageSettings(max_image_tokens=64, image_mean=(0.5, 0.5, 0.5))
    nested = {"image_processor": {**fields, "image_processor_type": "any"}, "processor_class": "x"}
    assert ImageSettings.from_processor_config(nested) == wanted
    assert ImageSettings.from_processor_config(fields) == wanted
    assert ImageSettings.from_processor_config({}) == RELEASED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("patch_size", 0),
        ("patch_size", 14.0),
        ("merge_size", True),
        ("max_image_tokens", 15),
        ("min_image_tokens", "16"),
        ("image_mean", [0.1, 0.2]),
        ("image_mean", "bright"),
        ("image_std", [0.1, 0.0, 0.1]),
        ("resample", 2),
        ("do_normalize", False),
        ("patch_expand_factor", 2),
    ],
)
def test_settings_that_we_do_not_compute_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        ImageSettings.from_processor_config({"image_processor": {field: value}})


def test_picture_workers_need_no_torch() -> None:
    code = (
        "import sys, oxplow.serve.images, oxplow.serve.video, oxplow.serve.placeholders; "
        "sys.exit(bool({'torch', 'transformers', 'av'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_format_is_one_that_pillow_knows() -> None:
    Image.init()
    assert set(FORMATS) <= set(Image.OPEN)
