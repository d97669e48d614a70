"""Run a tiny `glm5_next` in transformers and record what an engine has to reproduce.

Owns the prompts, the pictures and the names of the reference tensors. Must not know files.
Invariant: names and shapes of `text.*`, `image.*` and `mtp.*` stay; `images.*`, `video.*` and
`mixed.*` are ours and may be absent from directories made by other scripts.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Glm5NextForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.glm5_next.image_processing_pil_glm5_next import (
    Glm5NextImageProcessorPil,
)

from tests.oracles.margins import CutMargins, greedy_margin, near_ties

VIDEO_FPS = 2.0
VIDEO_SHAPE = (6, 3, 60, 76)
PICTURE_SHAPES = ((3, 61, 200), (3, 47, 33))
STEPPED_TOKENS = 32
# Pictures and frames are drawn anew until no prompt of theirs comes near a tie.
MEDIA_DRAWS = 8

__all__ = ["Record", "record_all"]


@dataclass(slots=True)
class Record:
    """Collect reference tensors, the smallest gap at any cut, and other notes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Media:
    """Hold what the vision tower reads: patch rows and the (t, h, w) grid of each item."""

    pixel_values: Tensor
    grid_thw: Tensor

    def num_tokens(self) -> list[int]:
        """Return the number of prompt tokens of each item."""
        return [int(grid.prod()) // 4 for grid in self.grid_thw]


@torch.no_grad()
def record_all(
    model: Glm5NextForConditionalGeneration,
    mtp: nn.ModuleDict,
    tokenizer: PreTrainedTokenizerFast,
    generator: torch.Generator,
    length: int,
    steps: int,
) -> Record:
    """Record text, draft block, one picture, two pictures, a clip, and both in one prompt."""
    record = Record()
    ids = torch.randint(0, 256, (1, length), generator=generator)
    picture = _noise((3, 90, 130), generator)
    record_text(record, model, ids, steps)
    record_mtp(record, model, mtp, ids)
    record_image(record, model, tokenizer, picture)
    for _ in range(MEDIA_DRAWS):
        media = Record()
        record_images(media, model, tokenizer, [_noise(s, generator) for s in PICTURE_SHAPES])
        record_video(media, model, tokenizer, _noise(VIDEO_SHAPE, generator))
        record_mixed(media, model, tokenizer)
        if not near_ties(media.gaps):
            break
    record.tensors |= media.tensors
    record.gaps |= media.gaps
    record.notes |= media.notes
    return record


def record_text(
    record: Record, model: Glm5NextForConditionalGeneration, ids: Tensor, steps: int
) -> None:
    """Record logits, streams, selected tokens and the greedy tail of a random text."""
    selected: dict[str, Tensor] = {}
    hooks = [
        layer.self_attn.indexer.register_forward_hook(_keep_output(selected, f"text.topk.{i}"))
        for i, layer in enumerate(model.model.language_model.layers)
        if hasattr(layer.self_attn, "indexer")
    ]
    started = time.perf_counter()
    with CutMargins() as cuts:
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    record.notes["prefill_s"] = time.perf_counter() - started
    record.gaps |= cuts.gaps("")
    for hook in hooks:
        hook.remove()
    record.tensors |= {"text.ids": ids, "text.logits": out.logits, **selected}
    for i, streams in enumerate(out.hidden_states):
        record.tensors[f"text.streams.{i}"] = streams

    record.notes["prefill_vs_step"] = _step_difference(model, ids, out.logits, {})
    started = time.perf_counter()
    greedy = _greedy(model, ids, steps)
    record.notes["decode_tok_s"] = steps / (time.perf_counter() - started)
    record.tensors["text.greedy"] = greedy
    with CutMargins() as cuts:
        logits = model(input_ids=torch.cat([ids, greedy], dim=1), use_cache=False).logits
    record.gaps |= cuts.gaps("_with_greedy")
    record.gaps["min_greedy_gap"] = greedy_margin(logits[0, ids.shape[1] - 1 : -1])


def record_mtp(
    record: Record, model: Glm5NextForConditionalGeneration, mtp: nn.ModuleDict, ids: Tensor
) -> None:
    """Record the draft block: row t reads the final state of t and token t+1, and drafts t+2."""
    trunk = model.model.language_model
    final = trunk(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    block = mtp["block"]
    with CutMargins() as cuts:
        embedded = mtp["enorm"](trunk.embed_tokens(ids[:, 1:]))
        x = mtp["eh_proj"](torch.cat([embedded, mtp["hnorm"](final)], dim=-1))
        everywhere = torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + block.self_attn(block.input_layernorm(x), everywhere)[0]
        x = x + block.mlp(block.post_attention_layernorm(x))
        hidden = mtp["head_norm"](x)
    record.gaps |= cuts.gaps("_mtp")
    record.tensors |= {"mtp.hidden": hidden, "mtp.logits": model.lm_head(hidden)}


def record_image(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    picture: Tensor,
) -> None:
    """Record one picture inside a prompt, and how far step by step lies from one prefill."""
    media = _prepare(Glm5NextImageProcessorPil(), [picture])
    (count,) = media.num_tokens()
    ids = _encode(tokenizer, f"see {_image_text(count)} what is it?")
    inputs = {"pixel_values": media.pixel_values, "image_grid_thw": media.grid_thw}
    logits = _run(record, model, "image", ids, inputs)
    record.notes["image_prefill_vs_step"] = _step_difference(model, ids, logits, inputs, 4)
    record.tensors |= {"image.rgb": picture, "image.ids": ids, "image.logits": logits}
    _keep_media(record, model, "image", media, model.model.get_image_features)


def record_images(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pictures: list[Tensor],
) -> None:
    """Record two pictures of odd sizes in one prompt."""
    media = _prepare(Glm5NextImageProcessorPil(), pictures)
    first, second = media.num_tokens()
    ids = _encode(tokenizer, f"{_image_text(first)} or {_image_text(second)}?")
    inputs = {"pixel_values": media.pixel_values, "image_grid_thw": media.grid_thw}
    logits = _run(record, model, "images", ids, inputs)
    record.tensors |= {"images.ids": ids, "images.logits": logits}
    for i, picture in enumerate(pictures):
        record.tensors[f"images.rgb.{i}"] = picture
    _keep_media(record, model, "images", media, model.model.get_image_features)


def record_video(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    frames: Tensor,
) -> None:
    """Record a clip of six frames, two frames a second, none of which needs resizing."""
    media = _prepare_clip(frames)
    ids = _encode(tokenizer, f"watch {_clip_text(media)} now")
    inputs = {"pixel_values_videos": media.pixel_values, "video_grid_thw": media.grid_thw}
    logits = _run(record, model, "video", ids, inputs)
    record.notes["video_fps"] = VIDEO_FPS
    record.tensors |= {"video.rgb": frames, "video.ids": ids, "video.logits": logits}
    _keep_media(record, model, "video", media, model.model.get_video_features)


def record_mixed(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Record a picture, the clip and another picture in one prompt, from the media above."""
    pictures = _recorded(record, "images")
    clip = _recorded(record, "video")
    first, second = pictures.num_tokens()
    text = f"{_image_text(first)}then{_clip_text(clip)}then{_image_text(second)}."
    ids = _encode(tokenizer, text)
    inputs = {
        "pixel_values": pictures.pixel_values,
        "image_grid_thw": pictures.grid_thw,
        "pixel_values_videos": clip.pixel_values,
        "video_grid_thw": clip.grid_thw,
    }
    logits = _run(record, model, "mixed", ids, inputs)
    record.tensors |= {"mixed.ids": ids, "mixed.logits": logits}


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _keep_output(kept: dict[str, Tensor], key: str) -> Any:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        kept[key] = output

    return hook


def _run(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    name: str,
    ids: Tensor,
    inputs: dict[str, Tensor],
) -> Tensor:
    with CutMargins() as cuts:
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    record.gaps |= cuts.gaps(f"_{name}")
    return logits


def _greedy(model: Glm5NextForConditionalGeneration, ids: Tensor, steps: int) -> Tensor:
    """Return `steps` greedy tokens, decoded with a cache."""
    out = model(input_ids=ids, use_cache=True)
    tokens = [out.logits[:, -1].argmax(-1, keepdim=True)]
    for _ in range(steps - 1):
        out = model(input_ids=tokens[-1], cache=out.cache, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def _step_difference(
    model: Glm5NextForConditionalGeneration,
    ids: Tensor,
    logits: Tensor,
    inputs: dict[str, Tensor],
    stepped: int = STEPPED_TOKENS,
) -> float:
    """Return how far the last `stepped` rows move when they are decoded one by one."""
    start = max(1, ids.shape[1] - stepped)
    out = model(input_ids=ids[:, :start], use_cache=True, **inputs)
    rows = [out.logits[:, -1:]]
    for i in range(start, ids.shape[1]):
        out = model(input_ids=ids[:, i : i + 1], cache=out.cache, use_cache=True)
        rows.append(out.logits)
    return float((torch.cat(rows, dim=1) - logits[:, start - 1 :]).abs().max())


def _prepare(processor: Glm5NextImageProcessorPil, pictures: list[Tensor]) -> Media:
    """Run the reference image processor on [3, height, width] pictures of 8 bits."""
    batch = processor(
        images=[picture.numpy() for picture in pictures],
        return_tensors="pt",
        input_data_format="channels_first",
    )
    return Media(batch["pixel_values"].float(), batch["image_grid_thw"])


def _prepare_clip(frames: Tensor) -> Media:
    """Assemble clip rows from the reference image processor, frame by frame.

    The reference video processor needs torchvision. Its steps differ from the image processor's in
    the budget, which covers the whole clip, and in the two temporal slots of a patch, which hold a
    frame and its successor. For a clip inside the budget (asserted) no frame is resized.
    """
    count, _, height, width = frames.shape
    assert count % 2 == 0 and count * height * width >= 16 * 2 * 28 * 28
    media = _prepare(Glm5NextImageProcessorPil(min_image_tokens=1), list(frames))
    rows = media.pixel_values.view(count, -1, 3, 2, 14, 14)
    paired = torch.stack([rows[0::2, :, :, 0], rows[1::2, :, :, 1]], dim=3)
    _, patches_down, patches_across = media.grid_thw[0].tolist()
    grid = torch.tensor([[count // 2, patches_down, patches_across]])
    return Media(paired.reshape(-1, 3 * 2 * 14 * 14), grid)


def _image_text(count: int) -> str:
    return "<|begin_of_image|>" + "<|image|>" * count + "<|end_of_image|>"


def _clip_text(media: Media) -> str:
    """Write a clip as its temporal patches, each followed by the time of its first frame."""
    pairs = int(media.grid_thw[0, 0])
    count = media.num_tokens()[0] // pairs
    parts = [f"{_image_text(count)}{2 * pair / VIDEO_FPS:.1f} seconds" for pair in range(pairs)]
    return "<|begin_of_video|>" + "".join(parts) + "<|end_of_video|>"


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    return torch.tensor([tokenizer(text)["input_ids"]])


def _recorded(record: Record, name: str) -> Media:
    return Media(record.tensors[f"{name}.pixel_values"], record.tensors[f"{name}.grid_thw"])


def _keep_media(
    record: Record,
    model: Glm5NextForConditionalGeneration,
    name: str,
    media: Media,
    features: Any,
) -> None:
    """Keep the rows, the grid and the tower's features of `media` under `name`."""
    rows = features(media.pixel_values, media.grid_thw).pooler_output
    record.tensors |= {
        f"{name}.pixel_values": media.pixel_values,
        f"{name}.grid_thw": media.grid_thw,
        f"{name}.features": torch.cat(rows),
    }
