"""Build a tiny random GLM-5.3-Flash (`glm5_next`) checkpoint and its reference activations.

    python -m tests.oracles.glm5_next OUT [--seed N] [--fp8] [--ragged] [--steps 64] [--len 193]

Owns the tiny configuration, the random weights and the files; `glm5_next_reference` runs the model.
Must not know Oxplow. The random numbers are drawn in the order of the model's parameters, so a seed
names the same weights wherever torch's CPU generator is the same.
Invariant: tensor names and config layout are the released ones; with FP8 the reference runs on the
very numbers that the files hold.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
from transformers.models.glm5_next.modeling_glm5_next import (
    Glm5NextTextDecoderLayer,
    Glm5NextTextRMSNorm,
)
from transformers.utils import logging as transformers_logging

from tests.oracles import glm5_next_reference as reference
from tests.oracles.fp8 import BLOCK, quantise, round_to_fp8
from tests.oracles.margins import near_ties
from tests.oracles.writing import (
    byte_tokenizer,
    take_shards,
    write_json,
    write_reference,
    write_shards,
)

NUM_LAYERS = 8
MLA_LAYERS = (3, 7)
KDA_LAYERS = tuple(i for i in range(NUM_LAYERS) if i not in MLA_LAYERS)
HIDDEN = 128
SHARD_BYTES = 2_000_000

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|image|>",
    "<|video|>",
]
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
MARKERS = {
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}
CHAT_TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
# Stored as FP8 blocks: MLA projections without kv_b, and every MLP. Never KDA, indexer or vision.
FP8_PROJECTIONS = [
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]

__all__ = ["Glm5NextOracle", "build", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm5NextOracle:
    """Say what to build: the seed, the stored format, and the length of the text and its tail.

    `ragged` gives two FP8 matrices a side above 128 that is no multiple of 128; transformers cannot
    load such a directory as FP8, so its reference comes from the rounded weights only.
    """

    seed: int = 0
    fp8: bool = False
    ragged: bool = False
    steps: int = 64
    length: int = 193


def text_config(plan: Glm5NextOracle, eos_ids: list[int]) -> dict[str, object]:
    """Return `text_config` in the released layout."""
    return {
        "vocab_size": 320,
        "hidden_size": HIDDEN,
        "intermediate_size": 328 if plan.ragged else 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 136 if plan.ragged else 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 0,
        "v_head_dim": 64,
        "mla_use_nope": True,
        "index_topk": 16,
        "index_kpool": 4,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 1.0,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (NUM_LAYERS - 3),
        "layer_types": [
            "deepseek_sparse_attention" if i in MLA_LAYERS else "linear_attention"
            for i in range(NUM_LAYERS)
        ],
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": list(KDA_LAYERS),
            "full_attn_layers": list(MLA_LAYERS),
        },
        "mhc": True,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "eos_token_id": eos_ids,
        "pad_token_id": eos_ids[0],
    }


def vision_config() -> dict[str, object]:
    """Return `vision_config`: two blocks, four heads of 16."""
    return {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "out_hidden_size": HIDDEN,
        "projection_intermediate_size": 160,
        "swiglu_limit": 1.0,
    }


def processor_config() -> dict[str, object]:
    """Return `processor_config.json`: the released budgets for pictures and clips."""
    shared = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_image_tokens": 16}
    return {
        "processor_class": "Glm5NextProcessor",
        "image_processor": {
            "image_processor_type": "Glm5NextImageProcessor",
            **shared,
            "max_image_tokens": 8000,
        },
        "video_processor": {
            "video_processor_type": "Glm5NextVideoProcessor",
            **shared,
            "max_image_tokens": 240000,
            "fps": 2,
            "max_frames": 2048,
        },
    }


def mtp_block(config: Glm5NextConfig) -> nn.ModuleDict:
    """Return the draft block that transformers leaves out, made of transformers' own parts."""
    norms = {name: Glm5NextTextRMSNorm(HIDDEN, 1e-5) for name in ("enorm", "hnorm", "head_norm")}
    layer = Glm5NextTextDecoderLayer(config.text_config, MLA_LAYERS[0])
    eh_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    return nn.ModuleDict({"block": layer, "eh_proj": eh_proj, **norms}).eval()


def is_stored_fp8(name: str) -> bool:
    """Tell whether the released checkpoint holds the tensor called `name` as FP8 blocks."""
    in_kda = any(f".layers.{i}.self_attn." in name for i in KDA_LAYERS)
    named = any(name.endswith(f".{projection}.weight") for projection in FP8_PROJECTIONS)
    return named and "visual" not in name and not in_kda


def initial_value(name: str, parameter: Tensor, noise: Tensor) -> Tensor:
    """Scale unit noise so that norms, gates, streams and clamps all do visible work."""
    if name.endswith("norm.weight") or "norm1" in name or "norm2" in name:
        return 1 + 0.1 * noise
    if "A_log" in name:
        return 0.3 * noise
    if "dt_bias" in name:
        return noise - 3
    if "hc.scale" in name:
        return 1 + 0.2 * noise
    if parameter.ndim == 1 or name.endswith("_ape"):
        return 0.2 * noise
    if "hc.fn" in name:
        return 0.05 * noise
    if "embed_tokens" in name:
        return noise
    fan_in = parameter[0].numel() if parameter.ndim > 3 else parameter.shape[-1]
    return noise * fan_in**-0.5


def round_stored(name: str, value: Tensor) -> Tensor:
    """Return `value` as it reads after a trip through FP8, fused experts matrix by matrix."""
    if "experts." in name and value.ndim == 3:
        parts = 2 if "gate_up" in name else 1
        return torch.stack(
            [torch.cat([round_to_fp8(m) for m in expert.chunk(parts)]) for expert in value]
        )
    return round_to_fp8(value) if is_stored_fp8(name) else value


@torch.no_grad()
def randomise(model: nn.Module, mtp: nn.Module, generator: torch.Generator, fp8: bool) -> None:
    """Overwrite every parameter and every router bias, in the order in which they are named."""
    for name, parameter in [*model.named_parameters(), *mtp.named_parameters()]:
        noise = torch.randn(parameter.shape, generator=generator)
        value = initial_value(name, parameter, noise)
        parameter.copy_(round_stored(name, value) if fp8 else value)
    for name, buffer in [*model.named_buffers(), *mtp.named_buffers()]:
        if "e_score" in name:
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def released_mtp(mtp: nn.ModuleDict) -> Iterator[tuple[str, Tensor]]:
    """Yield the draft block's tensors under their released names, experts one by one."""
    prefix = f"model.language_model.layers.{NUM_LAYERS}."
    for name, value in mtp.state_dict().items():
        if "_hc." in name:
            continue
        tail = name.replace("block.", "").replace("head_norm", "shared_head.norm")
        if not tail.startswith("mlp.experts."):
            yield prefix + tail, value
            continue
        projections = ("gate_proj", "up_proj") if "gate_up" in tail else ("down_proj",)
        for expert, fused in enumerate(value):
            for projection, part in zip(projections, fused.chunk(len(projections)), strict=True):
                yield f"{prefix}mlp.experts.{expert}.{projection}.weight", part


def write_weights(
    directory: Path,
    model: Glm5NextForConditionalGeneration,
    mtp: nn.ModuleDict,
    fp8: bool,
) -> None:
    """Save all weights; with FP8 every second scale lives in a shard apart from its weight."""
    model.save_pretrained(directory)
    tensors = take_shards(directory) | dict(released_mtp(mtp))
    stored, far_scales = {}, []
    for number, (name, value) in enumerate(sorted(tensors.items())):
        if fp8 and is_stored_fp8(name):
            scale = name + "_scale_inv"
            stored[name], stored[scale] = quantise(value)
            if number % 2:
                far_scales.append(scale)
        else:
            stored[name] = value
    write_shards(directory, stored, SHARD_BYTES, far_scales)


def write_config(directory: Path, text: dict[str, object], fp8: bool) -> None:
    """Turn the config that transformers wrote back into the released layout."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {"model_type": "glm5_next_text", **text}
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    write_json(path, config)
    write_json(directory / "processor_config.json", processor_config())


def build(directory: Path, plan: Glm5NextOracle) -> dict[str, object]:
    """Write one oracle directory and return its notes.

    Restores torch's thread count, its global generator and the logging level of transformers.
    Raises ValueError if the seed comes near a tie.
    """
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            return _build(directory, plan)
    finally:
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _build(directory: Path, plan: Glm5NextOracle) -> dict[str, object]:
    started = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(SPECIAL_TOKENS, EOS_TOKENS[0], CHAT_TEMPLATE)
    text = text_config(plan, [tokenizer.convert_tokens_to_ids(name) for name in EOS_TOKENS])
    markers = {key: tokenizer.convert_tokens_to_ids(name) for key, name in MARKERS.items()}
    # transformers edits the dictionaries that it is given, lists inside them included.
    config = Glm5NextConfig(
        text_config=json.loads(json.dumps(text)), vision_config=vision_config(), **markers
    )
    model = Glm5NextForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    mtp = mtp_block(config)
    generator = torch.Generator().manual_seed(plan.seed + 1)
    randomise(model, mtp, generator, plan.fp8)

    record = reference.record_all(model, mtp, tokenizer, generator, plan.length, plan.steps)
    if ties := near_ties(record.gaps):
        raise ValueError(f"seed {plan.seed} comes near a tie: {'; '.join(ties)}; take another seed")
    write_weights(directory, model, mtp, plan.fp8)
    tokenizer.save_pretrained(directory)
    write_config(directory, text, plan.fp8)
    notes = {
        "seed": plan.seed,
        "fp8": plan.fp8,
        "ragged": plan.ragged,
        "steps": plan.steps,
        "length": plan.length,
        **record.notes,
        **record.gaps,
        "build_s": time.perf_counter() - started,
    }
    write_reference(directory, record.tensors, notes)
    return notes


def main() -> None:
    """Build one directory from the command line and print its notes."""
    parser = argparse.ArgumentParser(description="Build a tiny random glm5_next oracle.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--len", type=int, default=193, dest="length")
    flags = vars(parser.parse_args())
    notes = build(flags.pop("out"), Glm5NextOracle(**flags))
    print(json.dumps(notes, indent=1))  # noqa: T201 - a program: printing is its output


if __name__ == "__main__":
    main()
