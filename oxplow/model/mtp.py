"""The draft block (MTP): from the trunk's last hidden state and the next token to a guess for the
one after.

Owns the block stored as layer N. Knows the trunk only through its embedding and head, which it
shares. Invariant: a single plain residual stream, its own caches at layer index N, and the input
is the trunk's hidden state after the stream mean and the final norm (or this block's own output
for a further draft step).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxplow.cache.spec import Component
from oxplow.model.caches import CacheTensors
from oxplow.model.ffn import MoeFfn
from oxplow.model.layers import take_linear, take_norm
from oxplow.model.mixer import MixerOptions, Observe
from oxplow.model.mla_mixers import SparseMlaMixer
from oxplow.model.spec import TextSpec
from oxplow.model.step import StepInput
from oxplow.model.weights import Checkpoint
from oxplow.ops.table import OpTable


class DraftBlock:
    """One sparse MLA layer with experts between two input norms and an output norm."""

    def __init__(
        self,
        ops: OpTable,
        source: Checkpoint,
        prefix: str,
        layer: int,
        text: TextSpec,
        options: MixerOptions,
    ) -> None:
        eps, hidden = text.norm_eps, text.hidden
        self.layer = layer
        self._embed_norm = take_norm(ops, source, f"{prefix}enorm", hidden, eps)
        self._hidden_norm = take_norm(ops, source, f"{prefix}hnorm", hidden, eps)
        self._join = take_linear(ops, source, f"{prefix}eh_proj", hidden, 2 * hidden)
        self._input_norm = take_norm(ops, source, f"{prefix}input_layernorm", hidden, eps)
        self._mixer = SparseMlaMixer(ops, source, f"{prefix}self_attn", layer, text, options)
        self._post_norm = take_norm(ops, source, f"{prefix}post_attention_layernorm", hidden, eps)
        self._ffn = MoeFfn(ops, source, f"{prefix}mlp", text)
        self._out_norm = take_norm(ops, source, f"{prefix}shared_head.norm", hidden, eps)

    def components(self) -> tuple[Component, ...]:
        """Caches of the block's own attention layer."""
        return self._mixer.components()

    def __call__(
        self,
        hidden: Tensor,
        embedded: Tensor,
        step: StepInput,
        caches: CacheTensors,
        observe: Observe | None,
    ) -> Tensor:
        """Return the post-norm draft state [T, D] from hidden h_t [T, D] and the embedding of
        token t+1 [T, D].
        """
        z = self._join(torch.cat([self._embed_norm(embedded), self._hidden_norm(hidden)], -1))
        z = z + self._mixer(self._input_norm(z), step, caches[self.layer], observe)
        z = z + self._ffn(self._post_norm(z))
        return self._out_norm(z)
