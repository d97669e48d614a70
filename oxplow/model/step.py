"""One step's input: the rows of every request, and where their caches live.

Owns the records that a forward pass reads and the builder that makes them from host lists. Knows
no weights and no scheduler. Invariant: decode rows (one token of a request that has state) come
first, prefill rows follow grouped by request; every tensor that the mixers need is made here
once, not in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oxplow.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """What one request contributes to a step, on the host.

    `computed_tokens` tokens are in the caches already; `token_ids` are the new ones. `block_ids`
    are the request's cache blocks in order, `slot` its state slot. `all_logits` asks for logits
    of every row instead of the last one only.
    """

    token_ids: Sequence[int]
    computed_tokens: int
    slot: int
    block_ids: Sequence[int]
    all_logits: bool = False

    @property
    def is_decode(self) -> bool:
        """True for a single token of a request that has state."""
        return self.computed_tokens > 0 and len(self.token_ids) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A consecutive group of rows [start, stop) of a step, with its sequences' metadata.

    `cu_seqlens` [N+1] int32 counts from `start`; `computed_tokens`, `state_slots` [N] int64,
    `has_state` [N] bool, `block_table` [N, blocks] int64 padded with -1; `max_context` is the
    longest visible length.
    """

    start: int
    stop: int
    cu_seqlens: Tensor
    computed_tokens: Tensor
    state_slots: Tensor
    has_state: Tensor
    block_table: Tensor
    max_context: int

    def of(self, x: Tensor) -> Tensor:
        """Return this group's rows of a step's x [T, ...]: x itself where they are all of them."""
        if self.stop - self.start == x.shape[0]:
            return x
        return x[self.start : self.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeds:
    """Rows of the step whose embedding comes from an encoder: `rows` [M] int64, `values` [M,
    hidden].
    """

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Everything one forward pass reads beside weights and caches.

    `token_ids` and `slot_mapping` [T] int64; `all_rows` covers decode and prefill rows together,
    `decode` and `prefill` are its two parts (None when empty); `logit_rows` [L] int64 are the
    rows to project.
    """

    token_ids: Tensor
    slot_mapping: Tensor
    all_rows: Rows
    decode: Rows | None
    prefill: Rows | None
    logit_rows: Tensor
    embeds: Embeds | None = None


def build_step(
    sequences: Sequence[SequenceRows],
    *,
    block_size: int,
    device: torch.device,
    embeds: Embeds | None = None,
) -> StepInput:
    """Lay out `sequences` as one step; decode rows must come first.

    Raises ContractError when the order is wrong, a request has too few blocks, or a slot is used
    twice.
    """
    decodes = sum(s.is_decode for s in sequences)
    if any(s.is_decode for s in sequences[decodes:]):
        raise ContractError(
            "decode rows must come before prefill rows", got=[s.is_decode for s in sequences]
        )
    slots = [s.slot for s in sequences]
    if len(set(slots)) != len(slots):
        raise ContractError("a state slot appears twice in one step", got=slots)
    for s in sequences:
        reach = s.computed_tokens + len(s.token_ids)
        if reach > len(s.block_ids) * block_size:
            raise ContractError(
                "a request has too few cache blocks",
                got=f"{len(s.block_ids)} blocks of {block_size}",
                wanted=f"{reach} tokens",
            )
    mapping = [
        s.block_ids[p // block_size] * block_size + p % block_size
        for s in sequences
        for p in range(s.computed_tokens, s.computed_tokens + len(s.token_ids))
    ]
    everything = _rows(sequences, 0, device)
    return StepInput(
        token_ids=torch.tensor(
            [t for s in sequences for t in s.token_ids], dtype=torch.int64, device=device
        ),
        slot_mapping=torch.tensor(mapping, dtype=torch.int64, device=device),
        all_rows=everything,
        decode=_rows(sequences[:decodes], 0, device) if decodes else None,
        prefill=_rows(sequences[decodes:], decodes, device) if decodes < len(sequences) else None,
        logit_rows=_logit_rows(sequences, device),
        embeds=embeds,
    )


def _rows(sequences: Sequence[SequenceRows], start: int, device: torch.device) -> Rows:
    ends = [0]
    for s in sequences:
        ends.append(ends[-1] + len(s.token_ids))
    width = max((len(s.block_ids) for s in sequences), default=0)
    table = [[*s.block_ids, *[-1] * (width - len(s.block_ids))] for s in sequences]

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Rows(
        start=start,
        stop=start + ends[-1],
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        computed_tokens=integers([s.computed_tokens for s in sequences]),
        state_slots=integers([s.slot for s in sequences]),
        has_state=torch.tensor(
            [s.computed_tokens > 0 for s in sequences], dtype=torch.bool, device=device
        ),
        block_table=integers(table).view(len(sequences), width),
        max_context=max((s.computed_tokens + len(s.token_ids) for s in sequences), default=0),
    )


def _logit_rows(sequences: Sequence[SequenceRows], device: torch.device) -> Tensor:
    rows: list[int] = []
    at = 0
    for s in sequences:
        at += len(s.token_ids)
        if s.token_ids:
            rows.extend(range(at - len(s.token_ids), at) if s.all_logits else [at - 1])
    return torch.tensor(rows, dtype=torch.int64, device=device)
