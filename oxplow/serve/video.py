"""Turn a clip into the patch rows that the vision tower reads: sample, resize, pair frames.

Owns the choice of frames, the canvas of a clip and the pairing of frames into temporal patches.
Must not know containers (`oxplow.serve.clip_files`), torch, prompts or the engine.
Invariant: which frames are taken, the canvas and the times equal those of the reference processor
(transformers 5.24 `Glm5NextVideoProcessor`); pixels differ from it by the resizing filter only.

Decided here, because the reference leaves it open or does harm: a clip shorter than one sampling
step gives its first frame (the reference gives none and fails); frames that a client sends as
pictures are taken as they are, none is dropped.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.clip_files import DEFAULT_LIMITS, VideoLimits, check_rate, open_clip
from oxplow.serve.images import ImageSettings, cut_frame, fit_canvas, place_on_canvas, to_rgb

MAX_CLIP_TOKENS = 240_000
FRAMES_PER_SECOND = 2.0
MAX_FRAMES = 2048

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
    clip = open_clip(data, limits, where)
    indices = sample_frames(clip.num_frames, clip.fps, settings)
    return _prepare(clip.frames(sorted(set(indices))), indices, clip.fps, settings, where)


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
    check_rate(fps, where)
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
