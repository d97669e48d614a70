"""The assembled hybrid model: embedding, layers, final norm, head, and the optional towers.

Owns the order of the forward pass. Knows no family by name, no scheduler and no files. Invariant:
`forward` touches only the pools passed to it, and its result for a request does not depend
(within the ops' law) on how its tokens are split into steps or on what shares the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oxplow.cache.spec import Component
from oxplow.errors import ConfigError
from oxplow.model.caches import CacheTensors
from oxplow.model.ffn import DenseFfn, MoeFfn
from oxplow.model.layers import Embedding, Linear, RmsNorm, at_least_fp32
from oxplow.model.mixer import Mixer, Observe
from oxplow.model.mtp import DraftBlock
from oxplow.model.residual import Site
from oxplow.model.spec import ModelSpec
from oxplow.model.step import StepInput
from oxplow.model.vision import Encoding, VisionTower


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: a mixer and a feed-forward block, each attached to the residual at a
    site.
    """

    mixer_site: Site
    mixer_norm: RmsNorm
    mixer: Mixer
    ffn_site: Site
    ffn_norm: RmsNorm
    ffn: DenseFfn | MoeFfn


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """`hidden` [T, D] after the final norm, `logits` [L, V] float32 of the step's logit rows."""

    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class HybridModel:
    """A loaded model; `streams` is the number of residual streams (None: a plain residual)."""

    spec: ModelSpec
    embedding: Embedding
    layers: Sequence[Layer]
    norm: RmsNorm
    head: Linear
    streams: int | None
    block_size: int
    vision: VisionTower | None = None
    draft_block: DraftBlock | None = None

    def components(self) -> tuple[Component, ...]:
        """Return every cache component of every layer, the draft block's included."""
        own = tuple(c for layer in self.layers for c in layer.mixer.components())
        return own + (self.draft_block.components() if self.draft_block else ())

    @torch.inference_mode()
    def forward(
        self, step: StepInput, caches: CacheTensors, observe: Observe | None = None
    ) -> StepOutput:
        """Run one step; mutates `caches` at the step's blocks and slots.

        `observe` is called at the cuts "streams" (entering layer i; i = number of layers: the final
        normed state) and "selected" (the indexer's picks of layer i).
        """
        x = self.embed(step)
        residual = (
            x if self.streams is None else x.unsqueeze(1).expand(-1, self.streams, -1).contiguous()
        )
        for i, layer in enumerate(self.layers):
            if observe is not None:
                observe("streams", i, residual)
            x, carried = layer.mixer_site.enter(residual)
            x = layer.mixer(layer.mixer_norm(x), step, caches[i], observe)
            residual = layer.mixer_site.leave(residual, x, carried)
            x, carried = layer.ffn_site.enter(residual)
            x = layer.ffn(layer.ffn_norm(x))
            residual = layer.ffn_site.leave(residual, x, carried)
        hidden = self.norm(residual if self.streams is None else residual.mean(1))
        if observe is not None:
            observe("streams", len(self.layers), hidden)
        return StepOutput(
            hidden=hidden, logits=self.project(hidden.index_select(0, step.logit_rows))
        )

    def embed(self, step: StepInput) -> Tensor:
        """Return the rows' embeddings [T, D], encoder rows put in their places."""
        x = self.embedding(step.token_ids)
        if step.embeds is not None:
            x = x.index_copy(0, step.embeds.rows, step.embeds.values.to(x.dtype))
        return x

    def project(self, hidden: Tensor) -> Tensor:
        """Return logits [L, V], at least float32, of normed hidden rows [L, D]."""
        return at_least_fp32(self.head(hidden))

    @torch.inference_mode()
    def encode(self, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
        """Encode pictures or frames (see VisionTower); raises ConfigError for a text-only model."""
        return self._tower()(pixel_values, grid_thw)

    def begin_encoding(self, pixel_values: Tensor, grid_thw: Tensor) -> Encoding:
        """Return the work of `encode`, to be done piece by piece; raises what `encode` raises."""
        return self._tower().begin(pixel_values, grid_thw)

    def _tower(self) -> VisionTower:
        if self.vision is None:
            raise ConfigError(
                "this checkpoint has no vision tower", got="pictures", where=self.spec.family
            )
        return self.vision

    @torch.inference_mode()
    def draft(
        self,
        hidden: Tensor,
        next_token_ids: Tensor,
        step: StepInput,
        caches: CacheTensors,
        observe: Observe | None = None,
    ) -> StepOutput:
        """Guess the token after the next one: row t reads hidden h_t and token t+1.

        Mutates the draft block's own caches. Raises ConfigError when the checkpoint has no draft
        block.
        """
        if self.draft_block is None:
            raise ConfigError("this checkpoint has no draft block", where=self.spec.family)
        state = self.draft_block(hidden, self.embedding(next_token_ids), step, caches, observe)
        return StepOutput(hidden=state, logits=self.project(state.index_select(0, step.logit_rows)))
