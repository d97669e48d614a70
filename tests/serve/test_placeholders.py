"""Places of media in a prompt: text and spans as the reference processor has them."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from oxplow.errors import RequestError
from oxplow.serve.images import ImageSettings, PreparedImage, prepare_image
from oxplow.serve.placeholders import (
    MediaSpan,
    MediaTokens,
    expand_placeholders,
    image_text,
    video_text,
)
from oxplow.serve.video import PreparedVideo, VideoSettings, prepare_frames, sample_frames
from tests.oracles.reading import open_oracle

TOKENS = MediaTokens(image=1000, video=1001, image_start=1002, image_end=1003)
VIDEO_START, VIDEO_END = 1004, 1005
NO_PIXELS = np.empty((0, 1176), dtype=np.float32)


def picture(num_tokens: int) -> PreparedImage:
    """Return a picture of which only the number of tokens matters."""
    return PreparedImage(NO_PIXELS, (1, 2 * num_tokens, 2), num_tokens)


def clip(timestamps: tuple[float, ...], step_tokens: int) -> PreparedVideo:
    """Return a clip of which only times and numbers matter."""
    grid = (len(timestamps), 2 * step_tokens, 2)
    return PreparedVideo(NO_PIXELS, grid, timestamps, step_tokens)


def encode(text: str) -> list[int]:
    """Return one id below 256 for each byte."""
    return list(text.encode())


@pytest.fixture(scope="module")
def processor() -> Any:
    """Return the reference's prompt code on stand-ins; its constructor needs torchvision."""
    module = pytest.importorskip(
        "transformers.models.glm5_next.processing_glm5_next", reason="transformers is the oracle"
    )
    stand_in = SimpleNamespace(
        image_token="<|image|>",
        image_token_id=TOKENS.image,
        video_start_id=VIDEO_START,
        video_end_id=VIDEO_END,
        image_processor=SimpleNamespace(merge_size=2),
        video_processor=SimpleNamespace(merge_size=2),
    )
    for name in ("replace_frame_token_id", "replace_video_token", "replace_image_token"):
        setattr(stand_in, name, getattr(module.Glm5NextProcessor, name).__get__(stand_in))
    kinds = module.Glm5NextProcessor.create_mm_token_type_ids
    stand_in.kinds = kinds.__get__(stand_in)
    return stand_in


@pytest.mark.oracle
def test_text_of_a_picture_equals_the_reference(processor: Any) -> None:
    inputs = {"image_grid_thw": np.array([[1, 8, 10]])}
    assert image_text(20) == processor.replace_image_token(inputs, 0)


@pytest.mark.oracle
@pytest.mark.parametrize("fps", [2, 3, 7.3, 20, 24, 24000 / 1001, 25, 30000 / 1001])
def test_text_of_a_clip_equals_the_reference(processor: Any, fps: float) -> None:
    from transformers.video_utils import VideoMetadata

    indices = sample_frames(1201, fps, VideoSettings())
    metadata = VideoMetadata(total_num_frames=1201, fps=fps, frames_indices=indices)
    steps = len(indices) // 2
    inputs = {"video_grid_thw": np.array([[steps, 4, 6]]), "video_metadata": [metadata]}
    ours = clip(tuple(index / fps for index in indices[::2]), 6)
    assert video_text(ours) == processor.replace_video_token(inputs, 0)


def test_tokens_and_spans_of_a_mixed_prompt() -> None:
    prompt = [7, 1002, 1000, 1003, 8, VIDEO_START, 1001, VIDEO_END, 1002, 1000, 1003, 9]
    out = expand_placeholders(
        prompt, [picture(3), picture(1)], [clip((0.0, 1.0), 2)], TOKENS, encode
    )
    step = [1002, 1000, 1000, 1003]
    assert out.token_ids == [
        *(7, 1002, 1000, 1000, 1000, 1003, 8, VIDEO_START),
        *(*step, *encode("0.0 seconds"), *step, *encode("1.0 seconds")),
        *(VIDEO_END, 1002, 1000, 1003, 9),
    ]
    first = 9
    second = first + 3 + len("0.0 seconds") + 1
    last = second + 3 + len("1.0 seconds") + 2
    assert out.spans == [
        MediaSpan("image", 0, 0, 2, 3),
        MediaSpan("video", 0, 0, first, 2),
        MediaSpan("video", 0, 1, second, 2),
        MediaSpan("image", 1, 0, last, 1),
    ]


@pytest.mark.oracle
def test_spans_are_of_the_kind_that_the_reference_sees(processor: Any) -> None:
    prompt = [1002, 1000, 1003, VIDEO_START, 1001, VIDEO_END, 5, VIDEO_START, 1001, VIDEO_END]
    clips = [clip((0.0, 1.0), 2), clip((0.0,), 4)]
    out = expand_placeholders(prompt, [picture(3)], clips, TOKENS, encode)
    kinds = [0] * len(out.token_ids)
    for span in out.spans:
        ends = range(span.start, span.start + span.num_tokens)
        for place in ends:
            kinds[place] = 1 if span.kind == "image" else 2
    assert processor.kinds([out.token_ids]) == [kinds]


def test_text_that_spells_a_placeholder_opens_no_place() -> None:
    prompt = encode("<|image|>")
    assert expand_placeholders(prompt, [], [], TOKENS, encode).token_ids == prompt


@pytest.mark.parametrize(
    ("prompt", "images", "videos", "message"),
    [
        ([1000], 0, 0, "got 0 picture"),
        ([1], 1, 0, "got 1 picture"),
        ([1000, 1000], 1, 0, "wanted 2"),
        ([1001], 0, 2, "got 2 clip"),
    ],
)
def test_places_and_media_must_agree(
    prompt: list[int], images: int, videos: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        expand_placeholders(
            prompt, [picture(2)] * images, [clip((0.0,), 1)] * videos, TOKENS, encode
        )


@pytest.mark.oracle
@pytest.mark.slow
def test_pictures_and_clip_of_the_oracle_are_made_from_scratch(glm_oracle: Any) -> None:
    oracle = open_oracle(glm_oracle(seed=0))
    config = json.loads((oracle.directory / "config.json").read_text())
    processor = json.loads((oracle.directory / "processor_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(oracle.directory / "tokenizer.json"))
    tokens = MediaTokens(
        image=config["image_token_id"],
        video=config["video_token_id"],
        image_start=config["image_start_token_id"],
        image_end=config["image_end_token_id"],
    )

    def frames(key: str) -> list[Image.Image]:
        values = oracle.tensor(key).numpy()
        planes = values if values.ndim == 4 else values[None]
        return [Image.fromarray(plane.transpose(1, 2, 0).copy()) for plane in planes]

    images = [
        prepare_image(frames(f"images.rgb.{i}")[0], ImageSettings.from_processor_config(processor))
        for i in range(2)
    ]
    video = prepare_frames(
        frames("video.rgb"),
        oracle.notes["video_fps"],
        VideoSettings.from_processor_config(processor),
    )
    rows = np.concatenate([image.pixel_values for image in images])
    np.testing.assert_array_equal(rows, oracle.tensor("images.pixel_values").numpy())
    np.testing.assert_array_equal(video.pixel_values, oracle.tensor("video.pixel_values").numpy())
    assert [video.grid_thw] == [tuple(grid) for grid in oracle.tensor("video.grid_thw").tolist()]

    place = "<|begin_of_image|><|image|><|end_of_image|>"
    film = "<|begin_of_video|><|video|><|end_of_video|>"
    prompt = tokenizer.encode(f"{place}then{film}then{place}.").ids
    out = expand_placeholders(prompt, images, [video], tokens, lambda t: tokenizer.encode(t).ids)
    assert out.token_ids == oracle.tensor("mixed.ids")[0].tolist()
