"""One training step: losses, backward, optimiser, router balance; on a GPU captured as one CUDA
graph.

Owns the losses and the capture. Eagerly the host is the limit (7,000 launches a step). Invariant:
all shapes of a stage are fixed; `metrics` names the returned numbers in order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from training.chat import ANSWER, CORPUS, PICTURE
from training.generators.mix import Batch
from training.layers import Pass
from training.model import Nano
from training.optim import Optimiser
from training.render import Renderer
from training.vision import MAX_BLOCKS

MTP_WEIGHT = 0.3
BIAS_STEP = 2e-3
SAMPLED_POSITIONS = 128
METRICS = (
    "corpus",
    "answers",
    "answer_acc",
    "picture_acc",
    "mtp",
    "align",
    "grad",
    "load",
    "cover1",
    "cover2",
    "cover_mtp",
)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each row in fp32."""
    return functional.cross_entropy(logits.float(), target, reduction="none")


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean, 0 for no weight."""
    return (values * weights).sum() / weights.sum().clamp(min=1)


class TrainingStep:
    """Callable on a host batch; returns METRICS as a device tensor."""

    def __init__(
        self,
        model: Nano,
        optimiser: Optimiser,
        renderer: Renderer,
        rows: int,
        length: int,
        slots: int,
        sparse: bool,
    ) -> None:
        device = model.embedding.device
        self.model, self.optimiser, self.renderer = model, optimiser, renderer
        self.rows, self.length, self.sparse = rows, length, sparse
        self.ids = torch.zeros(rows, length + 2, dtype=torch.long, device=device)
        self.weights = torch.zeros(rows, length + 2, device=device)
        self.pictures = torch.zeros(slots, 20, device=device)
        self.places = torch.zeros(slots * MAX_BLOCKS, dtype=torch.long, device=device)
        self.positions = torch.zeros(SAMPLED_POSITIONS, dtype=torch.long, device=device)
        self.balance = torch.zeros((), device=device)
        self.cross_entropy = model.backend.compiled(cross_entropy)
        self.on_gpu = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    @property
    def is_ready(self) -> bool:
        """Whether warm-up (and capture) are over."""
        return self.graph is not None or (not self.on_gpu and self.calls >= 1)

    def __call__(self, batch: Batch) -> Tensor:
        """Run one step on the batch."""
        for buffer, array in (
            (self.ids, batch.ids),
            (self.weights, batch.weights),
            (self.pictures, batch.pictures),
            (self.places, batch.places),
        ):
            buffer.copy_(torch.from_numpy(array), non_blocking=True)
        self.positions.copy_(self.sample_positions())
        self.balance.copy_(self.optimiser.factor * BIAS_STEP)
        self.calls += 1
        if self.graph is not None:
            self.graph.replay()
            return self.captured.clone()
        if not self.on_gpu:
            return self.compute()
        return self._warm_up()

    def sample_positions(self) -> Tensor:
        """Return sorted positions for the indexer's alignment: half of them from the last eighth of
        the rows, where the questions of recall rows stand.
        """
        half = SAMPLED_POSITIONS // 2
        low, late = min(64, self.length // 2), self.length - self.length // 8
        anywhere = torch.randint(low, self.length, (half,))
        return torch.cat([anywhere, torch.randint(late, self.length, (half,))]).sort().values

    def _warm_up(self) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = self.compute()
        torch.cuda.current_stream().wait_stream(side)
        if self.calls == 3:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.captured = self.compute()
            self.graph = graph
        return result

    def compute(self) -> Tensor:
        """Forward, backward, update; returns the metrics."""
        run = Pass(self.rows, self.length, self.sparse, self.positions)
        pictures = self.renderer(self.pictures)
        state, draft = self.model(self.ids[:, :-1], run, pictures, self.places)
        next_ids, after_ids = self.ids[:, 1:-1].reshape(-1), self.ids[:, 2:].reshape(-1)
        next_weights, after_weights = (
            self.weights[:, 1:-1].reshape(-1),
            self.weights[:, 2:].reshape(-1),
        )
        logits = self.model.logits(state)
        loss = self.cross_entropy(logits, next_ids)
        draft_loss = self.cross_entropy(self.model.logits(draft), after_ids)
        align = torch.stack(run.alignment).mean()
        total = weighted_mean(loss, next_weights) + MTP_WEIGHT * weighted_mean(
            draft_loss, after_weights
        )
        (total + align).backward()
        norm = self.optimiser.step()
        worst = torch.stack([layer.balance(self.balance) for layer in self.model.routed()]).max()
        with torch.no_grad():
            right = (logits.argmax(-1) == next_ids).float()
            corpus, answers, shown = (
                (next_weights == w).float() for w in (CORPUS, ANSWER, PICTURE)
            )
            return torch.stack(
                [
                    weighted_mean(loss, corpus),
                    weighted_mean(loss, answers),
                    weighted_mean(right, answers),
                    weighted_mean(right, shown),
                    weighted_mean(draft_loss, (after_weights > 0).float()),
                    align,
                    norm,
                    worst,
                    *run.coverage,
                ]
            ).detach()
