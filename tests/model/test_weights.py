"""Checkpoint loading: every stored tensor accounted for, damage refused by name, memory near the
stored size.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oxplow.errors import ConfigError, OxplowError, WeightError
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.weights import Checkpoint
from tests.drive import Driver
from tests.model.build import our_model, our_table

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(glm_oracle, tmp_path: Path) -> Path:
    target = tmp_path / "checkpoint"
    shutil.copytree(glm_oracle(seed=0, fp8=True), target)
    return target


def edit(directory: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the shard that holds `name`, and the index, after `change` touched the shard's
    tensors.
    """
    index = json.loads((directory / INDEX).read_text())
    shard = index["weight_map"][name]
    tensors = load_file(directory / shard)
    change(tensors)
    save_file(tensors, directory / shard)
    kept = {k: v for k, v in index["weight_map"].items() if v != shard}
    index["weight_map"] = kept | dict.fromkeys(tensors, shard)
    (directory / INDEX).write_text(json.dumps(index))


def set_config(directory: Path, section: str | None, **values: object) -> None:
    """Change fields of config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    (config if section is None else config[section]).update(values)
    path.write_text(json.dumps(config))


EXPERT = "model.language_model.layers.4.mlp.experts.3.up_proj.weight"
Q_A = "model.language_model.layers.3.self_attn.q_a_proj.weight"


def refuse(directory: Path, kind: type[OxplowError], *told: str) -> None:
    """Assert that loading fails with `kind` and that the message tells all of `told`."""
    with pytest.raises(kind) as caught:
        our_model(directory)
    for part in told:
        assert part in str(caught.value), f"{part!r} not in {caught.value}"


def test_an_unknown_tensor_is_refused(copy: Path) -> None:
    edit(
        copy,
        Q_A,
        lambda t: t.update(
            {"model.language_model.layers.3.self_attn.rotary.inv_freq": torch.zeros(4)}
        ),
    )
    refuse(copy, WeightError, "rotary.inv_freq")


def test_a_missing_tensor_is_refused(copy: Path) -> None:
    edit(copy, EXPERT, lambda t: t.pop(EXPERT))
    refuse(copy, WeightError, EXPERT, "missing")


def test_a_missing_scale_is_refused(copy: Path) -> None:
    edit(copy, f"{Q_A}_scale_inv", lambda t: t.pop(f"{Q_A}_scale_inv"))
    refuse(copy, WeightError, f"{Q_A}_scale_inv", "FP8")


def test_a_wrong_shape_is_refused_with_got_and_wanted(copy: Path) -> None:
    edit(copy, Q_A, lambda t: t.update({Q_A: t[Q_A][:40].clone()}))
    refuse(copy, WeightError, Q_A, "(40, 128)", "(48, 128)")


def test_a_wrong_scale_grid_is_refused(copy: Path) -> None:
    name = f"{Q_A}_scale_inv"
    edit(copy, name, lambda t: t.update({name: torch.ones(2, 2)}))
    refuse(copy, WeightError, name, "(2, 2)", "(1, 1)")


def test_a_scale_without_codes_is_refused(copy: Path) -> None:
    edit(copy, Q_A, lambda t: t.update({Q_A: t[Q_A].float()}))
    refuse(copy, WeightError, Q_A, "not FP8")


@pytest.mark.parametrize("name", [Q_A, EXPERT])
def test_nan_codes_are_refused(copy: Path, name: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.uint8)[3, 5] = 0xFF

    edit(copy, name, spoil)
    refuse(copy, WeightError, name, "NaN")


def test_mixed_formats_among_experts_are_refused(copy: Path) -> None:
    edit(copy, EXPERT, lambda t: t.update({EXPERT: t[EXPERT].float()}))
    edit(copy, f"{EXPERT}_scale_inv", lambda t: t.pop(f"{EXPERT}_scale_inv"))
    refuse(copy, WeightError, "mixed")


def test_a_truncated_shard_is_refused(copy: Path) -> None:
    shard = copy / json.loads((copy / INDEX).read_text())["weight_map"][Q_A]
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse(copy, WeightError, shard.name)


def test_a_shard_outside_the_directory_is_refused(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"][Q_A] = "../elsewhere.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    refuse(copy, WeightError, "../elsewhere.safetensors")


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        (None, {"model_type": "llama"}, "llama"),
        ("text_config", {"qk_rope_head_dim": 64}, "qk_rope_head_dim"),
        ("text_config", {"n_group": 8}, "n_group"),
        ("text_config", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("text_config", {"hidden_size": "128"}, "hidden_size"),
        ("text_config", {"index_topk": 18}, "index_topk"),
        ("text_config", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("text_config", {"indexer_types": ["full"] * 7 + ["shared"]}, "indexer_types"),
        ("text_config", {"index_topk_pattern": "FSFFFFFF"}, "index_topk_pattern"),
        ("text_config", {"index_topk_freq": 4}, "index_topk_freq"),
        ("text_config", {"linear_attn_config": {"safe_gate": False}}, "safe_gate"),
        ("text_config", {"eos_token_id": "end"}, "eos_token_id"),
        (None, {"image_token_id": [[]]}, "image_token_id"),
        (None, {"model_type": ["glm5_next"]}, "model_type"),
        (None, {"quantization_config": {"quant_method": "awq"}}, "awq"),
        (None, {"quantization_config": [1]}, "quantisation"),
    ],
)
def test_an_unsupported_config_is_refused_by_field(
    copy: Path, section: str | None, values: dict, told: str
) -> None:
    set_config(copy, section, **values)
    refuse(copy, ConfigError, told)


def test_a_missing_directory_and_config_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", WeightError, "config.json")
    (tmp_path / "config.json").write_text("[1")
    refuse(tmp_path, WeightError, "parse")
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xdd"}')
    refuse(tmp_path, WeightError, "parse")
    (tmp_path / "config.json").write_text("[" * 100_000)
    refuse(tmp_path, WeightError, "parse")


def test_weight_and_scale_may_sit_in_one_shard_or_two(copy: Path) -> None:
    logits, shards = [], []
    name = f"{Q_A}_scale_inv"
    for home in (Q_A, "lm_head.weight"):
        moved: dict[str, torch.Tensor] = {}
        edit(copy, name, lambda t, moved=moved: moved.update({name: t.pop(name)}))
        edit(copy, home, lambda t, moved=moved: t.update(moved))
        index = json.loads((copy / INDEX).read_text())["weight_map"]
        shards.append(index[name] == index[Q_A])
        logits.append(Driver(our_model(copy)).step({"a": list(range(40))})["a"])
    assert shards == [True, False]
    assert torch.equal(*logits)


def test_fp8_weights_stay_one_byte(copy: Path) -> None:
    model = our_model(copy)
    assert model.layers[4].ffn._gate_up.values.dtype is torch.float8_e4m3fn
    assert model.layers[3].mixer._mla._query.weight.values.dtype is torch.float8_e4m3fn


def test_towers_can_be_left_out(copy: Path) -> None:
    model = load_model(copy, our_table(), LoadOptions(with_vision=False, with_draft=False))
    assert model.vision is None
    assert model.draft_block is None
    with pytest.raises(ConfigError, match="no vision tower"):
        model.encode(torch.zeros(4, 1176), torch.tensor([[1, 2, 2]]))


def test_progress_ends_at_the_stored_size(copy: Path) -> None:
    told: list[tuple[int, int]] = []
    load_model(copy, our_table(), progress=lambda done, total: told.append((done, total)))
    assert [d for d, _ in told] == sorted(d for d, _ in told)
    assert told[-1][0] == told[-1][1] == Checkpoint(copy).total_bytes


def test_a_flat_text_only_config_loads(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    flat = config["text_config"] | {"quantization_config": config["quantization_config"]}
    (copy / "config.json").write_text(json.dumps(flat))
    index = json.loads((copy / INDEX).read_text())["weight_map"]
    shards = {s for n, s in index.items() if n.startswith("model.visual.")}
    for shard in shards:
        first = next(n for n, s in index.items() if s == shard)
        edit(copy, first, lambda t: [t.pop(n) for n in list(t) if n.startswith("model.visual.")])
    assert our_model(copy).vision is None


PEAK = """
import resource, sys
from pathlib import Path
from tests.model.build import our_table
from oxplow.model.load import load_model
from oxplow.model.weights import Checkpoint
table = our_table()
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
before = status("VmRSS")
model = load_model(Path(sys.argv[1]), table)
print(status("VmHWM") - before, Checkpoint(Path(sys.argv[1])).total_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
def test_peak_memory_stays_near_the_stored_size(glm_oracle, tmp_path: Path) -> None:
    directory = widened(glm_oracle(seed=0), tmp_path / "wide")
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(directory)], capture_output=True, text=True, check=True
    )
    peak, stored = map(int, out.stdout.split())
    assert stored > 200 * 2**20
    # One expert stack is copied at a time; everything else stays mapped. 15% covers one
    # shard's pages.
    assert peak <= 1.15 * stored + 32 * 2**20, (
        f"peak {peak >> 20} MiB for {stored >> 20} MiB stored"
    )


def widened(source: Path, target: Path, width: int = 1024, experts: int = 24) -> Path:
    """Write the tiny checkpoint again with many wide experts (zeros), so that memory is worth
    measuring.
    """
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["text_config"] |= {"moe_intermediate_size": width, "n_routed_experts": experts}
    (target / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    stored = json.loads((source / INDEX).read_text())["weight_map"]
    for shard in sorted(set(stored.values())):
        tensors = {}
        for name, value in load_file(source / shard).items():
            expert = re.search(r"mlp\.(experts\.\d+|shared_experts)\.(\w+)_proj", name)
            if expert:
                shape = (value.shape[0], width) if expert[2] == "down" else (width, value.shape[1])
                value = torch.zeros(shape)
            if re.search(r"mlp\.gate\.(weight|e_score)", name):
                value = torch.zeros(experts, *value.shape[1:])
            tensors[name] = value
            if ".experts.0." in name:
                for e in range(8, experts):
                    tensors[name.replace(".experts.0.", f".experts.{e}.")] = torch.zeros_like(value)
        save_file(tensors, target / shard)
        index |= dict.fromkeys(tensors, shard)
    (target / INDEX).write_text(json.dumps({"weight_map": index}))
    return target
