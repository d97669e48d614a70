"""The nano model in its training form: embedding, trunk, MTP block, vision tower.

Owns the forward pass over fixed-length rows. It must not know data formats or the optimiser.
Invariant: text logits equal transformers' `glm5_next` on the exported weights
(tests/training/test_model.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.kernels import Backend, linear, rms_norm
from training.layers import Block, FeedForward, Pass, matrix, ones
from training.shape import NanoShape
from training.vision import Pictures, VisionTower


class Nano(nn.Module):
    """A glm5_next of `shape`; runs on the device its backend was made for."""

    def __init__(self, shape: NanoShape, backend: Backend) -> None:
        super().__init__()
        self.shape, self.backend = shape, backend
        hidden = shape.hidden
        self.embedding = nn.Parameter(torch.randn(shape.vocab, hidden) * 0.5)
        self.head = matrix(shape.vocab, hidden, gain=0.2)
        self.blocks = nn.ModuleList([Block(shape, backend, i) for i in range(shape.num_layers)])
        self.norm = ones(hidden)
        self.mtp = Block(shape, backend, 0, is_mtp=True)
        self.mtp_embed_norm, self.mtp_hidden_norm = ones(hidden), ones(hidden)
        self.mtp_norm, self.mtp_join = ones(hidden), matrix(hidden, 2 * hidden)
        self.vision = VisionTower(shape, backend)

    def embed(self, ids: Tensor, pictures: Pictures | None, places: Tensor | None) -> Tensor:
        """Return rows [B, T, D] with picture features at their flat places (spare rows point behind
        the end).
        """
        rows = functional.embedding(ids, self.embedding).to(self.backend.dtype)
        if pictures is None:
            return rows
        flat = torch.cat([rows.flatten(0, 1), rows[:1, 0]])
        features = self.vision(pictures).flatten(0, 1).to(rows.dtype)
        return flat.index_copy(0, places, features)[:-1].view(rows.shape)

    def forward(
        self, ids: Tensor, run: Pass, pictures: Pictures | None = None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [B, T+1] -> (final normed state, MTP state), both [B*T, D].

        Row t of the state predicts token t+1, row t of the MTP state (which reads token t+1)
        predicts token t+2.
        """
        embedded = self.embed(ids, pictures, places)
        count = run.num_rows * run.length
        start = embedded[:, :-1].reshape(count, 1, -1)
        streams = start.expand(-1, self.shape.streams, -1).contiguous()
        for block in self.blocks:
            streams = block(streams, run)
        state = rms_norm(streams.float().mean(1).to(streams.dtype), self.norm)
        following = rms_norm(embedded[:, 1:].reshape(count, -1), self.mtp_embed_norm)
        joined = torch.cat([following, rms_norm(state, self.mtp_hidden_norm)], -1)
        return state, rms_norm(self.mtp.plain(linear(joined, self.mtp_join), run), self.mtp_norm)

    def logits(self, state: Tensor) -> Tensor:
        """Return logits [N, vocab] of either state."""
        return linear(state, self.head)

    def routed(self) -> list[FeedForward]:
        """Return the MoE layers, trunk order, the MTP block's last."""
        return [m for m in self.modules() if isinstance(m, FeedForward) and m.routed]


def count_parameters(model: nn.Module) -> int:
    """Return the number of stored values: parameters and the router biases."""
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("ffn.bias"))
    return sum(p.numel() for p in model.parameters()) + biases
