"""The oracles themselves: directories reload to the same numbers, and near-ties are seen."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.oracles.fp8 import dequantise, quantise, round_to_fp8
from tests.oracles.margins import CutMargins, near_ties
from tests.oracles.reading import Oracle, open_oracle

pytestmark = pytest.mark.oracle


def weight_map(directory: Path) -> dict[str, str]:
    """Return which shard holds which tensor."""
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


def assert_index_is_true(directory: Path) -> None:
    """Compare the index with what the shards hold."""
    named = weight_map(directory)
    held = {}
    for shard in sorted(directory.glob("model-*.safetensors")):
        with safe_open(shard, "pt") as file:
            held |= dict.fromkeys(file.keys(), shard.name)
    assert held == named
    assert len(set(named.values())) > 1


def logits(loader: Any, directory: Path, prompt: str, **inputs: torch.Tensor) -> torch.Tensor:
    """Load a directory in transformers and run one prompt of its reference."""
    model, report = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        ids = open_oracle(directory).tensor(f"{prompt}.ids")
        return model.eval()(input_ids=ids, use_cache=False, **inputs).logits


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_glm_directory_reloads_to_its_reference(glm_oracle: Any, fp8: bool) -> None:
    from transformers import Glm5NextForConditionalGeneration

    directory = glm_oracle(seed=0, fp8=fp8)
    assert_index_is_true(directory)
    oracle = open_oracle(directory)
    media = {
        "pixel_values": oracle.tensor("images.pixel_values"),
        "image_grid_thw": oracle.tensor("images.grid_thw"),
        "pixel_values_videos": oracle.tensor("video.pixel_values"),
        "video_grid_thw": oracle.tensor("video.grid_thw"),
    }
    again = logits(Glm5NextForConditionalGeneration, directory, "mixed", **media)
    assert torch.equal(again, oracle.tensor("mixed.logits"))


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
def test_kimi_directory_reloads_to_its_reference(kimi_oracle: Any) -> None:
    from transformers import KimiLinearForCausalLM

    directory = kimi_oracle(seed=0)
    assert_index_is_true(directory)
    again = logits(KimiLinearForCausalLM, directory, "text")
    assert torch.equal(again, open_oracle(directory).tensor("text.logits"))


def test_kimi_names_are_the_released_ones(kimi_oracle: Any) -> None:
    names = set(weight_map(kimi_oracle(seed=0)))
    layer = "model.layers.{}.{}".format
    # The dense layer keeps `mlp`; a mixture is `block_sparse_moe` with w1, w2, w3.
    assert layer(0, "mlp.gate_proj.weight") in names
    assert not any(".mlp." in name for name in names if not name.startswith("model.layers.0."))
    moe = "block_sparse_moe.experts.7.{}.weight".format
    assert {layer(6, moe(w)) for w in ("w1", "w2", "w3")} <= names
    assert layer(1, "block_sparse_moe.gate.e_score_correction_bias") in names
    kda = ("q_conv1d.weight", "A_log", "dt_bias", "f_a_proj.weight", "g_b_proj.weight")
    assert {layer(2, f"self_attn.{name}") for name in kda} <= names
    assert layer(3, "self_attn.kv_a_proj_with_mqa.weight") in names


@pytest.mark.slow
def test_scales_lie_beside_their_weights_and_apart_from_them(glm_oracle: Any) -> None:
    shards = weight_map(glm_oracle(seed=0, fp8=True, ragged=True))
    pairs = [
        shards[name] == shards[name + "_scale_inv"]
        for name in shards
        if name + "_scale_inv" in shards
    ]
    assert any(pairs) and not all(pairs)


@pytest.mark.slow
def test_ragged_weights_reload_to_what_the_reference_ran_on(glm_oracle: Any) -> None:
    directory = glm_oracle(seed=0, fp8=True, ragged=True)
    shards = weight_map(directory)
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    with safe_open(directory / shards[name], "pt") as file:
        codes = file.get_tensor(name)
    with safe_open(directory / shards[name + "_scale_inv"], "pt") as file:
        scales = file.get_tensor(name + "_scale_inv")
    assert codes.shape == (128, 328) and scales.shape == (1, 3)
    value = dequantise(codes, scales)
    assert torch.equal(round_to_fp8(value), value)


def test_fp8_blocks_are_a_fixed_point_and_close() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    assert scales.shape == (2, 3) and scales.dtype == torch.float32
    value = dequantise(codes, scales)
    again_codes, again_scales = quantise(value)
    assert torch.equal(dequantise(again_codes, again_scales), value)
    # Three bits of mantissa: half a step of 2^-3, relative; below 2^-6 * scale it is absolute.
    assert ((value - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-10).all()


@pytest.mark.parametrize("take", [torch.topk, torch.Tensor.topk])
def test_both_spellings_of_topk_are_watched(take: Any) -> None:
    hidden = torch.finfo(torch.float32).min
    router = torch.tensor([[0.9, 0.5, 0.4], [0.9, 0.8, 0.7999]])
    index = torch.tensor([[[3.0, 1.0, hidden], [3.0, 2.0, 1.0]]])
    with CutMargins() as cuts:
        values = take(router, 2).values
        take(index, 2)
        take(router.view(2, 1, 3), 2)
    assert torch.equal(values, router.topk(2).values)
    assert cuts.gaps("_x") == pytest.approx(
        {"min_cut_gap_x": 1.0, "min_router_gap_x": 1e-4}, rel=1e-3
    )


def test_near_ties_are_named() -> None:
    gaps = {"min_cut_gap": 9e-6, "min_router_gap": 9e-6, "min_greedy_gap": float("nan")}
    found = near_ties(gaps)
    assert [text.split(" ")[0] for text in found] == ["min_cut_gap", "min_greedy_gap"]


@pytest.mark.slow
def test_named_directories_replace_the_default_seeds(kimi_oracle: Any, tmp_path: Path) -> None:
    given = kimi_oracle(seed=0)
    (tmp_path / "test_it.py").write_text(
        "def test_it(kimi_directory):\n    print('reads', kimi_directory.directory)\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-q", "--rootdir", str(tmp_path)]
    command += ["-p", "tests.oracles.fixtures", "-p", "no:cacheprovider"]
    command += ["--oracle", str(given), str(tmp_path / "test_it.py")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"reads {given}") == 1 and "1 passed" in done.stdout


def test_missing_reference_tensors_are_named(kimi_oracle: Any) -> None:
    oracle: Oracle = open_oracle(kimi_oracle(seed=0))
    assert oracle.has("text.ids", "text.logits") and not oracle.has("text.ids", "mtp.logits")
    with pytest.raises(KeyError, match=r"mtp\.logits"):
        oracle.tensor("mtp.logits")
