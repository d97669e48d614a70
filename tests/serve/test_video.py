"""Clips: frames, canvas and times equal the reference video processor; hostile clips are refused.

The reference needs torchvision; what it made of some clips is kept in `tests/golden`, and where
torchvision is installed the tests marked so compare with it directly.
"""

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.images import ImageSettings
from oxplow.serve.video import (
    PreparedVideo,
    VideoLimits,
    VideoSettings,
    prepare_frames,
    prepare_video,
    sample_frames,
)
from tests.oracles.video_golden import clip_frames, digest

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = VideoSettings()
REFERENCE = json.loads((GOLDEN / "video_reference.json").read_text())


def pictures(num_frames: int, height: int = 48, width: int = 64) -> list[Image.Image]:
    """Return the frames of the golden clip of this size."""
    return [Image.fromarray(frame) for frame in clip_frames(num_frames, height, width)]


def animation(frames: list[Image.Image], kind: str, **options: Any) -> bytes:
    """Return an animated file."""
    out = io.BytesIO()
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], **options)
    return out.getvalue()


def assert_same(got: PreparedVideo, wanted: PreparedVideo) -> None:
    """Compare two clips, bit by bit."""
    assert got.grid_thw == wanted.grid_thw
    assert got.timestamps == pytest.approx(wanted.timestamps)
    assert got.step_tokens == wanted.step_tokens
    np.testing.assert_array_equal(got.pixel_values, wanted.pixel_values)


def test_short_clips_are_sampled_as_by_the_reference() -> None:
    for num_frames, fps, wanted in REFERENCE["short_clips"]:
        # The reference takes nothing of a clip below one sampling step, and then fails on it.
        assert sample_frames(num_frames, fps, RELEASED) == (wanted or [0, 0]), (num_frames, fps)


def test_long_clips_are_sampled_as_by_the_reference() -> None:
    for num_frames, fps, wanted in REFERENCE["long_clips"]:
        taken = sample_frames(num_frames, fps, RELEASED)
        assert digest(taken) == wanted, (num_frames, fps)
        assert len(taken) <= RELEASED.max_frames


@given(
    num_frames=st.integers(1, 5000),
    fps=st.floats(0.1, 240),
    rate=st.sampled_from((0.5, 1.0, 2.0, 3.0)),
)
def test_sampled_frames_rise_exist_and_are_even(num_frames: int, fps: float, rate: float) -> None:
    taken = sample_frames(num_frames, fps, VideoSettings(fps=rate, max_frames=64))
    assert len(taken) % 2 == 0 and 2 <= len(taken) <= 66
    assert taken == sorted(taken) and taken[0] >= 0 and taken[-1] < num_frames
    assert len(set(taken)) >= len(taken) - 1


@pytest.mark.parametrize(
    ("num_frames", "height", "width", "grid"),
    REFERENCE["grids"],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_rows_equal_the_reference_but_for_the_filter(
    num_frames: int, height: int, width: int, grid: list[int]
) -> None:
    clip = prepare_frames(pictures(num_frames, height, width), 2.0, RELEASED)
    assert list(clip.grid_thw) == grid
    mean, std = (
        np.float64(values).reshape(1, 3, 1)
        for values in (RELEASED.image.image_mean, RELEASED.image.image_std)
    )
    rows = clip.pixel_values.reshape(len(clip.pixel_values), 3, -1) * std + mean
    golden = load_file(GOLDEN / "video_reference.safetensors")[f"{num_frames}x{height}x{width}"]
    difference = np.abs(rows.reshape(golden.shape) * 255 - golden)
    is_resized = height * width * num_frames < 16 * 2 * 28 * 28
    # Pillow and torchvision round the bicubic filter differently: one level of 255, rarely.
    assert difference.max() < (1.01 if is_resized else 1e-3)
    assert (difference > 0.5).mean() < 0.02


@pytest.mark.oracle
def test_rows_equal_an_installed_reference() -> None:
    pytest.importorskip("torchvision", reason="transformers' video processor needs torchvision")
    import torch
    from transformers.models.glm5_next.video_processing_glm5_next import Glm5NextVideoProcessor

    for shape in ((4, 112, 140), (8, 33, 200), (5, 100, 100), (10, 240, 320)):
        frames = torch.from_numpy(clip_frames(*shape).transpose(0, 3, 1, 2).copy())
        out = Glm5NextVideoProcessor()(videos=[frames], do_sample_frames=False, return_tensors="pt")
        clip = prepare_frames(pictures(*shape), 2.0, RELEASED)
        assert list(clip.grid_thw) == out["video_grid_thw"][0].tolist()
        # No frame is resized; what is left is the reference's fused normalisation in fp32.
        np.testing.assert_allclose(
            clip.pixel_values, out["pixel_values_videos"].numpy(), rtol=0, atol=4e-7
        )


def test_each_temporal_patch_pairs_two_frames() -> None:
    flat = [Image.new("RGB", (112, 112), (level, level, level)) for level in (0, 60, 120)]
    clip = prepare_frames(flat, 2.0, RELEASED)
    assert clip.grid_thw == (2, 8, 8)
    assert clip.timestamps == (0.0, 1.0)
    slots = clip.pixel_values.reshape(2, 64, 3, 2, 196)
    order = [slots[0, 0, 0, 0, 0], slots[0, 0, 0, 1, 0], slots[1, 0, 0, 0, 0], slots[1, 0, 0, 1, 0]]
    # The third frame has no partner, so it is its own.
    assert order[0] < order[1] < order[2] == order[3]


def test_the_budget_covers_the_whole_clip() -> None:
    tight = VideoSettings(image=ImageSettings(max_image_tokens=64))
    clip = prepare_frames(pictures(8, 240, 320), 2.0, tight)
    assert clip.grid_thw[0] == 4
    assert clip.step_tokens == 12
    assert prepare_frames(pictures(8, 240, 320), 2.0, RELEASED).step_tokens == 108
    with pytest.raises(RequestError, match="too many frames"):
        prepare_frames(pictures(160), 2.0, tight)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("WEBP", {"lossless": True}), ("PNG", {}), ("GIF", {})],
    ids=["webp", "png", "gif"],
)
def test_animations_are_sampled_by_their_delays(kind: str, options: dict[str, Any]) -> None:
    frames = pictures(21)
    if kind == "GIF":
        frames = [frame.quantize(64).convert("RGB") for frame in frames]
    data = animation(frames, kind, duration=100, **options)
    clip = prepare_video(data, RELEASED)
    # 21 frames of 100 ms: one frame each half second; the fourth due time is the last below 2 s.
    chosen = [frames[i] for i in (0, 5, 10, 15)]
    assert clip.timestamps == pytest.approx((0.0, 1.0))
    assert_same(clip, prepare_frames(chosen, 2.0, RELEASED))


def test_unset_delays_count_as_a_tenth_of_a_second() -> None:
    frames = pictures(20)
    slow = prepare_video(animation(frames, "WEBP", lossless=True, duration=100), RELEASED)
    unset = prepare_video(animation(frames, "WEBP", lossless=True, duration=0), RELEASED)
    assert_same(unset, slow)


def test_a_still_picture_is_a_clip_of_one_step() -> None:
    frame = pictures(1)[0]
    data = animation([frame], "PNG")
    assert_same(prepare_video(data, RELEASED), prepare_frames([frame, frame], 2.0, RELEASED))


def test_transparent_frames_lie_over_white() -> None:
    clear = [Image.new("RGBA", (40, 30), (200, 10, 10, 0)) for _ in range(2)]
    clip = prepare_frames(clear, 2.0, RELEASED)
    white = prepare_frames([Image.new("RGB", (40, 30), "white")] * 2, 2.0, RELEASED)
    assert_same(clip, white)


def _gif_with_a_grown_frame(side: int) -> bytes:
    """Return a GIF whose second frame is larger than the size in the header of the file."""
    data = bytearray(animation(pictures(2, 16, 16), "GIF", duration=100))
    second = data.rindex(b"\x2c\0\0\0\0")
    data[second + 5 : second + 9] = struct.pack("<HH", side, side)
    return bytes(data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a clip"),
    "text": (b"hello", "not a clip"),
    # Formats that name other files are never opened, whatever they claim to be.
    "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "not a clip"),
    "concat": (b"ffconcat version 1.0\nfile secret.mp4\n", "not a clip"),
    "cut-gif": (animation(pictures(6), "GIF", duration=100)[:4000], "cannot be decoded"),
    "cut-webp": (animation(pictures(6), "WEBP", duration=100)[:1500], "cannot be decoded"),
    "cut-png": (animation(pictures(6), "PNG", duration=100)[:9000], "cannot be decoded"),
    "grown-frame": (_gif_with_a_grown_frame(3000), "too many pixels"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_clips_are_refused_with_what_got_wanted_where(data: bytes, message: str) -> None:
    limits = VideoLimits(max_frame_pixels=1_000_000)
    with pytest.raises(RequestError) as caught:
        prepare_video(data, RELEASED, limits, where="messages[0].content[3]")
    text = str(caught.value)
    assert message in text
    assert "got" in text and "wanted" in text and "messages[0].content[3]" in text


@pytest.mark.parametrize(
    "limits",
    [
        VideoLimits(max_bytes=1000),
        VideoLimits(max_frames=5),
        VideoLimits(max_frame_pixels=1000),
        VideoLimits(max_decoded_pixels=6 * 48 * 64 - 1),
    ],
)
def test_limits_are_the_callers(limits: VideoLimits) -> None:
    data = animation(pictures(6), "GIF", duration=100)
    with pytest.raises(RequestError, match="wanted"):
        prepare_video(data, RELEASED, limits)


def test_frames_of_different_sizes_are_refused() -> None:
    with pytest.raises(RequestError, match="differ in size"):
        prepare_frames([*pictures(1), *pictures(1, 48, 65)], 2.0, RELEASED)


@pytest.mark.parametrize("count", [0, 5])
def test_number_of_frames_is_checked(count: int) -> None:
    with pytest.raises(RequestError, match="number of video frames"):
        prepare_frames(pictures(count), 2.0, VideoSettings(max_frames=4))


@pytest.mark.parametrize("fps", [0.0, -1.0, 1e-320, float("nan"), float("inf")])
def test_frame_rate_is_checked(fps: float) -> None:
    with pytest.raises(RequestError, match="frame rate"):
        prepare_frames(pictures(2), fps, RELEASED)


def test_settings_come_from_the_processor_file() -> None:
    image = {"patch_size": 16, "min_image_tokens": 4, "max_image_tokens": 99}
    video = {"patch_size": 16, "max_image_tokens": 500, "fps": 1, "max_frames": 32}
    assert VideoSettings.from_processor_config({"image_processor": image}) == VideoSettings(
        image=ImageSettings(patch_size=16, max_image_tokens=240_000)
    )
    assert VideoSettings.from_processor_config(
        {"image_processor": image, "video_processor": video}
    ) == VideoSettings(
        image=ImageSettings(patch_size=16, max_image_tokens=500), fps=1.0, max_frames=32
    )
    assert VideoSettings.from_processor_config({}) == RELEASED
    with pytest.raises(ConfigError, match="max_frames"):
        VideoSettings(max_frames=0)
    with pytest.raises(ConfigError, match="rate"):
        VideoSettings(fps=0.0)


def test_mp4_without_pyav_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"pip install 'oxplow\[video\]'"):
        prepare_video(b"\0\0\0\x1cftypisom" + bytes(64), RELEASED)


class TestWithPyAV:
    """Containers that PyAV reads; skipped where the optional `video` extra is not installed."""

    @pytest.fixture(autouse=True)
    def av(self) -> Any:
        """Return PyAV."""
        return pytest.importorskip("av", reason="needs the optional extra oxplow[video]")

    @staticmethod
    def record(av: Any, num_frames: int, container: str = "mp4") -> bytes:
        """Return a clip at 25 frames a second whose gray level grows by 5 a frame."""
        out = io.BytesIO()
        with av.open(out, "w", format=container) as file:
            stream = file.add_stream("mpeg4", rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(num_frames):
                level = np.full((48, 64, 3), 5 * i, dtype=np.uint8)
                file.mux(stream.encode(av.VideoFrame.from_ndarray(level, format="rgb24")))
            file.mux(stream.encode())
        return out.getvalue()

    @pytest.mark.parametrize("container", ["mp4", "matroska"])
    def test_frames_are_taken_at_their_times(self, av: Any, container: str) -> None:
        clip = prepare_video(self.record(av, 50, container), RELEASED)
        assert clip.timestamps == pytest.approx((0.0, 1.0))
        means = clip.pixel_values.reshape(2, -1, 3, 2, 14, 14)[:, 0, 0, :, 0, 0].reshape(-1)
        levels = (means * RELEASED.image.image_std[0] + RELEASED.image.image_mean[0]) * 255
        # 12.5 frames lie between due times: frames 0, 13, 25 and 38.
        assert levels == pytest.approx([0, 65, 125, 190], abs=6)

    def test_rotated_clips_are_shown_upright(self, av: Any) -> None:
        data = bytearray(self.record(av, 30))
        matrix = data.index(b"tkhd") + 44
        quarter_turn = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
        data[matrix : matrix + 36] = quarter_turn
        flat = prepare_video(self.record(av, 30), RELEASED).grid_thw
        turned = prepare_video(bytes(data), RELEASED).grid_thw
        assert (turned[1], turned[2]) == (flat[2], flat[1]) and flat[1] != flat[2]

    @pytest.mark.parametrize("share", [0.02, 0.5])
    def test_cut_clips_are_refused(self, av: Any, share: float) -> None:
        data = self.record(av, 50)
        with pytest.raises(RequestError, match="cannot be decoded"):
            prepare_video(data[: int(share * len(data))], RELEASED)

    def test_clips_without_pictures_are_refused(self, av: Any) -> None:
        out = io.BytesIO()
        with av.open(out, "w", format="matroska") as file:
            stream = file.add_stream("pcm_s16le", rate=8000)
            silence = np.zeros((1, 800), dtype=np.int16)
            frame = av.AudioFrame.from_ndarray(silence, format="s16", layout="mono")
            frame.sample_rate = 8000
            file.mux(stream.encode(frame))
            file.mux(stream.encode())
        with pytest.raises(RequestError, match="no picture track"):
            prepare_video(out.getvalue(), RELEASED)
