"""From a step plan to the tensors of one forward pass.

Owns the persistent block table and the layout of rows, logits and encoder rows. Knows no weights
and no policy. Invariant: what it builds equals `oxplow.model.step.build_step` on the same rows; a
block table row is written once per new block, not once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oxplow.cache.manager import Holding
from oxplow.cache.plan import CachePlan, blocks_for
from oxplow.engine.request import Choice, Picture
from oxplow.engine.steps import Scheduled, StepPlan
from oxplow.errors import ContractError
from oxplow.model.step import Embeds, Rows, StepInput


@dataclass(frozen=True, slots=True)
class LogitRow:
    """What one row of logits is for.

    `position` is the index of the token that the row predicts. `target` is that token where the
    prompt gives it (then only its log-probability is wanted); `draws` asks for a new token.
    """

    choice: Choice
    position: int
    target: int | None
    draws: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's input and, per scheduled entry, its rows of logits in order."""

    step: StepInput
    logit_rows: tuple[tuple[LogitRow, ...], ...]


class BatchBuilder:
    """Builds batches; holds each slot's block table between steps."""

    def __init__(
        self,
        plan: CachePlan,
        device: torch.device,
        encoder_rows: Callable[[Picture], Tensor],
    ) -> None:
        self._block_size, self._device, self._encoder_rows = plan.block_size, device, encoder_rows
        width = blocks_for(plan.max_model_len, plan.block_size)
        self._table = np.full((plan.num_slots, width), -1, dtype=np.int64)
        self._filled: list[tuple[Holding | None, int]] = [(None, 0)] * plan.num_slots

    def build(self, plan: StepPlan, holdings: Mapping[str, Holding]) -> Batch:
        """Lay out the plan's rows; raises ContractError for too few blocks or a wrong order."""
        held = [holdings[row.choice.owner] for row in plan.rows]
        decodes = plan.decode_rows
        if any(row.is_decode for row in plan.rows[decodes:]):
            raise ContractError("decode rows must come before prefill rows")
        for row, holding in zip(plan.rows, held, strict=True):
            self._fill(row, holding)
        slots = np.array([int(h.slot) for h in held], dtype=np.int64)
        if len(set(slots.tolist())) != len(slots):
            raise ContractError("a state slot appears twice in one step", got=slots.tolist())
        starts = np.array([row.start for row in plan.rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        everything = self._rows(slots, starts, counts, 0)
        logit_rows = tuple(_logit_rows(row) for row in plan.rows)
        step = StepInput(
            token_ids=self._put(_token_ids(plan.rows)),
            slot_mapping=self._put(self._slot_mapping(slots, starts, counts, ends)),
            all_rows=everything,
            decode=self._part(everything, slots, starts, counts, slice(0, decodes)),
            prefill=self._part(everything, slots, starts, counts, slice(decodes, None)),
            logit_rows=self._put(_logit_index(logit_rows, ends)),
            embeds=self._embeds(plan.rows, ends),
        )
        return Batch(step, logit_rows)

    def _fill(self, row: Scheduled, holding: Holding) -> None:
        blocks, slot = holding.block_ids, int(holding.slot)
        if row.stop > len(blocks) * self._block_size:
            raise ContractError(
                "a request has too few cache blocks",
                got=f"{len(blocks)} blocks of {self._block_size}",
                wanted=f"{row.stop} tokens",
                where=row.choice.owner,
            )
        last, count = self._filled[slot]
        if last is not holding:  # every admission makes a new one
            self._table[slot] = -1
            count = 0
        if count < len(blocks):
            self._table[slot, count : len(blocks)] = blocks[count:]
            self._filled[slot] = (holding, len(blocks))

    def _rows(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, first: int) -> Rows:
        ends = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
        longest = int((starts + counts).max(initial=0))
        width = blocks_for(longest, self._block_size)
        return Rows(
            start=first,
            stop=first + int(ends[-1]),
            cu_seqlens=self._put(ends),
            computed_tokens=self._put(starts),
            state_slots=self._put(slots),
            has_state=self._put(starts > 0),
            block_table=self._put(self._table[slots, :width]),
            max_context=longest,
        )

    def _part(
        self,
        everything: Rows,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        part: slice,
    ) -> Rows | None:
        chosen = slots[part]
        if len(chosen) == 0:
            return None
        if len(chosen) == len(slots):
            return everything
        return self._rows(chosen, starts[part], counts[part], int(counts[: part.start].sum()))

    def _slot_mapping(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        owner = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(int(ends[-1])) - ends[:-1][owner] + starts[owner]
        size = self._block_size
        return self._table[slots[owner], positions // size] * size + positions % size

    def _embeds(self, rows: Sequence[Scheduled], ends: np.ndarray) -> Embeds | None:
        """Collect the encoder rows whose positions lie inside the scheduled ranges."""
        index: list[int] = []
        values: list[Tensor] = []
        for row, first in zip(rows, ends[:-1].tolist(), strict=True):
            for picture in row.choice.request.pictures:
                low = max(row.start, picture.span.start)
                high = min(row.stop, picture.span.end)
                if low < high:
                    index.extend(range(first + low - row.start, first + high - row.start))
                    encoded = self._encoder_rows(picture)
                    values.append(encoded[low - picture.span.start : high - picture.span.start])
        if not values:
            return None
        joined = torch.cat([v.to(self._device) for v in values])
        return Embeds(rows=self._put(np.array(index, dtype=np.int64)), values=joined)

    def _put(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _token_ids(rows: Sequence[Scheduled]) -> np.ndarray:
    ids: list[int] = []
    for row in rows:
        ids += row.choice.token_ids[row.start : row.stop]
    return np.array(ids, dtype=np.int64)


def _logit_rows(row: Scheduled) -> tuple[LogitRow, ...]:
    """The rows of logits an entry needs: a prompt's own under `prompt_logprobs`, else the last."""
    choice = row.choice
    positions = range(row.stop, row.stop + 1)
    if choice.wants_prompt_logprobs and row.start < choice.prompt_len:
        positions = range(row.start + 1, row.stop + 1)
    draws_at = row.stop if row.reaches_end and len(choice.token_ids) < choice.max_len else -1
    return tuple(
        LogitRow(
            choice=choice,
            position=p,
            target=choice.token_ids[p] if p < choice.prompt_len else None,
            draws=p == draws_at,
        )
        for p in positions
    )


def _logit_index(logit_rows: Sequence[Sequence[LogitRow]], ends: np.ndarray) -> np.ndarray:
    index: list[int] = []
    for rows, end in zip(logit_rows, ends[1:].tolist(), strict=True):
        index.extend(range(end - len(rows), end))
    return np.array(index, dtype=np.int64)
