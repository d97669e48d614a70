"""Writes a trained state as a released-layout checkpoint directory.

Owns tensor names, dtypes, shards, configs, tokenizer files and the chat template. It must not know
training. Invariant: names, shapes and dtypes are those of model.md section 11; a shard stays below
16 MiB; transformers loads the folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.corpus import SPECIAL_TOKENS
from training.shape import NanoShape, text_config, vision_config

SHARD_BYTES = 15 * 2**20
FP32_SUFFIXES = ("_base", "_scale", "A_log", "dt_bias", "e_score_correction_bias")
TOKEN_FIELDS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
ENDINGS = ("<|endoftext|>", "<|user|>", "<|observation|>")
State = dict[str, Tensor]
Named = Iterator[tuple[str, Tensor]]


def kda_tensors(state: State, at: str) -> Named:
    """Yield released names of one KDA mixer; `at` is the prefix of its training names."""
    for part, name in enumerate("qkv"):
        yield f"{name}_proj.weight", state[at + "qkv"][part]
        width = state[at + "conv"].shape[0] // 3
        yield f"{name}_conv1d.weight", state[at + "conv"][part * width : (part + 1) * width, None]
    names = {
        "decay_a": "f_a_proj.weight",
        "decay_b": "f_b_proj.weight",
        "gate_a": "g_a_proj.weight",
        "gate_b": "g_b_proj.weight",
        "beta": "b_proj.weight",
        "out": "o_proj.weight",
        "norm": "o_norm.weight",
        "a_log": "A_log",
        "dt_bias": "dt_bias",
    }
    for mine, released in names.items():
        yield released, state[at + mine]


def mla_tensors(state: State, at: str) -> Named:
    """Yield released names of one MLA mixer with its indexer."""
    names = {
        "q_down": "q_a_proj.weight",
        "q_norm": "q_a_layernorm.weight",
        "q_up": "q_b_proj.weight",
        "kv_down": "kv_a_proj_with_mqa.weight",
        "kv_norm": "kv_a_layernorm.weight",
        "kv_up": "kv_b_proj.weight",
        "out": "o_proj.weight",
        "indexer.query": "indexer.wq_b.weight",
        "indexer.key": "indexer.wk.weight",
        "indexer.key_norm.weight": "indexer.k_norm.weight",
        "indexer.key_norm.bias": "indexer.k_norm.bias",
        "indexer.weight": "indexer.weights_proj.weight",
        "indexer.pool_gate": "indexer.index_kpool_compress_gate",
        "indexer.place": "indexer.index_kpool_compress_ape",
    }
    for mine, released in names.items():
        yield released, state[at + mine]


def ffn_tensors(state: State, at: str) -> Named:
    """Yield released names of one feed-forward; the last slot of a MoE is the shared expert."""
    gate_up, down = state[at + "gate_up"], state[at + "down"]
    routed = at + "router" in state
    for slot in range(len(down)):
        shared = "shared_experts." if slot == len(down) - 1 else f"experts.{slot}."
        prefix = shared if routed else ""
        yield f"{prefix}gate_proj.weight", gate_up[0, slot]
        yield f"{prefix}up_proj.weight", gate_up[1, slot]
        yield f"{prefix}down_proj.weight", down[slot]
    if routed:
        yield "gate.weight", state[at + "router"]
        yield "gate.e_score_correction_bias", state[at + "bias"]


def block_tensors(state: State, at: str) -> Named:
    """Yield released names of one layer, mHC sites included where it has them."""
    yield "input_layernorm.weight", state[at + "norm1"]
    yield "post_attention_layernorm.weight", state[at + "norm2"]
    for site, released in (("site1", "hc_attn"), ("site2", "hc_ffn")):
        for part in ("fn", "base", "scale") if f"{at}{site}.fn" in state else ():
            yield f"{released}_{part}", state[f"{at}{site}.{part}"]
    mixer = mla_tensors if f"{at}mixer.q_down" in state else kda_tensors
    yield from ((f"self_attn.{name}", t) for name, t in mixer(state, at + "mixer."))
    yield from ((f"mlp.{name}", t) for name, t in ffn_tensors(state, at + "ffn."))


def vision_tensors(state: State, shape: NanoShape) -> Named:
    """Yield released names of the vision tower; the still patch weight is halved over the two
    temporal slots.
    """
    size, patch = shape.vision.hidden, shape.vision.patch
    still = state["vision.patch"].view(size, 3, 1, patch, patch) / 2
    yield "patch_embed.proj.weight", still.expand(-1, -1, 2, -1, -1)
    yield "patch_embed.proj.bias", state["vision.patch_bias"]
    for index in range(shape.vision.depth):
        at, to = f"vision.blocks.{index}.", f"blocks.{index}."
        yield to + "norm1.weight", state[at + "norm1"]
        yield to + "norm2.weight", state[at + "norm2"]
        yield to + "attn.q_norm.weight", state[at + "q_norm"]
        yield to + "attn.k_norm.weight", state[at + "k_norm"]
        yield to + "attn.qkv.weight", state[at + "qkv"].flatten(0, 1)
        yield to + "attn.qkv.bias", state[at + "qkv_bias"]
        yield to + "attn.proj.weight", state[at + "out"]
        yield to + "attn.proj.bias", state[at + "out_bias"]
        for part, name in enumerate(("gate_proj", "up_proj")):
            yield f"{to}mlp.{name}.weight", state[at + "gate_up"][part]
            yield f"{to}mlp.{name}.bias", state[at + "gate_up_bias"].chunk(2)[part]
        yield to + "mlp.down_proj.weight", state[at + "down"]
        yield to + "mlp.down_proj.bias", state[at + "down_bias"]
    yield "post_layernorm.weight", state["vision.norm"]
    merge = state["vision.merge"].view(shape.hidden, 2, 2, size).permute(0, 3, 1, 2)
    yield "downsample.weight", merge
    yield "downsample.bias", state["vision.merge_bias"]
    yield "merger.proj.weight", state["vision.proj"]
    yield "merger.post_projection_norm.weight", state["vision.proj_norm.weight"]
    yield "merger.post_projection_norm.bias", state["vision.proj_norm.bias"]
    yield "merger.gate_proj.weight", state["vision.gate_up"][0]
    yield "merger.up_proj.weight", state["vision.gate_up"][1]
    yield "merger.down_proj.weight", state["vision.down"]


def released_tensors(state: State, shape: NanoShape) -> Named:
    """Yield every tensor of the checkpoint under its released name, fp32."""
    text = "model.language_model."
    yield text + "embed_tokens.weight", state["embedding"]
    for layer in range(shape.num_layers):
        for name, tensor in block_tensors(state, f"blocks.{layer}."):
            yield f"{text}layers.{layer}.{name}", tensor
    yield text + "norm.weight", state["norm"]
    draft = f"{text}layers.{shape.num_layers}."
    yield from ((draft + name, t) for name, t in block_tensors(state, "mtp."))
    yield draft + "enorm.weight", state["mtp_embed_norm"]
    yield draft + "hnorm.weight", state["mtp_hidden_norm"]
    yield draft + "shared_head.norm.weight", state["mtp_norm"]
    yield draft + "eh_proj.weight", state["mtp_join"]
    yield from ((f"model.visual.{name}", t) for name, t in vision_tensors(state, shape))
    yield "lm_head.weight", state["head"]


def stored(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in its stored dtype: fp32 for the exponentiated and the biases of choice,
    else bf16.
    """
    dtype = torch.float32 if name.endswith(FP32_SUFFIXES) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous().clone()


def write_weights(out: Path, state: State, shape: NanoShape) -> int:
    """Write the shards and their index, return the number of bytes of all tensors."""
    shards: list[State] = [{}]
    size = total = 0
    for name, tensor in released_tensors(state, shape):
        value = stored(name, tensor)
        num_bytes = value.numel() * value.element_size()
        if size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size, total = size + num_bytes, total + num_bytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", index)
    return total


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write pretty JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_configs(out: Path, shape: NanoShape, tokenizer_file: Path, template: Path) -> None:
    """Write config, generation config, processor config, tokenizer and chat template."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    eos = [ids[name] for name in ENDINGS]
    config = {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **{field: ids[name] for field, name in TOKEN_FIELDS.items()},
        "text_config": text_config(shape, eos),
        "vision_config": vision_config(shape),
    }
    write_json(out / "config.json", config)
    generation = {"eos_token_id": eos, "pad_token_id": eos[0], "do_sample": True}
    write_json(out / "generation_config.json", generation | {"temperature": 1.0, "top_p": 0.95})
    picture = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    processor = {
        "image_processor": {"image_processor_type": "Glm5NextImageProcessor", **picture}
        | {"min_image_tokens": 16, "max_image_tokens": 8000},
        "processor_class": "Glm5NextProcessor",
    }
    write_json(out / "processor_config.json", processor)
    shutil.copyfile(tokenizer_file, out / "tokenizer.json")
    shutil.copyfile(template, out / "chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_048_576,
    }
    write_json(out / "tokenizer_config.json", settings)


def export_checkpoint(
    out: Path, state: State, shape: NanoShape, tokenizer_file: Path, template: Path
) -> int:
    """Write the whole checkpoint directory and return the bytes of its tensors; existing shards are
    removed first.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    write_configs(out, shape, tokenizer_file, template)
    return write_weights(out, state, shape)
