"""The model, its cache pools and one forward pass for each step.

Owns the pools and the order of a step: build, forward, draw. Knows no queue and no admission.
Invariant: one `forward` and one host sync a step, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oxplow.cache.manager import Holding
from oxplow.cache.plan import CachePlan
from oxplow.cache.spec import Component
from oxplow.engine.batch import BatchBuilder, LogitRow
from oxplow.engine.request import Picture
from oxplow.engine.sampling import Drawn, Sampler
from oxplow.engine.state import StateStore
from oxplow.engine.steps import StepPlan
from oxplow.model.caches import CacheTensors
from oxplow.model.network import HybridModel
from oxplow.ops.table import OpTable


def trunk_components(model: HybridModel) -> tuple[Component, ...]:
    """Return the cache components that serving takes: all layers', not the draft block's."""
    return tuple(c for layer in model.layers for c in layer.mixer.components())


class ModelRunner:
    """Runs step plans on a model whose pools were allocated from a cache plan."""

    def __init__(
        self,
        model: HybridModel,
        ops: OpTable,
        plan: CachePlan,
        encoder_rows: Callable[[Picture], Tensor],
    ) -> None:
        """Allocate the pools: `plan.num_slots` request slots, then `plan.num_snapshots` more."""
        self.model, self.plan = model, plan
        self.caches = CacheTensors(
            trunk_components(model),
            num_blocks=plan.num_blocks,
            num_slots=plan.num_slots + plan.num_snapshots,
            device=ops.facts.device,
        )
        self.state = StateStore(self.caches, plan.block_size)
        self.sampler = Sampler(ops, model.spec.eos_token_ids)
        self.batches = BatchBuilder(plan, ops.facts.device, encoder_rows)
        self.num_steps = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan, holdings: Mapping[str, Holding]) -> list[list[Drawn]]:
        """Compute one step; return one result per row of logits, grouped by scheduled entry."""
        batch = self.batches.build(plan, holdings)
        out = self.model.forward(batch.step, self.caches)
        flat: list[LogitRow] = [row for rows in batch.logit_rows for row in rows]
        drawn = iter(self.sampler.draw(out.logits, flat))
        self.num_steps += 1
        return [[next(drawn) for _ in rows] for rows in batch.logit_rows]
