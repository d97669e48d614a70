"""The nano model's sizes, and the released config layout made from them.

Owns numbers only. Invariant: `config_dict` is what transformers and the engine read back,
`num_parameters` counts every stored parameter (embedding, head, trunk, MTP block and vision tower).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of the vision tower."""

    depth: int = 4
    hidden: int = 256
    num_heads: int = 8
    intermediate: int = 384
    projection: int = 512
    patch: int = 14

    @property
    def patch_values(self) -> int:
        """Values of one still patch (the released weight sees it twice, once per temporal slot)."""
        return 3 * self.patch * self.patch


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoShape:
    """Sizes of the text model; every head dim is a power of two, heads are a multiple of 8."""

    vocab: int = 8192
    hidden: int = 256
    num_layers: int = 8
    num_heads: int = 8
    kda_head_dim: int = 64
    qk_head_dim: int = 64
    v_head_dim: int = 64
    q_rank: int = 128
    kv_rank: int = 128
    index_heads: int = 16
    index_dim: int = 64
    index_topk: int = 256
    pool: int = 4
    num_dense: int = 1
    dense_intermediate: int = 1024
    num_experts: int = 16
    experts_per_token: int = 4
    expert_intermediate: int = 64
    routed_scale: float = 2.5
    swiglu_limit: float = 10.0
    streams: int = 4
    sinkhorn_iters: int = 20
    vision: VisionShape = VisionShape()

    def is_full_attention(self, layer: int) -> bool:
        """Return whether a trunk layer is MLA with the indexer (every fourth one), not KDA."""
        return layer % 4 == 3


def layer_types(shape: NanoShape) -> list[str]:
    """Return the released names of the trunk layers' mixers."""
    full, linear = "deepseek_sparse_attention", "linear_attention"
    return [full if shape.is_full_attention(i) else linear for i in range(shape.num_layers)]


def text_config(shape: NanoShape, eos: list[int]) -> dict[str, object]:
    """Return `text_config` in the released layout."""
    kinds = layer_types(shape)
    return {
        "model_type": "glm5_next_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_intermediate,
        "moe_intermediate_size": shape.expert_intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": shape.routed_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "first_k_dense_replace": shape.num_dense,
        "mlp_layer_types": ["dense"] * shape.num_dense
        + ["sparse"] * (shape.num_layers - shape.num_dense),
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.qk_head_dim,
        "qk_rope_head_dim": 0,
        "v_head_dim": shape.v_head_dim,
        "mla_use_nope": True,
        "index_n_heads": shape.index_heads,
        "index_head_dim": shape.index_dim,
        "index_topk": shape.index_topk,
        "index_kpool": shape.pool,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * shape.num_layers,
        "layer_types": kinds,
        "linear_attn_config": {
            "num_heads": shape.num_heads,
            "head_dim": shape.kda_head_dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "full_attn_layers": [i for i, kind in enumerate(kinds) if kind != "linear_attention"],
        },
        "mhc": True,
        "hc_mult": shape.streams,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": shape.sinkhorn_iters,
        "hidden_act": "silu",
        "swiglu_limit": shape.swiglu_limit,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False,
        "pad_token_id": eos[0],
        "eos_token_id": eos,
    }


def vision_config(shape: NanoShape) -> dict[str, object]:
    """Return `vision_config` in the released layout."""
    vision = shape.vision
    return {
        "model_type": "glm5_next_vision",
        "depth": vision.depth,
        "hidden_size": vision.hidden,
        "num_heads": vision.num_heads,
        "intermediate_size": vision.intermediate,
        "out_hidden_size": shape.hidden,
        "projection_intermediate_size": vision.projection,
        "patch_size": vision.patch,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "image_size": 448,
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": shape.swiglu_limit,
        "rms_norm_eps": 1e-5,
    }
