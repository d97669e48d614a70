"""What every token mixer offers: its cache components and one call per step.

Owns the mixer protocol, its options and the observer type. Knows no mixer.
Invariant: a mixer reads and writes only the pools it declared, at the rows' own blocks and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from oxplow.cache.spec import Component
from oxplow.model.caches import LayerCaches
from oxplow.model.step import StepInput

Observe: TypeAlias = Callable[[str, int, Tensor], None]
"""A probe's eye: called with (cut name, layer, tensor) at the named cuts of a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerOptions:
    """What the caches look like and when selection may be skipped.

    `block_size` tokens per cache block; `dtype` the name of the activation format that caches take;
    `always_select` runs the indexer even where it selects everything (deterministic mode, probes).
    `attend_all` makes sparse layers attend to every earlier token: what selection costs in quality.
    """

    block_size: int
    dtype: str
    always_select: bool = False
    attend_all: bool = False


class Mixer(Protocol):
    """Mixes the tokens of a step."""

    def components(self) -> tuple[Component, ...]:
        """Return what this layer keeps per block and per slot."""
        ...

    def __call__(
        self, x: Tensor, step: StepInput, caches: LayerCaches, observe: Observe | None
    ) -> Tensor:
        """Map x [T, D] to [T, D], reading and writing `caches`."""
        ...
