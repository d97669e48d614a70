"""From a checkpoint directory and an op table to a HybridModel.

Owns the order in which tensors are taken and the choice of family by `model_type`. Knows every
builder and no request. Invariant: the load either accounts for every stored tensor or fails with
its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oxplow.errors import ConfigError, WeightError
from oxplow.model import glm, kimi
from oxplow.model.ffn import take_ffn
from oxplow.model.kda_mixer import KdaMixer
from oxplow.model.layers import Embedding, take_linear, take_norm
from oxplow.model.mixer import MixerOptions
from oxplow.model.mla_mixers import DenseMlaMixer, SparseMlaMixer
from oxplow.model.mtp import DraftBlock
from oxplow.model.network import HybridModel, Layer
from oxplow.model.residual import HyperSite, PlainSite, Site
from oxplow.model.spec import MixerKind, ModelSpec
from oxplow.model.vision import VisionTower
from oxplow.model.weights import Checkpoint, Progress, read_config
from oxplow.ops.table import OpTable

_FAMILIES = {kind: family for family in (glm, kimi) for kind in family.MODEL_TYPES}
_MIXERS: dict[MixerKind, type[KdaMixer] | type[DenseMlaMixer] | type[SparseMlaMixer]] = {
    MixerKind.KDA: KdaMixer,
    MixerKind.DENSE_MLA: DenseMlaMixer,
    MixerKind.SPARSE_MLA: SparseMlaMixer,
}
_CACHE_FORMATS = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load: cache `block_size` in tokens, `weight_dtype` for plain matrices (None: as
    stored).

    `always_select` runs the indexer even where it would select every token; `attend_all` makes
    sparse layers attend to every earlier token instead, which prices the selection; `with_vision`
    and `with_draft` False leave these towers out (their tensors are accounted for, not read).
    """

    block_size: int = 64
    weight_dtype: torch.dtype | None = None
    always_select: bool = False
    attend_all: bool = False
    with_vision: bool = True
    with_draft: bool = True


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Choose the family by `model_type` and read its spec; raises ConfigError for an unknown
    one.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ConfigError(
            "unknown model_type", got=kind, wanted=sorted(_FAMILIES), where="config.json"
        )
    quantisation = config.get("quantization_config")
    if quantisation and (
        not isinstance(quantisation, Mapping)
        or quantisation.get("quant_method") != "fp8"
        or quantisation.get("weight_block_size") != [128, 128]
    ):
        raise ConfigError(
            "this quantisation is not supported",
            got=quantisation,
            wanted="fp8 with 128x128 blocks",
            where="config.json",
        )
    return _FAMILIES[kind].read_spec(config)


def load_model(
    directory: Path,
    ops: OpTable,
    options: LoadOptions | None = None,
    progress: Progress | None = None,
) -> HybridModel:
    """Load a checkpoint onto the op table's device, computing in its dtype.

    Raises ConfigError or WeightError naming the field or tensor, got and wanted. CPU tensors stay
    mapped.
    """
    options = options or LoadOptions()
    spec = read_spec(read_config(directory))
    if spec.text.index and options.block_size % spec.text.index.pool_size:
        raise ConfigError(
            "block size must be a multiple of the pool size",
            got=options.block_size,
            wanted=spec.text.index.pool_size,
        )
    source = Checkpoint(
        directory, device=ops.facts.device, dtype=options.weight_dtype, progress=progress
    )
    model = _take_model(spec, source, ops, options)
    source.finish()
    return model


def _take_model(
    spec: ModelSpec, source: Checkpoint, ops: OpTable, options: LoadOptions
) -> HybridModel:
    text, prefix = spec.text, spec.names.text
    mixer_options = MixerOptions(
        block_size=options.block_size,
        dtype=_CACHE_FORMATS[ops.facts.dtype],
        always_select=options.always_select or ops.facts.invariant,
        attend_all=options.attend_all,
    )
    return HybridModel(
        spec=spec,
        embedding=Embedding(
            source.vector(f"{prefix}embed_tokens.weight", text.vocab_size, text.hidden),
            ops.facts.dtype,
        ),
        layers=[_take_layer(i, spec, source, ops, mixer_options) for i in range(len(text.layers))],
        norm=take_norm(ops, source, f"{prefix}norm", text.hidden, text.norm_eps),
        head=take_linear(
            ops, source, spec.names.head.removesuffix(".weight"), text.vocab_size, text.hidden
        ),
        streams=text.hyper.streams if text.hyper else None,
        block_size=options.block_size,
        vision=_take_vision(spec, source, ops, options),
        draft_block=_take_draft(spec, source, ops, options, mixer_options),
    )


def _take_layer(
    i: int, spec: ModelSpec, source: Checkpoint, ops: OpTable, options: MixerOptions
) -> Layer:
    text = spec.text
    prefix = f"{spec.names.text}layers.{i}."
    kinds = text.layers[i]
    return Layer(
        mixer_site=_take_site(spec, source, ops, f"{prefix}hc_attn"),
        mixer_norm=take_norm(ops, source, f"{prefix}input_layernorm", text.hidden, text.norm_eps),
        mixer=_MIXERS[kinds.mixer](ops, source, f"{prefix}self_attn", i, text, options),
        ffn_site=_take_site(spec, source, ops, f"{prefix}hc_ffn"),
        ffn_norm=take_norm(
            ops, source, f"{prefix}post_attention_layernorm", text.hidden, text.norm_eps
        ),
        ffn=take_ffn(ops, source, prefix, kinds.ffn, text),
    )


def _take_site(spec: ModelSpec, source: Checkpoint, ops: OpTable, prefix: str) -> Site:
    text = spec.text
    if text.hyper is None:
        return PlainSite()
    return HyperSite(ops, source, prefix, text.hyper, text.hidden, text.norm_eps)


def _take_vision(
    spec: ModelSpec, source: Checkpoint, ops: OpTable, options: LoadOptions
) -> VisionTower | None:
    if spec.vision is None or spec.names.vision is None:
        return None
    if spec.vision.out_hidden != spec.text.hidden:
        raise WeightError(
            "the vision tower does not fit",
            got=spec.vision.out_hidden,
            wanted=spec.text.hidden,
            where="out_hidden_size",
        )
    if not options.with_vision:
        _skip(source, spec.names.vision)
        return None
    return VisionTower(ops, source, spec.names.vision, spec.vision, ops.facts.dtype)


def _take_draft(
    spec: ModelSpec,
    source: Checkpoint,
    ops: OpTable,
    options: LoadOptions,
    mixer_options: MixerOptions,
) -> DraftBlock | None:
    layer = len(spec.text.layers)
    prefix = f"{spec.names.text}layers.{layer}."
    if not spec.has_draft or not source.names_under(
        prefix
    ):  # re-saved checkpoints drop the block as a whole
        return None
    if not options.with_draft:
        _skip(source, prefix)
        return None
    return DraftBlock(ops, source, prefix, layer, spec.text, mixer_options)


def _skip(source: Checkpoint, prefix: str) -> None:
    for name in source.names_under(prefix):
        source.skip(name)
