"""Read clips: GIF, WebP and PNG animations through Pillow, mp4 and Matroska through PyAV.

Owns the recognition of containers, the limits on what a file may cost, and the order of frames.
Must not know sampling, canvases, torch or prompts. PyAV is optional and imported inside a function.
Invariant: nothing but RequestError leaves this module, and no file is opened by guessing its
format: some formats that a guess may find name other files or addresses.

Decided here: an animation has one rate, its number of frames over its length, and a delay of 10 ms
or less counts as 100 ms, as in browsers; mp4 frames are turned upright by their display matrix.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from PIL import Image

from oxplow.errors import RequestError
from oxplow.serve.images import DECODE_ERRORS, check_size

ANIMATIONS = ("GIF", "WEBP", "PNG")
# Rates outside are damage; times and numbers of frames stay finite within.
LOWEST_RATE, HIGHEST_RATE = 1e-6, 1e6
_SHORTEST_DELAY_MS = 10
_UNSET_DELAY_MS = 100

__all__ = ["DEFAULT_LIMITS", "Animation", "Film", "VideoLimits", "check_rate", "open_clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Bound what one encoded clip may cost: bytes as sent, frames, and pixels after decoding."""

    max_bytes: int = 256 * 2**20
    max_frames: int = 100_000
    max_frame_pixels: int = 8192 * 4320
    max_decoded_pixels: int = 2**34

    def check_work(self, num_frames: int, size: tuple[int, int], where: str) -> None:
        """Raise RequestError for an empty clip, and for one whose decoding would cost too much."""
        check_size(*size, self.max_frame_pixels, where)
        pixels = num_frames * size[0] * size[1]
        if not (0 < num_frames <= self.max_frames and pixels <= self.max_decoded_pixels):
            raise RequestError(
                "the clip is too long to decode" if num_frames else "the clip has no frames",
                got=f"{num_frames} frames of {size[0]} x {size[1]}",
                wanted=f"1 to {self.max_frames} frames, {self.max_decoded_pixels} pixels in all",
                where=where,
            )


DEFAULT_LIMITS = VideoLimits()


def open_clip(data: bytes, limits: VideoLimits, where: str) -> "Animation | Film":
    """Recognise a clip by its first bytes and measure it.

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
    if data[:6] in (b"GIF87a", b"GIF89a") or data[:8] == b"\x89PNG\r\n\x1a\n":
        return Animation.measure(data, limits, where)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return Animation.measure(data, limits, where)
    if data[4:8] == b"ftyp":
        return Film.measure(data, "mp4", limits, where)
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return Film.measure(data, "matroska", limits, where)
    raise RequestError(
        "the bytes are not a clip",
        got=f"{len(data)} bytes that begin with {data[:12]!r}",
        wanted="GIF, WebP, PNG, mp4 or Matroska (WebM)",
        where=where,
    )


def check_rate(fps: float, where: str) -> None:
    """Raise RequestError if no clip can have this many frames a second."""
    if not LOWEST_RATE <= fps <= HIGHEST_RATE:
        raise RequestError(
            "the frame rate is wrong",
            got=fps,
            wanted=f"{LOWEST_RATE} to {HIGHEST_RATE} frames a second",
            where=where,
        )


@dataclass(frozen=True, slots=True)
class Animation:
    """Hold a measured GIF, WebP or PNG animation."""

    data: bytes
    limits: VideoLimits
    where: str
    num_frames: int
    fps: float

    @classmethod
    def measure(cls, data: bytes, limits: VideoLimits, where: str) -> "Animation":
        """Count the frames and read the delays of all of them, which decodes each once."""
        try:
            with Image.open(io.BytesIO(data), formats=ANIMATIONS) as file:
                num_frames = getattr(file, "n_frames", 1)
                limits.check_work(num_frames, file.size, where)
                total_ms = 0.0
                for index in range(num_frames):
                    _show(file, index, limits, where)
                    delay = float(file.info.get("duration", 0))
                    total_ms += delay if delay > _SHORTEST_DELAY_MS else _UNSET_DELAY_MS
        except DECODE_ERRORS as error:
            raise _damaged(error, where) from error
        return cls(data, limits, where, num_frames, 1000 * num_frames / total_ms)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the frames of rising `indices`; each is valid until the next is taken."""
        try:
            with Image.open(io.BytesIO(self.data), formats=ANIMATIONS) as file:
                for index in indices:
                    _show(file, index, self.limits, self.where)
                    yield file
        except DECODE_ERRORS as error:
            raise _damaged(error, self.where) from error


@dataclass(frozen=True, slots=True)
class Film:
    """Hold a measured mp4 or Matroska clip."""

    data: bytes
    container: str
    limits: VideoLimits
    where: str
    num_frames: int
    fps: float

    @classmethod
    def measure(cls, data: bytes, container: str, limits: VideoLimits, where: str) -> "Film":
        """Count the coded frames (the header is not believed) and read the average rate."""
        av = _pyav(where)
        try:
            with av.open(io.BytesIO(data), format=container) as file:
                stream = _picture_track(file, where)
                fps = float(stream.average_rate or stream.guessed_rate or 0)
                size = (stream.codec_context.width, stream.codec_context.height)
                packets = file.demux(stream)
                num_frames = sum(1 for p in packets if p.size and not p.is_discard)
        except (av.FFmpegError, *DECODE_ERRORS) as error:
            raise _damaged(error, where) from error
        limits.check_work(num_frames, size, where)
        check_rate(fps, where)
        return cls(data, container, limits, where, num_frames, fps)

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the upright frames of rising `indices`, in the order of showing."""
        av = _pyav(self.where)
        wanted, last = set(indices), max(indices)
        try:
            with av.open(io.BytesIO(self.data), format=self.container) as file:
                for index, frame in enumerate(file.decode(_picture_track(file, self.where))):
                    if index in wanted:
                        size = (frame.width, frame.height)
                        self.limits.check_work(index + 1, size, self.where)
                        picture = frame.to_image()
                        turn = frame.rotation % 360
                        yield picture.rotate(turn, expand=True) if turn else picture
                    if index == last:
                        return
        except (av.FFmpegError, *DECODE_ERRORS) as error:
            raise _damaged(error, self.where) from error


def _show(file: Image.Image, index: int, limits: VideoLimits, where: str) -> None:
    """Decode one frame of an animation; a frame may be larger than the header of the file says."""
    file.seek(index)
    limits.check_work(index + 1, file.size, where)
    file.load()


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


def _picture_track(file: Any, where: str) -> Any:
    """Return the first video stream of an open container whose codec is known."""
    for stream in file.streams.video:
        if stream.codec_context is not None:
            return stream
    raise RequestError(
        "the clip has no picture track that this server can decode",
        got=", ".join(f"{stream.type} track" for stream in file.streams) or "no track",
        wanted="a video track of a known codec",
        where=where,
    )


def _damaged(error: Exception, where: str) -> RequestError:
    return RequestError(
        "the clip cannot be decoded",
        got=f"{type(error).__name__}: {error}",
        wanted="a complete, undamaged file",
        where=where,
    )
