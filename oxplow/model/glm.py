"""GLM-5.3-Flash (`glm5_next`): from the released config layout to a ModelSpec.

Owns the meaning of the config's fields, their defaults and what is refused. Knows no tensors.
Invariant: a field that would change the arithmetic in a way that we do not compute is refused by
name, never ignored. Source: the public model definition in transformers 5.24
(`configuration_glm5_next`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oxplow.errors import ConfigError
from oxplow.model.config_fields import Fields, token_ids
from oxplow.model.spec import (
    FfnKind,
    HyperSpec,
    IndexSpec,
    KdaSpec,
    LayerSpec,
    MixerKind,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    Names,
    TextSpec,
    VisionSpec,
)

MODEL_TYPES = ("glm5_next", "glm5_next_text")
"""Values of `model_type` that this module reads."""

_MIXERS = {
    "linear_attention": MixerKind.KDA,
    "deepseek_sparse_attention": MixerKind.SPARSE_MLA,
    "indexed_attention": MixerKind.SPARSE_MLA,
    "full_attention": MixerKind.SPARSE_MLA,
}
_FFNS = {"dense": FfnKind.DENSE, "sparse": FfnKind.MOE}
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "mhc": True,
    "mla_use_nope": True,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "tie_word_embeddings": False,
    "index_topk_freq": 1,  # other schedules share one layer's selection with the next ones
}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a `config.json` dictionary into a ModelSpec.

    Accepts the nested layout and the flat text-only one. Raises ConfigError that names the field.
    """
    nested = config.get("text_config") or config
    text = Fields(nested, "text_config" if "text_config" in config else "config")
    text.refuse_other_than(_FIXED)
    vision = config.get("vision_config")
    return ModelSpec(
        family="glm5_next",
        text=_text(text),
        names=Names(text="model.language_model.", vision="model.visual." if vision else None),
        vision=_vision(Fields(vision, "vision_config")) if vision else None,
        has_draft=text.integer("num_nextn_predict_layers", 0, low=0, high=1) == 1,
        eos_token_ids=token_ids(nested.get("eos_token_id", config.get("eos_token_id"))),
        image_token_id=next(iter(token_ids(config.get("image_token_id"), "image_token_id")), None),
    )


def _text(f: Fields) -> TextSpec:
    f.refuse_other_than({"num_key_value_heads": f.integer("num_attention_heads")})
    layers = _layers(f)
    limit = f.number("swiglu_limit", 10.0)
    return TextSpec(
        vocab_size=f.integer("vocab_size"),
        hidden=f.integer("hidden_size"),
        layers=layers,
        dense_width=f.integer("intermediate_size"),
        norm_eps=f.number("rms_norm_eps", 1e-5),
        swiglu_limit=limit,
        kda=_kda(f),
        mla=MlaSpec(
            num_heads=f.integer("num_attention_heads"),
            q_lora_rank=f.integer("q_lora_rank"),
            kv_lora_rank=f.integer("kv_lora_rank"),
            nope_dim=f.integer("qk_nope_head_dim"),
            rope_dim=0,
            v_dim=f.integer("v_head_dim"),
            norm_eps=f.number("rms_norm_eps", 1e-5),
        ),
        index=_index(f),
        moe=_moe(f)
        if any(layer.ffn is FfnKind.MOE for layer in layers) or f.has("n_routed_experts")
        else None,
        hyper=HyperSpec(
            streams=f.integer("hc_mult", 4),
            mix_eps=f.number("hc_eps", 1e-6),
            iterations=f.integer("hc_sinkhorn_iters", 20),
        ),
        max_tokens=f.integer("max_position_embeddings", 1048576),
    )


def _layers(f: Fields) -> tuple[LayerSpec, ...]:
    count = f.integer("num_hidden_layers")
    mixers = f.names("layer_types", count)
    if mixers is None:
        mixers = [
            "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(count)
        ]
    ffns = f.names("mlp_layer_types", count)
    if ffns is None:
        dense = f.integer("first_k_dense_replace", 3, low=0)
        ffns = ["dense" if i < dense else "sparse" for i in range(count)]
    f.names("indexer_types", count)  # for its length
    f.refuse_entries_other_than("indexer_types", "full")
    f.refuse_entries_other_than("index_topk_pattern", "full", "F")
    return tuple(
        LayerSpec(f.choice("layer_types", m, _MIXERS), f.choice("mlp_layer_types", k, _FFNS))
        for m, k in zip(mixers, ffns, strict=True)
    )


def _kda(f: Fields) -> KdaSpec:
    linear = f.section("linear_attn_config")
    if not linear.has("gate_lower_bound"):  # then false would mean the gate without a bound
        linear.refuse_other_than({"safe_gate": True})
    head_dim = linear.integer("head_dim", f.integer("linear_head_dim", 128))
    bound = linear.number("gate_lower_bound", f.number("linear_lower_bound", -5.0))
    if bound >= 0:
        raise ConfigError(
            "the decay gate's lower bound must be negative", got=bound, where="gate_lower_bound"
        )
    return KdaSpec(
        num_heads=linear.integer("num_heads", f.integer("linear_num_heads", 64)),
        head_dim=head_dim,
        conv_width=linear.integer(
            "short_conv_kernel_size", f.integer("linear_conv_kernel_dim", 4), low=2
        ),
        gate_rank=head_dim,  # the released low-rank gates have the head's width
        lower_bound=bound,
    )


def _index(f: Fields) -> IndexSpec:
    top_k, pool = f.integer("index_topk"), f.integer("index_kpool", 16)
    if top_k % pool:
        raise ConfigError(
            "index_topk must be a multiple of index_kpool", got=(top_k, pool), where=f.where
        )
    return IndexSpec(
        num_heads=f.integer("index_n_heads"),
        head_dim=f.integer("index_head_dim"),
        top_pools=top_k // pool,
        pool_size=pool,
    )


def _moe(f: Fields) -> MoeSpec:
    width = f.integer("moe_intermediate_size")
    experts = f.integer("n_routed_experts", f.integer("num_local_experts", 288))
    top_k = f.integer("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(
            "num_experts_per_tok exceeds the experts",
            got=top_k,
            wanted=f"<= {experts}",
            where=f.where,
        )
    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        width=width,
        shared_width=width * f.integer("n_shared_experts", 1),
        scaling=f.number("routed_scaling_factor", 2.5),
        renormalise=f.flag("norm_topk_prob", True),
    )


def _vision(f: Fields) -> VisionSpec:
    f.refuse_other_than({"attention_bias": True, "in_channels": 3, "hidden_act": "silu"})
    return VisionSpec(
        depth=f.integer("depth", 24),
        hidden=f.integer("hidden_size", 1024),
        num_heads=f.integer("num_heads", 16),
        width=f.integer("intermediate_size", 4096),
        out_hidden=f.integer("out_hidden_size", 1536),
        projection_width=f.integer("projection_intermediate_size", 10240),
        patch=f.integer("patch_size", 14),
        temporal_patch=f.integer("temporal_patch_size", 2),
        merge=f.integer("spatial_merge_size", 2),
        norm_eps=f.number("rms_norm_eps", 1e-5),
        swiglu_limit=f.number("swiglu_limit", 10.0),
        rope_theta=f.section("rope_parameters").number("rope_theta", 10000.0),
    )
