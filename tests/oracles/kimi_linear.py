"""Build a tiny random Kimi-Linear checkpoint (`kimi_linear`) and its reference activations.

    python -m tests.oracles.kimi_linear OUT [--seed N] [--steps 64] [--len 193]

Owns the tiny configuration, the random weights, the released tensor names and the recordings. Must
not know Oxplow.
Invariant: names and config layout are those of Kimi-Linear-48B-A3B: `block_sparse_moe` with experts
w1 (gate), w2 (down), w3 (up), `mlp` in dense layers, three convolutions, layer lists that count
from one. Sources: transformers 5.24 `conversion_mapping.py` ("kimi_linear"), vLLM
`models/kimi_linear.py` (`load_weights`), llama.cpp `conversion` of KimiLinearForCausalLM.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.utils import logging as transformers_logging

from tests.oracles.margins import CutMargins, greedy_margin, near_ties
from tests.oracles.writing import byte_tokenizer, write_json, write_reference, write_shards

NUM_LAYERS = 7
# The released schedule does not follow a period to its end ([4, 8, ..., 24, 27] of 27): nor does
# this one. Both lists count layers from one.
FULL_ATTENTION_LAYERS = (4, 7)
KDA_LAYERS = (1, 2, 3, 5, 6)
SHARD_BYTES = 1_000_000
STEPPED_TOKENS = 32
SPECIAL_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]")
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"

__all__ = ["KimiLinearOracle", "build", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearOracle:
    """Say what to build: the seed, and the length of the text and of its greedy tail."""

    seed: int = 0
    steps: int = 64
    length: int = 193


def released_config(token_ids: dict[str, int]) -> dict[str, object]:
    """Return `config.json` in the released layout; no two widths that could be confused agree."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": 272,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": NUM_LAYERS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "model_max_length": 1048576,
        "initializer_range": 0.02,
        "use_cache": True,
        "head_dim": 16,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "mla_use_nope": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "full_attn_layers": list(FULL_ATTENTION_LAYERS),
            "kda_layers": list(KDA_LAYERS),
        },
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 56,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "topk_method": "noaux_tc",
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "bos_token_id": token_ids["[BOS]"],
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["[PAD]"],
    }


def initial_value(name: str, parameter: Tensor, noise: Tensor) -> Tensor:
    """Scale unit noise; every fourth gate channel decays so fast that no bound may be assumed."""
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("A_log"):
        return 0.4 * noise
    if name.endswith("dt_bias"):
        value = noise - 3
        value[::4] += 12
        # One channel beyond 20, where softplus is the identity in transformers' branch.
        value[0] = 24.0
        return value
    if "embed_tokens" in name:
        return noise
    return noise * parameter.shape[-1] ** -0.5


@torch.no_grad()
def randomise(model: KimiLinearForCausalLM, generator: torch.Generator) -> None:
    """Overwrite every parameter and every router bias, in the order in which they are named."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(initial_value(name, parameter, noise))
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def released_tensors(model: KimiLinearForCausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its released name; transformers fuses experts and convolutions."""
    for name, value in model.state_dict().items():
        name = name.replace(".forget_gate.", ".")
        if ".mlp." in name and model.config.mlp_layer_types[int(name.split(".")[2])] == "sparse":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):
            for expert, fused in enumerate(value):
                gate, up = fused.chunk(2)
                yield name.replace("gate_up_proj", f"{expert}.w1.weight"), gate
                yield name.replace("gate_up_proj", f"{expert}.w3.weight"), up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(value):
                yield name.replace("down_proj", f"{expert}.w2.weight"), down
        elif name.endswith(".conv1d.weight"):
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                yield name.replace("conv1d", f"{letter}_conv1d"), part
        else:
            yield name, value


@torch.no_grad()
def record(
    model: KimiLinearForCausalLM, ids: Tensor, steps: int
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, object]]:
    """Return reference tensors, the smallest gaps, and other notes."""
    started = time.perf_counter()
    with CutMargins() as cuts:
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    notes: dict[str, object] = {"prefill_s": time.perf_counter() - started}
    gaps = cuts.gaps("")
    tensors = {"text.ids": ids, "text.logits": out.logits}
    for i, hidden in enumerate(out.hidden_states):
        tensors[f"text.hidden.{i}"] = hidden
    notes["prefill_vs_step"] = _step_difference(model, ids, out.logits)

    started = time.perf_counter()
    greedy = _greedy(model, ids, steps)
    notes["decode_tok_s"] = steps / (time.perf_counter() - started)
    tensors["text.greedy"] = greedy
    with CutMargins() as cuts:
        logits = model(input_ids=torch.cat([ids, greedy], dim=1), use_cache=False).logits
    gaps |= cuts.gaps("_with_greedy")
    gaps["min_greedy_gap"] = greedy_margin(logits[0, ids.shape[1] - 1 : -1])
    return tensors, gaps, notes


def _greedy(model: KimiLinearForCausalLM, ids: Tensor, steps: int) -> Tensor:
    out = model(input_ids=ids, use_cache=True)
    tokens = [out.logits[:, -1].argmax(-1, keepdim=True)]
    for _ in range(steps - 1):
        out = model(input_ids=tokens[-1], cache=out.cache, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def _step_difference(model: KimiLinearForCausalLM, ids: Tensor, logits: Tensor) -> float:
    start = max(1, ids.shape[1] - STEPPED_TOKENS)
    out = model(input_ids=ids[:, :start], use_cache=True)
    rows = [out.logits[:, -1:]]
    for i in range(start, ids.shape[1]):
        out = model(input_ids=ids[:, i : i + 1], cache=out.cache, use_cache=True)
        rows.append(out.logits)
    return float((torch.cat(rows, dim=1) - logits[:, start - 1 :]).abs().max())


def build(directory: Path, plan: KimiLinearOracle) -> dict[str, object]:
    """Write one oracle directory and return its notes.

    Restores torch's thread count, its global generator and the logging level of transformers.
    Raises ValueError if the seed comes near a tie.
    """
    threads, verbosity = torch.get_num_threads(), transformers_logging.get_verbosity()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            return _build(directory, plan)
    finally:
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)


def _build(directory: Path, plan: KimiLinearOracle) -> dict[str, object]:
    started = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(SPECIAL_TOKENS, SPECIAL_TOKENS[1], CHAT_TEMPLATE)
    config = released_config(
        {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    )
    write_json(directory / "config.json", config)
    # Read back from the file: the layer schedule below is what transformers makes of the lists.
    with warnings.catch_warnings():
        # The released file has `rope_scaling: null`, a field that transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        parsed = KimiLinearConfig.from_pretrained(directory)
    model = KimiLinearForCausalLM._from_config(parsed, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(plan.seed + 1)
    randomise(model, generator)
    ids = torch.randint(0, 256, (1, plan.length), generator=generator)

    tensors, gaps, notes = record(model, ids, plan.steps)
    if ties := near_ties(gaps):
        raise ValueError(f"seed {plan.seed} comes near a tie: {'; '.join(ties)}; take another seed")
    write_shards(directory, dict(sorted(released_tensors(model))), SHARD_BYTES)
    tokenizer.save_pretrained(directory)
    notes = {
        "seed": plan.seed,
        "steps": plan.steps,
        "length": plan.length,
        "layer_types": list(parsed.layer_types),
        **notes,
        **gaps,
        "build_s": time.perf_counter() - started,
    }
    write_reference(directory, tensors, notes)
    return notes


def main() -> None:
    """Build one directory from the command line and print its notes."""
    parser = argparse.ArgumentParser(description="Build a tiny random kimi_linear oracle.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--len", type=int, default=193, dest="length")
    flags = vars(parser.parse_args())
    notes = build(flags.pop("out"), KimiLinearOracle(**flags))
    print(json.dumps(notes, indent=1))  # noqa: T201 - a program: printing is its output


if __name__ == "__main__":
    main()
