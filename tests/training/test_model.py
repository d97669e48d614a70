"""The training form equals transformers on the exported weights; sizes keep their bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import Glm5NextForConditionalGeneration

from training.export import export_checkpoint, released_tensors, stored
from training.kernels import KdaInputs, cpu_backend, recurrent_kda
from training.layers import Pass
from training.load import load_checkpoint
from training.model import Nano, count_parameters
from training.shape import NanoShape, VisionShape
from training.vision import MAX_PATCHES, Pictures, patch_places

NANO = Path(__file__).parents[2] / "oxplow" / "models" / "nano"
TEMPLATE = Path(__file__).parents[2] / "training" / "chat_template.jinja"
MIB = 2**20
TINY = NanoShape(
    hidden=64,
    num_layers=4,
    num_heads=2,
    kda_head_dim=16,
    qk_head_dim=16,
    v_head_dim=32,
    q_rank=32,
    kv_rank=16,
    index_dim=16,
    index_topk=16,
    num_experts=6,
    experts_per_token=2,
    expert_intermediate=16,
    dense_intermediate=96,
    swiglu_limit=10.0,
    vision=VisionShape(depth=2, hidden=32, num_heads=2, intermediate=48, projection=40),
)


def seeded_model(shape: NanoShape) -> Nano:
    """Return a model of random values everywhere, rounded to what a checkpoint stores."""
    torch.manual_seed(0)
    model = Nano(shape, cpu_backend()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if not name.endswith((".base", ".scale", "a_log", "dt_bias")):
                halves = 2 if name == "vision.patch" else 1
                parameter.copy_((parameter / halves).bfloat16().float() * halves)
        for layer in model.routed():
            layer.bias.copy_(0.1 * torch.randn_like(layer.bias))
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Nano, Glm5NextForConditionalGeneration]:
    """Return a tiny model and transformers' reading of its export."""
    model = seeded_model(TINY)
    folder = tmp_path_factory.mktemp("tiny")
    export_checkpoint(folder, model.state_dict(), TINY, NANO / "tokenizer.json", TEMPLATE)
    theirs, report = Glm5NextForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    draft = f"model.language_model.layers.{TINY.num_layers}."
    assert all(name.startswith(draft) for name in report["unexpected_keys"])
    return model, theirs.eval()


@torch.no_grad()
def test_text_logits_equal_transformers(pair) -> None:
    model, theirs = pair
    ids = torch.randint(0, TINY.vocab, (1, 97), generator=torch.Generator().manual_seed(4))
    ours = model.logits(model(ids, Pass(1, 96, sparse=True))[0])
    reference = theirs(input_ids=ids[:, :96], use_cache=False).logits[0]
    assert (ours - reference).abs().max() < 1e-4
    dense = model.logits(model(ids, Pass(1, 96, sparse=False))[0])
    assert (dense - reference).abs().max() > 1e-3, "selection was never at work"


@torch.no_grad()
@pytest.mark.parametrize("grid", [(4, 4), (3, 6), (8, 2)])
def test_picture_features_equal_transformers(pair, grid: tuple[int, int]) -> None:
    model, theirs = pair
    rows, cols = grid
    count = 4 * rows * cols
    still = torch.randn(count, 3, 1, 14, 14, generator=torch.Generator().manual_seed(5))
    twice = still.expand(-1, -1, 2, -1, -1).reshape(count, -1)
    where = torch.tensor([[1, 2 * rows, 2 * cols]])
    reference = theirs.model.get_image_features(pixel_values=twice, image_grid_thw=where)
    slots = torch.full((2, MAX_PATCHES, 588), 7.0)  # the padding holds values on purpose
    slots[0, :count] = still.reshape(count, 588)
    pictures = Pictures(slots, *patch_places(torch.tensor([[rows, cols], [6, 6]])))
    ours = model.vision(pictures)[0, : rows * cols]
    assert (ours - reference.pooler_output[0]).abs().max() < 1e-4


@torch.no_grad()
def test_a_checkpoint_survives_reading_and_writing(tmp_path: Path) -> None:
    model = seeded_model(TINY)
    export_checkpoint(tmp_path, model.state_dict(), TINY, NANO / "tokenizer.json", TEMPLATE)
    again = Nano(TINY, cpu_backend())
    load_checkpoint(again, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_kda_forgets_and_corrects() -> None:
    """One key written twice with beta near 1 reads back the second value; full decay erases it."""
    key = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    value = torch.tensor([[[[1.0, 2.0]], [[5.0, -3.0]], [[0.0, 0.0]]]])
    beta = torch.tensor([[[50.0], [50.0], [-50.0]]])
    keep = torch.full((1, 3, 1, 2), -50.0)
    inputs = KdaInputs(key, key, value, keep, beta, torch.zeros(1), torch.zeros(2))
    read = recurrent_kda(inputs)[0, 2, 0] * 2**0.5
    assert torch.allclose(read, torch.tensor([5.0, -3.0]), atol=1e-4)
    erase = keep.clone()
    erase[:, 2] = 50.0
    gone = recurrent_kda(KdaInputs(key, key, value, erase, beta, torch.zeros(1), torch.zeros(2)))
    assert gone[0, 2, 0].abs().max() < 0.05


def test_the_shipped_sizes_keep_their_bounds() -> None:
    shape = NanoShape()
    model = Nano(shape, cpu_backend())
    tensors = [stored(name, t) for name, t in released_tensors(model.state_dict(), shape)]
    assert count_parameters(model) <= 22_000_000
    assert sum(t.numel() * t.element_size() for t in tensors) <= 42 * MIB
    assert shape.num_heads % 8 == 0
    for dim in (shape.kda_head_dim, shape.qk_head_dim, shape.v_head_dim, shape.index_dim):
        assert dim & (dim - 1) == 0


def test_the_shipped_files_are_this_shape() -> None:
    index = json.loads((NANO / "model.safetensors.index.json").read_text())["weight_map"]
    model = Nano(NanoShape(), cpu_backend())
    wanted = dict(released_tensors(model.state_dict(), NanoShape()))
    assert set(index) == set(wanted)
    for file in sorted(set(index.values())):
        assert (NANO / file).stat().st_size < 16 * MIB
        with safe_open(NANO / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  a safetensors handle is no mapping
                assert tuple(shard.get_slice(name).get_shape()) == tuple(wanted[name].shape), name
    config = json.loads((NANO / "config.json").read_text())
    assert config["text_config"]["max_position_embeddings"] == 1_048_576
    assert config["text_config"]["hc_sinkhorn_iters"] == 20
