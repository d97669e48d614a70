"""From rows of logits to tokens and log-probabilities.

Owns what changes logits before the draw (bias, bans, penalties, grammar masks) and the one host
sync of a step. Knows no scheduler; the draw itself is the `sample` op.
Invariant: a token depends on the row's logits, its parameters, its past, its seed and its
position, and on nothing else in the step; reported log-probabilities are the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from oxplow.engine.batch import LogitRow
from oxplow.engine.request import Choice
from oxplow.ops.table import OpTable

_LIMIT = 1e30  # of penalised logits; divided by the coldest temperature still finite
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural-log probability and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a row of logits gave: a token where one was wanted, likewise a log-probability."""

    is_finite: bool
    token_id: int | None
    logprob: TokenLogprob | None
    is_stuck: bool = False  # the grammar allows no token here


@dataclass(slots=True)
class _Past:
    """Token statistics of one choice, on the device: what was seen, what was produced how often."""

    seen: Tensor  # [V] bool, prompt and answer
    produced: Tensor  # [V] float32, answer only
    num_counted: int


class Sampler:
    """Draws for all rows of a step at once."""

    def __init__(self, ops: OpTable, eos_token_ids: Sequence[int]) -> None:
        self._ops, self._eos = ops, tuple(eos_token_ids)
        self._past: dict[str, _Past] = {}
        self._settings: tuple[tuple[object, ...], tuple[Tensor, ...]] = ((), ())

    def forget(self, owner: str) -> None:
        """Drop what is kept for a choice."""
        self._past.pop(owner, None)

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Sequence[LogitRow]) -> list[Drawn]:
        """Return one result per row of logits [L, V] float32; logits are not changed."""
        if not rows:
            return []
        masks = {
            i: _allowed(row.choice, logits.shape[-1]) for i, row in enumerate(rows) if row.draws
        }
        drawing = list(masks)
        if len(drawing) == len(rows):
            tokens = self._sample(logits, rows, masks)
        else:
            tokens = torch.full((len(rows),), -1, dtype=torch.int64, device=logits.device)
            if drawing:
                at = torch.tensor(drawing, device=logits.device)
                tokens.index_put_((at,), self._sample(logits, rows, masks))
        wanted = [i for i, row in enumerate(rows) if _num_top(row) is not None]
        # ids below 2**24 are exact in float32; a NaN comes through both extremes
        columns = [tokens.float(), logits.amax(-1), logits.amin(-1)]
        width = max((_num_top(rows[i]) or 0 for i in wanted), default=0)
        if wanted:
            columns += self._logprobs(logits, rows, tokens, width)
        packed = torch.stack(columns, 1).tolist()  # the one host sync of a step
        results = [_unpack(row, values, width) for row, values in zip(rows, packed, strict=True)]
        for i, mask in masks.items():
            if mask is not None and not mask.any():
                results[i] = Drawn(results[i].is_finite, None, None, is_stuck=True)
        return results

    def _sample(
        self, logits: Tensor, rows: Sequence[LogitRow], masks: Mapping[int, np.ndarray | None]
    ) -> Tensor:
        chosen = [rows[i] for i in masks]
        if len(chosen) < len(rows):
            logits = logits[torch.tensor(list(masks), device=logits.device)]
        is_masked = any(mask is not None for mask in masks.values())
        if is_masked or any(_changes_logits(row.choice) for row in chosen):
            logits = self._adjusted(logits, chosen, list(masks.values()))
        positions = torch.tensor([row.position for row in chosen], dtype=torch.int64)
        return self._ops.sample(
            logits, *self._settings_of(chosen, logits.device), positions.to(logits.device)
        )

    def _settings_of(self, rows: Sequence[LogitRow], device: torch.device) -> tuple[Tensor, ...]:
        """Return temperature, top-k, top-p, min-p and seed of the rows, made anew on a change."""
        wanted = tuple(
            (_heat(p.temperature), p.top_k, p.top_p, p.min_p, row.choice.seed)
            for row in rows
            for p in (row.choice.request.params,)
        )
        kept, tensors = self._settings
        if kept != wanted:
            formats = (torch.float32, torch.int64, torch.float32, torch.float32, torch.int64)
            tensors = tuple(
                torch.tensor(column, dtype=dtype, device=device)
                for column, dtype in zip(zip(*wanted, strict=True), formats, strict=True)
            )
            self._settings = wanted, tensors
        return tensors

    def _adjusted(
        self, logits: Tensor, rows: Sequence[LogitRow], masks: Sequence[np.ndarray | None]
    ) -> Tensor:
        """Return a copy of logits with penalties, bias, bans and masks applied, in that order."""
        logits = logits.clone()
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            choice = row.choice
            if choice.request.params.has_penalties:
                self._penalise(logits[i], choice)
            bias = choice.request.params.logit_bias
            if bias:
                ids = torch.tensor(list(bias), dtype=torch.int64, device=logits.device)
                logits[i, ids] += torch.tensor(
                    list(bias.values()), dtype=logits.dtype, device=logits.device
                )
            banned = self._banned(choice)
            if banned:
                logits[i, torch.tensor(banned, device=logits.device)] = float("-inf")
            if mask is not None and mask.any():
                banned_here = torch.from_numpy(~mask).to(logits.device)
                logits[i].masked_fill_(banned_here, float("-inf"))
        return logits

    def _penalise(self, row: Tensor, choice: Choice) -> None:
        """Apply repetition (prompt and answer), then frequency and presence (answer) to one row."""
        params, past = choice.request.params, self._counted(choice, row)
        strength = params.repetition_penalty
        if strength != 1:
            pushed = torch.where(row > 0, row / strength, row * strength)
            row.copy_(torch.where(past.seen, pushed, row))
        row -= params.frequency_penalty * past.produced
        row -= params.presence_penalty * (past.produced > 0)
        row.clamp_(-_LIMIT, _LIMIT)  # a penalty next to 0 or far from it must not make infinities

    def _counted(self, choice: Choice, row: Tensor) -> _Past:
        """Bring the choice's statistics up to date; they are rebuilt where the text was cut."""
        past = self._past.get(choice.owner)
        if past is None or past.num_counted > len(choice.token_ids):
            seen = torch.zeros(row.shape[0], dtype=torch.bool, device=row.device)
            prompt = torch.tensor(choice.token_ids[: choice.prompt_len], device=row.device)
            seen[prompt] = True
            past = _Past(seen, torch.zeros_like(row), choice.prompt_len)
            self._past[choice.owner] = past
        new = choice.token_ids[past.num_counted :]
        if new:
            ids = torch.tensor(new, dtype=torch.int64, device=row.device)
            past.seen[ids] = True
            past.produced.index_add_(0, ids, torch.ones(len(new), device=row.device))
            past.num_counted = len(choice.token_ids)
        return past

    def _banned(self, choice: Choice) -> list[int]:
        """Return the tokens that may not come yet: ends and stops before `min_tokens`."""
        params = choice.request.params
        if choice.num_answered >= params.min_tokens:
            return []
        return [*self._eos, *params.stop_token_ids]

    def _logprobs(
        self, logits: Tensor, rows: Sequence[LogitRow], tokens: Tensor, width: int
    ) -> list[Tensor]:
        """Return columns: the wanted token's log-probability, then ids and values of the best."""
        given = [-1 if row.target is None else row.target for row in rows]
        targets = torch.tensor(given, dtype=torch.int64, device=logits.device)
        targets = torch.where(targets < 0, tokens, targets).clamp_min(0)
        values = logits.log_softmax(-1)
        columns = [values.gather(1, targets[:, None])[:, 0]]
        if width:
            best, ids = values.topk(min(width, logits.shape[-1]), -1)
            columns += [*ids.float().unbind(1), *best.unbind(1)]
        return columns


def _heat(temperature: float) -> float:
    """Return the temperature; what is colder than float32 can divide by draws as greedy does."""
    return temperature if temperature >= _COLDEST else 0.0


def _num_top(row: LogitRow) -> int | None:
    """How many alternatives the row reports; None where no log-probability is wanted."""
    params = row.choice.request.params
    if row.draws:
        return params.logprobs
    is_wanted = row.choice.wants_prompt_logprobs and row.target is not None
    return params.prompt_logprobs if is_wanted else None


def _changes_logits(choice: Choice) -> bool:
    """Tell whether anything but a grammar changes a choice's logits."""
    params = choice.request.params
    return bool(
        params.has_penalties or params.logit_bias or choice.num_answered < params.min_tokens
    )


def _allowed(choice: Choice, vocab_size: int) -> np.ndarray | None:
    """Return [V] bool of what the choice's grammar allows, None where it allows everything.

    Tokens that no word covers (padding of the vocabulary) are not allowed.
    """
    words = None if choice.mask is None else choice.mask.allowed_words()
    if words is None:
        return None
    raw = np.ascontiguousarray(np.asarray(words), dtype="<i4").view(np.uint8)
    bits = np.unpackbits(raw, bitorder="little")[:vocab_size].astype(bool)
    return np.pad(bits, (0, vocab_size - len(bits)))


def _unpack(row: LogitRow, values: Sequence[float], width: int) -> Drawn:
    is_finite = isfinite(values[1]) and isfinite(values[2])
    token = int(values[0]) if row.draws and is_finite else None
    if token is not None and token < 0:
        return Drawn(is_finite, None, None, is_stuck=True)
    top = _num_top(row)
    if top is None or not is_finite:
        return Drawn(is_finite, token, None)
    wanted = token if row.target is None else row.target
    if wanted is None:
        raise AssertionError("a log-probability is wanted of no token")
    count = (len(values) - 4) // 2
    best = [(int(values[4 + i]), values[4 + count + i]) for i in range(min(top, count))]
    return Drawn(is_finite, token, TokenLogprob(wanted, values[3], tuple(best)))
