"""The bundled nano model: our logits against transformers' on its own weights, and its limits.

Held-out text and picture prompts, in float32. Skipped while the checkpoint is not bundled.
A prompt where an expert or a pool wins by less than rounding (`margins.near_ties`) says nothing:
either choice is right there, so the next prompt is taken.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import oxplow
from oxplow.feedback.exam import build_pictures, read_held_out
from oxplow.model.network import HybridModel
from oxplow.model.step import Embeds
from oxplow.serve.images import prepare_image
from oxplow.serve.model_files import read_model_files
from oxplow.serve.placeholders import expand_placeholders
from oxplow.serve.text import load_text
from tests.drive import Driver
from tests.model.build import our_model
from tests.oracles.margins import CutMargins, near_ties

if TYPE_CHECKING:
    from transformers import Glm5NextForConditionalGeneration

NANO = Path(oxplow.__file__).parent / "models" / "nano"
LOGITS = 1e-3
NUM_TOKENS = 512
PROMPTS = 12
MIB = 2**20

pytestmark = pytest.mark.skipif(
    not (NANO / "config.json").exists(), reason="the nano checkpoint is not bundled yet"
)


@pytest.fixture(scope="module")
def model() -> HybridModel:
    return our_model(NANO)


@pytest.fixture(scope="module")
def peer() -> Glm5NextForConditionalGeneration:
    from transformers import Glm5NextForConditionalGeneration

    return Glm5NextForConditionalGeneration.from_pretrained(NANO, dtype=torch.float32).eval()


def gap(got: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference after checking shapes and that there is a signal."""
    assert got.shape == wanted.shape
    assert float(wanted.std()) > 0.5
    return float((got - wanted).abs().max())


def judge(ids: list[int], peer: Glm5NextForConditionalGeneration, **media: Tensor) -> Tensor | None:
    """Return transformers' logits [tokens, vocabulary], None where a choice is nearly tied."""
    with torch.no_grad(), CutMargins() as cuts:
        logits = peer(input_ids=torch.tensor([ids]), use_cache=False, **media).logits[0]
    return None if near_ties(cuts.gaps("")) else logits


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["code", "prose"])
def test_logits_on_held_out_text_equal_those_of_transformers(
    kind: str, model: HybridModel, peer: Glm5NextForConditionalGeneration
) -> None:
    text, encode = read_held_out()[kind], load_text(NANO).vocabulary.encode_plain
    for start in range(0, PROMPTS * 5000, 5000):
        ids = encode(text[start : start + 5000])[:NUM_TOKENS]
        assert len(ids) == NUM_TOKENS > model.spec.text.index.dense_limit  # selection is at work
        wanted = judge(ids, peer)
        if wanted is not None:
            assert gap(Driver(model).step({"a": ids})["a"], wanted) <= LOGITS
            return
    pytest.fail(f"each of {PROMPTS} stretches has a near tie")


@pytest.mark.oracle
def test_logits_on_a_picture_prompt_equal_those_of_transformers(
    model: HybridModel, peer: Glm5NextForConditionalGeneration
) -> None:
    files, text = read_model_files(NANO), load_text(NANO)
    assert files.media is not None
    for item in build_pictures(PROMPTS):
        picture = prepare_image(item.image, files.image)
        content = [{"type": "image"}, {"type": "text", "text": item.question}]
        options = {"enable_thinking": False}
        rendered = text.render([{"role": "user", "content": content}], options=options)
        prompt = expand_placeholders(
            text.encode(rendered), [picture], [], files.media, text.vocabulary.encode_plain
        )
        pixels, grid = torch.from_numpy(picture.pixel_values), torch.tensor([picture.grid_thw])
        wanted = judge(prompt.token_ids, peer, pixel_values=pixels, image_grid_thw=grid)
        if wanted is not None:
            rows = (torch.tensor(prompt.token_ids) == files.media.image).nonzero()[:, 0]
            embeds = Embeds(rows=rows, values=model.encode(pixels, grid))
            logits = Driver(model).step({"a": prompt.token_ids}, embeds=embeds)["a"]
            assert gap(logits, wanted) <= LOGITS
            return
    pytest.fail(f"each of {PROMPTS} picture prompts has a near tie")


def num_values(shard: Path) -> int:
    """Count the numbers of a shard without reading them."""
    with safe_open(shard, "pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in list(file.keys()))


def test_checkpoint_keeps_its_size_and_shape() -> None:
    shards = sorted(NANO.glob("*.safetensors"))
    assert shards and all(shard.stat().st_size < 16 * MIB for shard in shards)
    assert sum(shard.stat().st_size for shard in shards) <= 42 * MIB
    assert sum(num_values(shard) for shard in shards) <= 22_000_000
    config = json.loads((NANO / "config.json").read_text())["text_config"]
    assert config["max_position_embeddings"] == 1_048_576
    assert (config["hc_mult"], config["hc_sinkhorn_iters"], config["index_kpool"]) == (4, 20, 4)
    assert config["num_attention_heads"] % 8 == 0
    assert config["num_nextn_predict_layers"] == 1
