"""Turn a clip into the patch rows that the vision tower reads: sample, resize, pair frames.

Owns the choice of frames, the reading of GIF, WebP and PNG animations (Pillow) and of mp4 and
Matroska files (PyAV, optional), and the limits on them. Must not know torch, prompts or the engine.
Invariant: which frames are taken, the canvas and the times equal those of the reference processor
(transformers 5.24 `Glm5NextVideoProcessor`); pixels differ from it by the resizing filter only.

Decided here, because the reference leaves it open or does harm:
- an animation has one rate, its number of frames over its length; a delay of 10 ms or less counts
  as 100 ms, as in browsers;
- a clip shorter than one sampling step gives its first frame (the reference gives none and fails);
- frames that a client sends as pictures are taken as they are, none is dropped;
- mp4 frames are turned upright by the file's display matrix;
- only containers recognised here are opened, and never by guessing: some formats name other files.
"""

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.images import (
    DECODE_ERRORS,
    ImageSettings,
    check_size,
    cut_frame,
    fit_canvas,
    place_on_canvas,
    to_rgb,
)

ANIMATIONS = ("GIF", "WEBP", "PNG")
MAX_CLIP_TOKENS = 240_000
FRAMES_PER_SECOND = 2.0
MAX_FRAMES = 2048
_SHORTEST_DELAY_MS = 10
_UNSET_DELAY_MS = 100

__all__ = [
    "DEFAULT_LIMITS",
    "PreparedVideo",
    "VideoLimits",
    "VideoSettings",
    "prepare_frames",
    "prepare_video",
    "sample_frames",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """Say how clips become patch rows; the defaults are those of the released model.

    `image` holds the patch sizes and the budget, which covers the whole clip. `fps` frames are
    taken of each second, `max_frames` at most. Raises ConfigError on values below what works.
    """

    image: ImageSettings = ImageSettings(max_image_tokens=MAX_CLIP_TOKENS)
    fps: float = FRAMES_PER_SECOND
    max_frames: int = MAX_FRAMES

    def __post_init__(self) -> None:
        """Refuse a rate that is not above zero and fewer than one frame."""
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ConfigError("the video sampling rate is wrong", got=self.fps, wanted="above 0")
        if self.max_frames < 1:
            raise ConfigError("max_frames is wrong", got=self.max_frames, wanted="at least 1")

    @classmethod
    def from_processor_config(cls, config: Mapping[str, Any]) -> "VideoSettings":
        """Read the `video_processor` section of the parsed `processor_config.json`.

        Without that section the patch sizes and colours come from `image_processor`, and the
        budget, the rate and the frame bound keep their defaults.
        """
        values = config.get("video_processor")
        if values is None:
            values = dict(config.get("image_processor", config))
            values.pop("min_image_tokens", None)
            values.pop("max_image_tokens", None)
        section = {"max_image_tokens": MAX_CLIP_TOKENS, "fps": FRAMES_PER_SECOND}
        section |= {name: value for name, value in values.items() if value is not None}
        image = ImageSettings.from_processor_config(section)
        max_frames = section.get("max_frames", MAX_FRAMES)
        return cls(image=image, fps=float(section["fps"]), max_frames=int(max_frames))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Bound what one encoded clip may cost: bytes as sent, frames, and pixels after decoding."""

    max_bytes: int = 256 * 2**20
    max_frames: int = 100_000
    max_frame_pixels: int = 8192 * 4320
    max_decoded_pixels: int = 2**34


DEFAULT_LIMITS = VideoLimits()


@dataclass(frozen=True, slots=True, eq=False)
class PreparedVideo:
    """Hold one clip for the tower.

    `pixel_values` is fp32 [t * grid_h * grid_w, 3 * temporal_patch_size * patch_size**2], ordered
    as in PreparedImage, temporal patch after temporal patch; each of them attends to itself only.
    `timestamps` holds the second at which each temporal patch begins; each takes `step_tokens`.
    """

    pixel_values: NDArray[np.float32]
    grid_thw: tuple[int, int, int]
    timestamps: tuple[float, ...]
    step_tokens: int


def sample_frames(num_frames: int, fps: float, settings: VideoSettings) -> list[int]:
    """Return the indices of the frames to take, rising, an even number of them.

    A frame is taken when its time reaches the next due time; the last index is repeated where the
    number would be odd. The steps follow the reference, whose time of frame i is i * (1 / fps).
    """
    duration = num_frames / fps
    wanted = min(int(duration * settings.fps), settings.max_frames)
    if num_frames < wanted:
        taken = list(range(num_frames))
    else:
        taken = _due_frames(num_frames, fps, int(duration), settings.fps)
        if len(taken) < wanted:
            taken = _spread(taken[0], taken[-1], wanted)
        elif len(taken) > wanted:
            taken = _spread(0, num_frames - 1, max(1, wanted))
    unique = list(dict.fromkeys(taken))
    return unique if len(unique) % 2 == 0 else [*unique, unique[-1]]


def prepare_video(
    data: bytes,
    settings: VideoSettings,
    limits: VideoLimits = DEFAULT_LIMITS,
    where: str = "video",
) -> PreparedVideo:
    """Decode, sample and prepare a GIF, WebP, PNG, mp4 or Matroska clip.

    Raises RequestError (field `where`) for bytes that are no clip, damaged or cut short, beyond a
    limit, or that need PyAV where it is not installed.
    """
    if len(data) > limits.max_bytes:
        raise RequestError(
            "the clip is too large",
            got=f"{len(data)} bytes",
            wanted=f"at most {limits.max_bytes}",
            where=where,
        )
    container = _container(data)
    if container == "animation":
        return _prepare_animation(data, settings, limits, where)
    if container is not None:
        return _prepare_container(data, container, settings, limits, where)
    raise RequestError(
        "the bytes are not a clip",
        got=f"{len(data)} bytes that begin with {data[:12]!r}",
        wanted="GIF, WebP, PNG, mp4 or Matroska (WebM)",
        where=where,
    )


def prepare_frames(
    frames: Sequence[Image.Image], fps: float, settings: VideoSettings, where: str = "video"
) -> PreparedVideo:
    """Prepare frames that were sampled already, `fps` of them to the second.

    Raises RequestError if there are none, more than `max_frames`, or sizes differ.
    """
    if not 0 < len(frames) <= settings.max_frames:
        raise RequestError(
            "the number of video frames is wrong",
            got=len(frames),
            wanted=f"1 to {settings.max_frames}",
            where=where,
        )
    _check_rate(fps, where)
    return _prepare(frames, list(range(len(frames))), fps, settings, where)


def _prepare(
    frames: Iterable[Image.Image],
    indices: list[int],
    fps: float,
    settings: VideoSettings,
    where: str,
) -> PreparedVideo:
    """Place frames, one for each distinct index, on their canvas; fill up by repeating the last."""
    image, slots = settings.image, settings.image.temporal_patch_size
    steps = -(-len(indices) // slots)
    expected = len(set(indices))
    rows: NDArray[np.float32] | None = None
    size, placed = (0, 0), 0
    for placed, frame in enumerate(frames, start=1):
        if rows is None:
            size = frame.size
            canvas = fit_canvas(frame.height, frame.width, len(indices), image)
            patches = canvas.height * canvas.width // image.patch_size**2
            shape = (steps, patches, 3, slots, image.patch_size, image.patch_size)
            rows = np.empty(shape, dtype=np.float32)
        if frame.size != size:
            raise RequestError(
                "the frames of a clip differ in size",
                got=f"frame {placed - 1} of {frame.size}",
                wanted=f"{size} as the first",
                where=where,
            )
        cut = cut_frame(place_on_canvas(to_rgb(frame, where), canvas), image)
        last = placed if placed < expected else steps * slots
        for place in range(placed - 1, last):
            rows[place // slots, :, :, place % slots] = cut
    if rows is None or placed < expected:
        raise RequestError(
            "the clip ends early", got=f"{placed} frames", wanted=f"{expected} frames", where=where
        )
    return PreparedVideo(
        pixel_values=rows.reshape(steps * patches, -1),
        grid_thw=(steps, canvas.height // image.patch_size, canvas.width // image.patch_size),
        timestamps=tuple(index / fps for index in indices[::slots]),
        step_tokens=canvas.height * canvas.width // image.token_side**2,
    )


def _due_frames(num_frames: int, fps: float, seconds: int, target_fps: float) -> list[int]:
    """Return the first frame at or after each due time, one frame for one due time at most."""
    taken: list[int] = []
    due = 0.0
    for index in range(num_frames):
        if index * (1 / fps) < due:
            continue
        taken.append(index)
        due += 1 / target_fps
        if due >= seconds:
            break
    return taken


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` indices from first to last at even distances, rounded down."""
    spread: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return spread


def _container(data: bytes) -> str | None:
    """Name the kind of file by its first bytes; None if it is none that we open."""
    if data[:6] in (b"GIF87a", b"GIF89a") or data[:8] == b"\x89PNG\r\n\x1a\n":
        return "animation"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "animation"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return None


def _prepare_animation(
    data: bytes, settings: VideoSettings, limits: VideoLimits, where: str
) -> PreparedVideo:
    try:
        with Image.open(io.BytesIO(data), formats=ANIMATIONS) as file:
            check_size(file.width, file.height, limits.max_frame_pixels, where)
            num_frames = getattr(file, "n_frames", 1)
            _check_work(num_frames, file.size, limits, where)
            fps = _animation_rate(file, num_frames, limits, where)
            indices = sample_frames(num_frames, fps, settings)
            frames = _animation_frames(file, sorted(set(indices)), limits, where)
            return _prepare(frames, indices, fps, settings, where)
    except DECODE_ERRORS as error:
        raise _damaged(error, where) from error


def _animation_rate(file: Image.Image, num_frames: int, limits: VideoLimits, where: str) -> float:
    """Return frames per second over the whole animation; the delays of all frames are read."""
    total_ms = 0.0
    for index in range(num_frames):
        _show(file, index, limits, where)
        delay = float(file.info.get("duration", 0))
        total_ms += delay if delay > _SHORTEST_DELAY_MS else _UNSET_DELAY_MS
    return 1000 * num_frames / total_ms


def _animation_frames(
    file: Image.Image, indices: list[int], limits: VideoLimits, where: str
) -> Iterator[Image.Image]:
    for index in indices:
        _show(file, index, limits, where)
        yield file


def _show(file: Image.Image, index: int, limits: VideoLimits, where: str) -> None:
    """Decode one frame of an animation; a frame may be larger than the header of the file says."""
    file.seek(index)
    check_size(file.width, file.height, limits.max_frame_pixels, where)
    _check_work(index + 1, file.size, limits, where)
    file.load()


def _prepare_container(
    data: bytes, container: str, settings: VideoSettings, limits: VideoLimits, where: str
) -> PreparedVideo:
    av = _pyav(where)
    try:
        num_frames, fps, size = _describe(av, data, container, where)
        check_size(*size, limits.max_frame_pixels, where)
        _check_work(num_frames, size, limits, where)
        _check_rate(fps, where)
        indices = sample_frames(num_frames, fps, settings)
        frames = _container_frames(av, data, container, set(indices), limits)
        return _prepare(frames, indices, fps, settings, where)
    except (av.FFmpegError, *DECODE_ERRORS) as error:
        raise _damaged(error, where) from error


def _describe(
    av: ModuleType, data: bytes, container: str, where: str
) -> tuple[int, float, tuple[int, int]]:
    """Return the number of coded frames (counted, not believed), the average rate and the size."""
    with av.open(io.BytesIO(data), format=container) as file:
        if not file.streams.video:
            raise RequestError("the clip has no picture track", where=where)
        stream = file.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate or 0
        size = (stream.codec_context.width, stream.codec_context.height)
        num_frames = sum(1 for p in file.demux(stream) if p.size and not p.is_discard)
        return num_frames, float(rate), size


def _container_frames(
    av: ModuleType, data: bytes, container: str, wanted: set[int], limits: VideoLimits
) -> Iterator[Image.Image]:
    """Decode frames in the order of showing and yield the wanted ones, upright."""
    last = max(wanted)
    with av.open(io.BytesIO(data), format=container) as file:
        for index, frame in enumerate(file.decode(file.streams.video[0])):
            if index in wanted:
                check_size(frame.width, frame.height, limits.max_frame_pixels, "video")
                picture = frame.to_image()
                turn = frame.rotation % 360
                yield picture.rotate(turn, expand=True) if turn else picture
            if index == last:
                return


def _pyav(where: str) -> ModuleType:
    """Import PyAV, or tell the client which clips this server can read."""
    try:
        import av
    except ImportError as error:
        raise RequestError(
            "this server cannot read mp4 or Matroska clips",
            got="no PyAV installed (pip install 'oxplow[video]')",
            wanted="a GIF or WebP clip, or frames as pictures",
            where=where,
        ) from error
    module: ModuleType = av
    return module


def _check_work(num_frames: int, size: tuple[int, int], limits: VideoLimits, where: str) -> None:
    """Refuse an empty clip, and one whose decoding would cost too much."""
    pixels = num_frames * size[0] * size[1]
    if 0 < num_frames <= limits.max_frames and pixels <= limits.max_decoded_pixels:
        return
    raise RequestError(
        "the clip is too long to decode" if num_frames else "the clip has no frames",
        got=f"{num_frames} frames of {size[0]} x {size[1]}",
        wanted=f"at most {limits.max_frames} frames and {limits.max_decoded_pixels} pixels in all",
        where=where,
    )


def _check_rate(fps: float, where: str) -> None:
    if not (math.isfinite(fps) and fps > 0):
        raise RequestError("the frame rate is wrong", got=fps, wanted="above zero", where=where)


def _damaged(error: Exception, where: str) -> RequestError:
    return RequestError(
        "the clip cannot be decoded",
        got=f"{type(error).__name__}: {error}",
        wanted="a complete, undamaged file",
        where=where,
    )
