"""Expand the place of a picture or clip in a prompt into the tokens that its features replace.

Owns the prompt form of media. Must not know pixels, the tokenizer or the chat template.
Invariant: spans and feature rows correspond one to one, in the order of the prompt; special tokens
enter only as ids, so text that merely spells one of them opens no place.

A rendered prompt holds one image token for a picture, inside `<|begin_of_image|>` and
`<|end_of_image|>`, and one video token for a clip, inside `<|begin_of_video|>` and
`<|end_of_video|>`; the template writes the markers. A clip becomes, for each temporal patch,
begin-of-image, image tokens, end-of-image and the time as text: the placeholder of a clip is the
image token as well. Source: transformers 5.24 `Glm5NextProcessor`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from oxplow.errors import RequestError
from oxplow.serve.images import PreparedImage
from oxplow.serve.video import PreparedVideo

__all__ = [
    "ExpandedPrompt",
    "MediaSpan",
    "MediaTokens",
    "expand_placeholders",
    "image_text",
    "time_text",
    "video_text",
]

_IMAGE = "<|image|>"
_BEGIN, _END = "<|begin_of_image|>", "<|end_of_image|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """Hold the special token ids of a model's config."""

    image: int
    video: int
    image_start: int
    image_end: int


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Say which tokens `[start, start + num_tokens)` take features, and from which item.

    `item` counts pictures or clips of the request; `step` is the temporal patch, 0 for a picture.
    """

    kind: Literal["image", "video"]
    item: int
    step: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Hold the tokens of a prompt and, in their order, the spans that take features."""

    token_ids: list[int]
    spans: list[MediaSpan]


def image_text(num_tokens: int) -> str:
    """Return what stands for the one image token of a picture."""
    return _IMAGE * num_tokens


def time_text(timestamp: float) -> str:
    """Return the time that follows each temporal patch of a clip."""
    return f"{timestamp:.1f} seconds"


def video_text(video: PreparedVideo) -> str:
    """Return what stands for the one video token of a clip."""
    pictures = _BEGIN + image_text(video.step_tokens) + _END
    return "".join(pictures + time_text(timestamp) for timestamp in video.timestamps)


def expand_placeholders(
    token_ids: Sequence[int],
    images: Sequence[PreparedImage],
    videos: Sequence[PreparedVideo],
    tokens: MediaTokens,
    encode: Callable[[str], Sequence[int]],
) -> ExpandedPrompt:
    """Replace the n-th image token by the n-th picture's tokens, and clips likewise.

    `encode` turns the times into ids, without special tokens. Raises RequestError if the prompt has
    more or fewer places than there are pictures or clips.
    """
    _check_places("picture", list(token_ids).count(tokens.image), len(images))
    _check_places("clip", list(token_ids).count(tokens.video), len(videos))
    pictures, clips = enumerate(images), enumerate(videos)
    out: list[int] = []
    spans: list[MediaSpan] = []
    for token in token_ids:
        if token == tokens.image:
            item, image = next(pictures)
            spans.append(MediaSpan("image", item, 0, len(out), image.num_tokens))
            out += [tokens.image] * image.num_tokens
        elif token == tokens.video:
            item, video = next(clips)
            for step, timestamp in enumerate(video.timestamps):
                out.append(tokens.image_start)
                spans.append(MediaSpan("video", item, step, len(out), video.step_tokens))
                out += [tokens.image] * video.step_tokens
                out += [tokens.image_end, *encode(time_text(timestamp))]
        else:
            out.append(token)
    return ExpandedPrompt(out, spans)


def _check_places(what: str, places: int, given: int) -> None:
    if places != given:
        raise RequestError(
            f"the prompt and the {what}s of the request disagree",
            got=f"{given} {what}(s)",
            wanted=f"{places}, one for each place in the prompt",
        )
