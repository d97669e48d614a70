"""State faults: the arithmetic is right, on state that belongs to somebody or something else.

Owns class S of the planted faults. Knows the cache, the batch builder and the sampler, no probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oxplow.cache.manager import CacheManager
from oxplow.cache.prefix import KeyChain, SnapshotKind
from oxplow.engine import encoder
from oxplow.engine.batch import BatchBuilder, LogitRow
from oxplow.engine.request import Picture
from oxplow.engine.sampling import Sampler
from oxplow.engine.state import StateStore
from oxplow.engine.steps import Scheduled
from oxplow.model.step import Embeds
from tests.faults.record import Fault, FaultClass, expected
from tests.faults.swap import Run, attribute


def _wrong_unit(original: Run) -> Run:
    """Name a state by a block of twice the size: it is found for a shorter prefix."""

    def snapshot(
        self: CacheManager, owner: str, chain: KeyChain, position: int, kind: SnapshotKind
    ) -> object:
        size = self.plan.block_size
        half = position // (2 * size) * size
        if half == position or half == 0:
            return original(self, owner, chain, position, kind)
        return original(self, owner, chain, half, kind)

    return snapshot


def _not_there_yet(original: Run) -> Run:
    """Lose the copy into a snapshot; its slot lies behind the requests' own."""

    def copy_slot(self: StateStore, source: int, target: int) -> None:
        if target < source:
            original(self, source, target)

    return copy_slot


def _only_the_size(original: Run) -> Run:
    def _name(picture: Picture) -> str:
        return f"{picture.span.num_tokens}"

    return _name


def _neighbours_exchanged(original: Run) -> Run:
    """Join neighbouring places, and fill the joined place from its last picture on."""

    def _embeds(self: BatchBuilder, rows: Sequence[Scheduled], ends: object) -> Embeds | None:
        made = original(self, rows, ends)
        if made is None:
            return None
        places, values = made.rows, made.values.clone()
        at = 0
        for row in rows:
            sizes = [
                (p.span.start, min(row.stop, p.span.end) - max(row.start, p.span.start))
                for p in row.choice.request.pictures
            ]
            run: list[int] = []
            last = -1
            for start, count in sizes:
                if count <= 0:
                    continue
                run = [*run, count] if start == last else [count]
                last = start + count
                if len(run) > 1:
                    width = sum(run)
                    begin = at + count - width
                    values[begin : at + count] = values[begin : at + count].roll(count, 0)
                at += count
        return replace(made, rows=places, values=values)

    return _embeds


def _order_ignored(original: Run) -> Run:
    """Keep the settings of the last step as long as the same ones are there, in any order."""

    def _settings_of(
        self: Sampler, rows: Sequence[LogitRow], device: torch.device
    ) -> tuple[Tensor, ...]:
        kept, tensors = self._settings
        wanted = [
            (p.temperature, p.top_k, p.top_p, p.min_p, row.choice.seed)
            for row in rows
            for p in (row.choice.request.params,)
        ]
        if sorted(map(str, kept)) == sorted(map(str, wanted)):
            return tensors
        return original(self, rows, device)

    return _settings_of


FAULTS = (
    Fault(
        id="F10",
        title="a recurrent state is filed under a block of another size",
        kind=FaultClass.STATE,
        reports=("vllm-project/vllm#55601",),
        expected=expected("cache.prefix", "snapshot lookup", "position snapshot"),
        symptom="accuracy",
        excitation="a prompt that was seen before and is longer than two blocks",
        plant=lambda: attribute(CacheManager, "snapshot", make=_wrong_unit),
    ),
    Fault(
        id="F11",
        title="a snapshot is offered before its state was copied",
        kind=FaultClass.STATE,
        reports=("vllm-project/vllm#53084",),
        expected=expected(
            "cache.prefix engine.handover", "copy_slot snapshot", "slot state snapshot"
        ),
        symptom="accuracy",
        excitation="a prompt that was seen before",
        plant=lambda: attribute(StateStore, "copy_slot", make=_not_there_yet),
    ),
    Fault(
        id="F13",
        title="encoded pictures are kept under their size alone",
        kind=FaultClass.STATE,
        reports=("sgl-project/sglang#25462", "LMCache/LMCache#4086"),
        expected=expected("engine.encoder", "rows _name encode_some", "content_hash"),
        symptom="accuracy",
        excitation="two different pictures of one size while both are kept",
        plant=lambda: attribute(encoder, "_name", make=_only_the_size),
    ),
    Fault(
        id="F16",
        title="pictures side by side are put together in the wrong order",
        kind=FaultClass.STATE,
        reports=("sgl-project/sglang#35799",),
        expected=expected("engine.batch", "_embeds build", "embeds values pictures"),
        symptom="accuracy",
        excitation="two pictures without a token between them, in one prefill piece",
        plant=lambda: attribute(BatchBuilder, "_embeds", make=_neighbours_exchanged),
    ),
    Fault(
        id="F17",
        title="sampling settings do not move with their rows",
        kind=FaultClass.STATE,
        reports=("vllm-project/vllm#1309",),
        expected=expected("engine.sampling", "_settings_of draw sample", "temperature settings"),
        symptom="accuracy",
        excitation="requests of unlike settings whose order in the batch changes",
        plant=lambda: attribute(Sampler, "_settings_of", make=_order_ignored),
    ),
)
