"""What a hybrid model is, as data: sizes and kinds of every part.

Owns the frozen records that the builders fill from a checkpoint's config. Knows no tensors and no
op. Invariant: everything a layer needs to be built and to declare its caches is in its record; no
module asks a config dictionary later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class MixerKind(Enum):
    """How a layer mixes tokens."""

    KDA = "kda"  # gated delta rule with a fixed-size state
    SPARSE_MLA = "sparse_mla"  # latent attention over tokens that a pooled indexer selects
    DENSE_MLA = "dense_mla"  # latent attention over every earlier token


class FfnKind(Enum):
    """How a layer mixes channels."""

    DENSE = "dense"
    MOE = "moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaSpec:
    """KDA sizes. `lower_bound` is the scale of the bounded gate, None the softplus gate."""

    num_heads: int
    head_dim: int
    conv_width: int
    gate_rank: int
    lower_bound: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSpec:
    """MLA sizes. `q_lora_rank` None: queries straight from the hidden state; `rope_dim` dims are
    never rotated.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """Pooled indexer sizes; `top_pools` pools of `pool_size` tokens are attended, and the raw
    tail.
    """

    num_heads: int
    head_dim: int
    top_pools: int
    pool_size: int

    @property
    def dense_limit(self) -> int:
        """Largest number of visible tokens for which the selection is everything."""
        return self.top_pools * self.pool_size + self.pool_size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Expert layer sizes; the shared expert has width `shared_width` and weight 1."""

    num_experts: int
    top_k: int
    width: int
    shared_width: int
    scaling: float
    renormalise: bool
    prefix: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Manifold-constrained hyper-connections: `streams` residual streams mixed by a Sinkhorn
    matrix.
    """

    streams: int
    mix_eps: float
    iterations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """Vision tower sizes; one output row per `merge` x `merge` patches."""

    depth: int
    hidden: int
    num_heads: int
    width: int
    out_hidden: int
    projection_width: int
    patch: int
    temporal_patch: int
    merge: int
    norm_eps: float
    swiglu_limit: float | None
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The kinds of one layer."""

    mixer: MixerKind
    ffn: FfnKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """The text tower."""

    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    dense_width: int
    norm_eps: float
    swiglu_limit: float | None
    kda: KdaSpec
    mla: MlaSpec
    index: IndexSpec | None
    moe: MoeSpec | None
    hyper: HyperSpec | None
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Where a checkpoint family keeps its parts."""

    text: str
    vision: str | None = None
    head: str = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model: text tower, optional vision tower and draft block, special token ids."""

    family: str
    text: TextSpec
    names: Names
    vision: VisionSpec | None = None
    has_draft: bool = False
    eos_token_ids: tuple[int, ...] = ()
    image_token_id: int | None = None
    ignored: tuple[str, ...] = field(default=())
