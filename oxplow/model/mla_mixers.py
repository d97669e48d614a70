"""Latent attention: dense over every earlier token, or sparse over what the pooled indexer selects.

Owns both MLA mixers and their components (latent, pool keys, tails). Knows no residual.
Invariant: latents and pool keys are written before anything of the same step reads them, and a pool
key is written once, when its last token arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.cache.spec import Component, Per
from oxplow.model.caches import LayerCaches
from oxplow.model.layers import JoinedLinear, Linear, at_least_fp32, take_linear, take_norm
from oxplow.model.mixer import MixerOptions, Observe
from oxplow.model.spec import MlaSpec, TextSpec
from oxplow.model.step import Rows, StepInput
from oxplow.model.weights import Checkpoint
from oxplow.ops.table import OpTable

_INDEX_NORM_EPS = 1e-6  # model.md 3: the indexer's LayerNorm has its own eps


class _Mla:
    """What dense and sparse MLA share: queries, the latent, the absorbed up-projections, the
    output.
    """

    def __init__(
        self, ops: OpTable, source: Checkpoint, prefix: str, hidden: int, mla: MlaSpec
    ) -> None:
        self._ops, self.mla = ops, mla
        query_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
        latent = source.matrix(
            f"{prefix}.kv_a_proj_with_mqa.weight", mla.kv_lora_rank + mla.rope_dim, hidden
        )
        self._query: Linear | None = None
        if mla.q_lora_rank is None:
            first = source.matrix(f"{prefix}.q_proj.weight", query_width, hidden)
        else:
            first = source.matrix(f"{prefix}.q_a_proj.weight", mla.q_lora_rank, hidden)
            self._query_norm = take_norm(
                ops, source, f"{prefix}.q_a_layernorm", mla.q_lora_rank, mla.norm_eps
            )
            self._query = take_linear(
                ops, source, f"{prefix}.q_b_proj", query_width, mla.q_lora_rank
            )
        self._project = JoinedLinear(ops, [first, latent])
        self._latent_norm = take_norm(
            ops, source, f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, mla.norm_eps
        )
        up = source.vector(
            f"{prefix}.kv_b_proj.weight",
            mla.num_heads * (mla.nope_dim + mla.v_dim),
            mla.kv_lora_rank,
        )
        up = up.view(mla.num_heads, mla.nope_dim + mla.v_dim, mla.kv_lora_rank)
        self.w_uk, self.w_uv = torch.split(up, [mla.nope_dim, mla.v_dim], 1)
        self._out = take_linear(ops, source, f"{prefix}.o_proj", hidden, mla.num_heads * mla.v_dim)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return heads' queries [T, H, Dn + P], the low-rank query [T, Rq] and the latent row
        [T, R + P].
        """
        first, row = self._project(x)
        rank = self.mla.kv_lora_rank
        if self.mla.rope_dim:
            row = torch.cat([self._latent_norm(row[:, :rank]), row[:, rank:]], -1)
        else:
            row = self._latent_norm(row)
        if self._query is not None:
            first = self._query_norm(first)
        query = first if self._query is None else self._query(first)
        return query.view(x.shape[0], self.mla.num_heads, -1), first, row

    def attend_all(self, query: Tensor, rows: Rows, caches: LayerCaches) -> Tensor:
        """Attend to every earlier token of the rows' own sequences."""
        return self._ops.dense_mla(
            rows.of(query),
            self.w_uk,
            self.w_uv,
            caches["latent"],
            rows.block_table,
            rows.computed_tokens,
            rows.cu_seqlens,
        )

    def write(self, parts: list[Tensor]) -> Tensor:
        """Join the heads' outputs and project them to [T, D]."""
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._out(out.reshape(out.shape[0], -1))


class DenseMlaMixer:
    """Latent attention over every earlier token."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        layer: int,
        text: TextSpec,
        options: MixerOptions,
    ) -> None:
        self._ops, self._layer, self._options = ops, layer, options
        self._mla = _Mla(ops, source, prefix, text.hidden, text.mla)

    def components(self) -> tuple[Component, ...]:
        """The latent row (and its shared key dims) of every token."""
        mla = self._mla.mla
        shape = (self._options.block_size, mla.kv_lora_rank + mla.rope_dim)
        return (
            Component(
                layer=self._layer,
                name="latent",
                per=Per.BLOCK,
                dtype=self._options.dtype,
                shape=shape,
            ),
        )

    def __call__(
        self, x: Tensor, step: StepInput, caches: LayerCaches, observe: Observe | None
    ) -> Tensor:
        """Write the latents, then attend."""
        query, _, row = self._mla.read(x)
        self._ops.latent_write(row, step.slot_mapping, caches["latent"])
        groups = [rows for rows in (step.decode, step.prefill) if rows is not None]
        return self._mla.write([self._mla.attend_all(query, rows, caches) for rows in groups])


class SparseMlaMixer:
    """Latent attention over the tokens that the pooled indexer selects."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        layer: int,
        text: TextSpec,
        options: MixerOptions,
    ) -> None:
        if text.index is None or text.mla.q_lora_rank is None:
            raise AssertionError("sparse MLA without an indexer or a low-rank query")
        self._ops, self._layer, self._options = ops, layer, options
        self._mla = _Mla(ops, source, prefix, text.hidden, text.mla)
        self.index = index = text.index
        at = f"{prefix}.indexer"
        self._query = take_linear(
            ops, source, f"{at}.wq_b", index.num_heads * index.head_dim, text.mla.q_lora_rank
        )
        self._keys = JoinedLinear(
            ops,
            [
                source.matrix(f"{at}.wk.weight", index.head_dim, text.hidden),
                source.matrix(f"{at}.index_kpool_compress_gate", index.head_dim, text.hidden),
                source.matrix(f"{at}.weights_proj.weight", index.num_heads, text.hidden),
            ],
        )
        self._norm = (
            source.vector(f"{at}.k_norm.weight", index.head_dim),
            source.vector(f"{at}.k_norm.bias", index.head_dim),
        )
        self._ape = source.vector(f"{at}.index_kpool_compress_ape", index.pool_size, index.head_dim)

    def components(self) -> tuple[Component, ...]:
        """Latents and pool keys per block; the raw keys and gates of an unfinished pool per
        slot.
        """
        index, size = self.index, self._options.block_size
        dtype, rank = self._options.dtype, self._mla.mla.kv_lora_rank
        shapes = {
            "latent": (Per.BLOCK, (size, rank)),
            "pool_keys": (Per.BLOCK, (size // index.pool_size, index.head_dim)),
            "tail_key": (Per.SLOT, (index.pool_size - 1, index.head_dim)),
            "tail_gate": (Per.SLOT, (index.pool_size - 1, index.head_dim)),
        }
        return tuple(
            Component(layer=self._layer, name=name, per=per, dtype=dtype, shape=shape)
            for name, (per, shape) in shapes.items()
        )

    def __call__(
        self, x: Tensor, step: StepInput, caches: LayerCaches, observe: Observe | None
    ) -> Tensor:
        """Write latents and pool keys, select, attend."""
        query, low_query, row = self._mla.read(x)
        self._ops.latent_write(row, step.slot_mapping, caches["latent"])
        head_weights = self._write_keys(x, step.all_rows, caches)
        parts: list[Tensor] = []
        for rows in (step.decode, step.prefill):
            if rows is None:
                continue
            if self._attends_all(rows):
                parts.append(self._mla.attend_all(query, rows, caches))
                continue
            selected = self.select(low_query, head_weights, rows, caches)
            if observe is not None:
                observe("selected", self._layer, selected)
            parts.append(self.attend(query, selected, rows, caches, is_decode=rows is step.decode))
        return self._mla.write(parts)

    def _attends_all(self, rows: Rows) -> bool:
        """True by option, or where selection would take every token anyway."""
        is_short = rows.max_context <= self.index.dense_limit
        return self._options.attend_all or (is_short and not self._options.always_select)

    def _write_keys(self, x: Tensor, rows: Rows, caches: LayerCaches) -> Tensor:
        """Complete and store pool keys; return the heads' score weights [T, Hi] in fp32."""
        key, gate, weights = self._keys(x)
        key = self._ops.layer_norm(key, *self._norm, eps=_INDEX_NORM_EPS)
        self._ops.pool_keys_write(
            key,
            gate,
            self._ape,
            caches["tail_key"],
            caches["tail_gate"],
            caches["pool_keys"],
            rows.block_table,
            rows.state_slots,
            rows.computed_tokens,
            rows.cu_seqlens,
        )
        return at_least_fp32(weights) * self.index.num_heads**-0.5

    def select(
        self, low_query: Tensor, head_weights: Tensor, rows: Rows, caches: LayerCaches
    ) -> Tensor:
        """Return the selected positions [rows, S] int32 of each row's own sequence, -1 padded."""
        query = self._query(rows.of(low_query)).view(-1, self.index.num_heads, self.index.head_dim)
        return self._ops.index_select(
            query,
            rows.of(head_weights),
            caches["pool_keys"],
            rows.block_table,
            rows.computed_tokens,
            rows.cu_seqlens,
            top_pools=self.index.top_pools,
            pool_size=self.index.pool_size,
        )

    def attend(
        self, query: Tensor, selected: Tensor, rows: Rows, caches: LayerCaches, *, is_decode: bool
    ) -> Tensor:
        """Attend to the selected tokens only."""
        query = rows.of(query)
        weights, latents, table = (
            (self._mla.w_uk, self._mla.w_uv),
            caches["latent"],
            rows.block_table,
        )
        if is_decode:
            return self._ops.sparse_mla_decode(query, *weights, latents, table, selected)
        return self._ops.sparse_mla_prefill(
            query, *weights, latents, table, selected, rows.cu_seqlens
        )
