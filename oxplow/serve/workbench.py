"""A small engine on a bench: fresh cores on one model, asks from a seed, hooks for observers.

Owns the opening of a checkpoint for instruments and the loads that they run. Knows the engine as a
library, no server. Invariant: everything is made anew from the seed at each call, so nothing of one
run reaches the next; kernels are selected at opening, so a bench sees what a server would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch

from oxplow.cache.plan import exact_plan
from oxplow.cache.prefix import PictureSpan
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, Event, PromptDone, TokenOut
from oxplow.engine.options import EngineOptions, MemoryOptions, SchedulerOptions
from oxplow.engine.request import FinishReason, Picture, Request, SamplingParams
from oxplow.engine.runner import trunk_components
from oxplow.errors import ContractError
from oxplow.feedback.live import observed_table
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.ops.table import OpTable
from oxplow.serve.kernel_choice import plain_kernels
from oxplow.trace import EventRing

__all__ = ["BLOCK", "Answered", "Workbench", "Wrap", "ask", "greedy", "run"]

BLOCK = 16
_MOST_STEPS = 5000
_CHANNELS = 3

Wrap: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a callable of a kernel's callable."""


@dataclass(slots=True)
class Answered:
    """What became of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    miss: str = ""
    reason: FinishReason | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Workbench:
    """One checkpoint, opened; `seed` decides every prompt, picture and draw. `invariant` asks for
    the kernels of `--deterministic`.
    """

    directory: Path
    seed: int = 0
    invariant: bool = False

    @cached_property
    def table(self) -> OpTable:
        """The kernels that this process would serve with."""
        return plain_kernels(torch.device("cpu"), invariant=self.invariant)

    @cached_property
    def model(self) -> HybridModel:
        """The model on those kernels."""
        return load_model(self.directory, self.table, LoadOptions(block_size=BLOCK))

    def core(
        self,
        *,
        blocks: int = 128,
        slots: int = 4,
        snapshots: int = 12,
        budget: int = 64,
        ring: EventRing | None = None,
        ops: Mapping[str, Wrap] | None = None,
    ) -> EngineCore:
        """Open a fresh core; `budget` prefill tokens go into a step, a state is kept each block.

        `ops` wraps what the core itself calls of the table (`sample`); the model keeps its own.
        """
        plan = exact_plan(
            trunk_components(self.model),
            BLOCK,
            num_blocks=blocks,
            num_slots=slots,
            num_snapshots=snapshots,
        )
        options = EngineOptions(
            scheduler=SchedulerOptions(
                step_target_s=None, max_prefill_tokens=budget, short_tokens=BLOCK
            ),
            memory=MemoryOptions(snapshot_tokens=BLOCK, answer_snapshot_tokens=BLOCK),
        )
        table = self.table
        if ops:
            table = observed_table(table, lambda op, run: ops[op](run) if op in ops else run)
        return EngineCore(self.model, table, plan, options, revision="bench", ring=ring)

    def prompt(self, length: int, number: int = 0) -> list[int]:
        """Return random ordinary tokens; equal numbers of one bench give equal starts."""
        most = self.model.spec.text.vocab_size - 64  # special tokens stand at the end
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        return torch.randint(0, most, (length,), generator=generator).tolist()

    def picture(self, start: int, number: int, side: int = 4) -> Picture:
        """Return a random picture of `side` x `side` patches at a place of the prompt."""
        vision = self.model.spec.vision
        if vision is None:
            raise ContractError("this model takes no pictures", where=str(self.directory))
        width = _CHANNELS * vision.temporal_patch * vision.patch**2
        generator = torch.Generator().manual_seed(7777 + 1000 * self.seed + number)
        pixels = torch.randn(side * side, width, generator=generator)
        tokens = side * side // vision.merge**2
        span = PictureSpan(start, tokens, f"picture-{self.seed}-{number}")
        grid = torch.tensor([[1, side, side]])
        return Picture(span=span, pixel_values=pixels, grid_thw=grid)

    @property
    def takes_pictures(self) -> bool:
        """Tell whether the model has a vision tower."""
        return self.model.spec.vision is not None


def greedy(tokens: int) -> SamplingParams:
    """Return the parameters of a greedy answer of exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def ask(
    name: str,
    prompt: Sequence[int],
    tokens: int = 4,
    *,
    pictures: Iterable[Picture] = (),
    params: SamplingParams | None = None,
    reuse: bool = True,
    priority: int = 0,
) -> Request:
    """Write a request; greedy unless `params` say otherwise."""
    return Request(
        request_id=name,
        prompt_ids=list(prompt),
        params=params or greedy(tokens),
        pictures=tuple(pictures),
        reuse_prefix=reuse,
        priority=priority,
    )


def run(
    core: EngineCore,
    requests: Iterable[Request],
    *,
    after_step: Callable[[list[Event]], None] = lambda events: None,
) -> dict[str, Answered]:
    """Add requests and step to the end; `after_step` hears each step's events.

    Raises ContractError where the engine does not come to an end.
    """
    answers: dict[str, Answered] = {}
    for request in requests:
        answers[request.request_id] = Answered()
        core.add(request)
    for _ in range(_MOST_STEPS):
        if not core.has_work:
            return answers
        events = core.step()
        for event in events:
            _note(answers, event)
        after_step(events)
    raise ContractError("the engine does not come to an end", got=f"{_MOST_STEPS} steps")


def _note(answers: dict[str, Answered], event: Event) -> None:
    told = answers.setdefault(event.request_id, Answered())
    match event:
        case TokenOut():
            told.token_ids.append(event.token_id)
            if event.logprob is not None:
                told.logprobs.append(event.logprob.logprob)
        case PromptDone():
            told.cached_tokens, told.miss = event.cached_tokens, event.miss
        case ChoiceEnd():
            told.reason, told.message = event.reason, event.message
        case _:
            pass
