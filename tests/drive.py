"""A small driver for model tests: requests with blocks and slots of their own, no scheduler.

Blocks are handed out scattered and slots in odd order on purpose, so that nothing may rely on
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oxplow.model.caches import CacheTensors
from oxplow.model.mixer import Observe
from oxplow.model.network import HybridModel
from oxplow.model.step import Embeds, SequenceRows, build_step


class Driver:
    """Runs requests on a model, one forward pass per `step` call."""

    def __init__(
        self,
        model: HybridModel,
        *,
        num_blocks: int = 64,
        num_slots: int = 8,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.device = device or torch.device("cpu")
        self.caches = CacheTensors(
            model.components(),
            num_blocks=num_blocks,
            num_slots=num_slots,
            device=self.device,
        )
        for layer in {c.layer for c in self.caches.components}:
            for pool in self.caches[layer].values():
                pool.fill_(float("nan"))  # unused memory must never be read
        order = torch.Generator().manual_seed(seed)
        self._free_blocks = torch.randperm(num_blocks, generator=order).tolist()
        self._free_slots = torch.randperm(num_slots, generator=order).tolist()
        self._blocks: dict[str, list[int]] = {}
        self._slot: dict[str, int] = {}
        self._computed: dict[str, int] = {}

    def release(self, name: str) -> None:
        """Give a request's blocks and slot back, without cleaning them."""
        self._free_blocks += self._blocks.pop(name)
        self._free_slots.append(self._slot.pop(name))
        self._computed.pop(name)

    def rows(self, name: str, token_ids: Sequence[int], *, all_logits: bool = True) -> SequenceRows:
        """Reserve what the request needs for these tokens and describe its rows."""
        computed = self._computed.setdefault(name, 0)
        if name not in self._slot:
            self._slot[name] = self._free_slots.pop()
        blocks = self._blocks.setdefault(name, [])
        while len(blocks) * self.model.block_size < computed + len(token_ids):
            blocks.append(self._free_blocks.pop())
        return SequenceRows(
            token_ids=list(token_ids),
            computed_tokens=computed,
            slot=self._slot[name],
            block_ids=list(blocks),
            all_logits=all_logits,
        )

    def step(
        self,
        parts: dict[str, Sequence[int]],
        *,
        embeds: Embeds | None = None,
        observe: Observe | None = None,
        draft_from: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run one step over several requests; return all their rows' logits by name."""
        described = {name: self.rows(name, ids) for name, ids in parts.items()}
        names = sorted(described, key=lambda n: not described[n].is_decode)
        step = build_step(
            [described[n] for n in names],
            block_size=self.model.block_size,
            device=self.device,
            embeds=embeds,
        )
        out = self.model.forward(step, self.caches, observe)
        self.hidden = out.hidden
        logits, at = {}, 0
        for n in names:
            count = len(parts[n])
            logits[n] = out.logits[at : at + count]
            at += count
            self._computed[n] += count
        return logits

    def greedy(self, name: str, first: Tensor, count: int) -> list[int]:
        """Continue a request greedily from its last logits row."""
        tokens = [int(first.argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step({name: [tokens[-1]]})[name][-1].argmax()))
        return tokens
