"""Kimi-Linear (`kimi_linear`): from the released config layout to a ModelSpec.

Owns the differences to `glm5_next`: plain residuals, softplus gate, dense MLA whose extra key
dims are never rotated, 1-based layer lists, other expert names. Knows no tensors. Invariant: as
in `glm`, an unsupported value is refused by name. Source: model.md 16 and the public model
definition in transformers 5.24 (`configuration_kimi_linear`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oxplow.errors import ConfigError
from oxplow.model.config_fields import Fields, token_ids
from oxplow.model.spec import (
    FfnKind,
    KdaSpec,
    LayerSpec,
    MixerKind,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    Names,
    TextSpec,
)

MODEL_TYPES = ("kimi_linear",)
"""Values of `model_type` that this module reads."""

_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
_LATENT_NORM_EPS = 1e-6  # the released model leaves these norms at their class default


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a Kimi-Linear `config.json` dictionary into a ModelSpec; raises ConfigError that
    names the field.
    """
    f = Fields(config, "config")
    f.refuse_other_than(_FIXED)
    # names under which transformers keeps the same fields: they may not say something else
    f.refuse_other_than(
        {
            "n_group": 1,
            "norm_topk_prob": f.flag("moe_renormalize", True),
            "num_key_value_heads": f.integer("num_attention_heads"),
        }
    )
    linear = f.section("linear_attn_config")
    head_dim = linear.integer("head_dim", 128)
    return ModelSpec(
        family="kimi_linear",
        names=Names(text="model."),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        text=TextSpec(
            vocab_size=f.integer("vocab_size"),
            hidden=f.integer("hidden_size"),
            layers=_layers(f, linear, config),
            dense_width=f.integer("intermediate_size"),
            norm_eps=f.number("rms_norm_eps", 1e-5),
            swiglu_limit=None,
            kda=KdaSpec(
                num_heads=linear.integer("num_heads", 32),
                head_dim=head_dim,
                conv_width=linear.integer("short_conv_kernel_size", 4, low=2),
                gate_rank=head_dim,
                lower_bound=None,
            ),
            mla=MlaSpec(
                num_heads=f.integer("num_attention_heads"),
                q_lora_rank=f.integer("q_lora_rank") if f.has("q_lora_rank") else None,
                kv_lora_rank=f.integer("kv_lora_rank"),
                nope_dim=f.integer("qk_nope_head_dim"),
                rope_dim=f.integer("qk_rope_head_dim", 0, low=0),
                v_dim=f.integer("v_head_dim"),
                norm_eps=_LATENT_NORM_EPS,
            ),
            index=None,
            moe=_moe(f),
            hyper=None,
            max_tokens=f.integer("model_max_length", f.integer("max_position_embeddings", 1048576)),
        ),
    )


def _layers(f: Fields, linear: Fields, config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    count = f.integer("num_hidden_layers")
    section = config.get("linear_attn_config") or {}
    lists = (section.get("full_attn_layers"), section.get("kda_layers"))
    full, kda = (layers if isinstance(layers, list) else [] for layers in lists)
    listed = [*full, *kda]
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in listed)
    if not whole or len(listed) != count or sorted(listed) != list(range(1, count + 1)):
        raise ConfigError(
            "the 1-based layer lists do not cover every layer once",
            got={"full_attn_layers": full, "kda_layers": kda},
            wanted=f"1 to {count}",
            where=linear.where,
        )
    dense = f.integer("first_k_dense_replace", 1, low=0)
    f.refuse_other_than(
        {
            "layer_types": [
                "full_attention" if i + 1 in full else "linear_attention" for i in range(count)
            ],
            "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(count)],
        }
    )
    return tuple(
        LayerSpec(
            MixerKind.DENSE_MLA if i + 1 in full else MixerKind.KDA,
            FfnKind.DENSE if i < dense else FfnKind.MOE,
        )
        for i in range(count)
    )


def _moe(f: Fields) -> MoeSpec:
    width = f.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=f.integer("num_experts"),
        top_k=f.integer("num_experts_per_token"),
        width=width,
        shared_width=width * f.integer("num_shared_experts", 1),
        scaling=f.number("routed_scaling_factor", 1.0),
        renormalise=f.flag("moe_renormalize", True),
        prefix="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
