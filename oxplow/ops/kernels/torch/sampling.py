"""Portable sampling: cuts and draws whose tokens do not depend on the batch or on how it is split.

Owns plain torch implementations for any device. Knows the contract's names, not the engine.
Invariant: everything that decides a token is elementwise, a maximum, a stable sort or an integer
sum, so no order of additions can change it; the noise of a token is a hash of (seed, position, id).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oxplow.ops.table import Kernel

_TILE = 2**20
"""Tokens hashed at a time, over all rows: bounds the int64 scratch to 16 MiB."""

_SORTED = 2**24
"""Tokens sorted at a time, over all rows: bounds one call's scratch to about 600 MiB."""

_MASS = 2.0**42
"""Weight 1 as an integer: 2**20 such weights still fit into int64, and exp rounds coarser."""


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_SEED_SALT = 0x6F78706C6F77


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a call that are drawn, not argmaxed: logits [R, V], the rest [R, 1]."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor  # lowest scaled logit that min_p lets pass
    keys: Tensor


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw one token a row, token_ids [N] int64; -1 where the row has no finite maximum.

    One host sync tells which rows are drawn and which of them need a sort (top-k or top-p): the
    others never pay for it. Memory: _TILE hashed and _SORTED sorted tokens at a time.
    """
    logits = logits.float()
    peak, tokens = logits.max(dim=-1)  # the first of equal maxima; NaN wins
    if temperature.device.type == "cpu" and not any(t > 0 for t in temperature.tolist()):
        return tokens.masked_fill_(~peak.isfinite(), -1)
    drawn = temperature > 0
    cut = (top_k > 0) & (top_k < logits.shape[1]) | (top_p < 1)
    kinds = (drawn.int() * (1 + cut.int())).tolist()  # the host sync: 0 greedy, 1 drawn, 2 cut too
    if not any(kinds):
        return tokens.masked_fill(~peak.isfinite(), -1)
    heat = torch.where(drawn, temperature, 1.0)
    rows = _Rows(
        logits=logits,
        temperature=heat.unsqueeze(1),
        top_k=torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1),
        top_p=top_p.unsqueeze(1),
        floor=(peak / heat + min_p.log()).unsqueeze(1),
        keys=row_keys(seeds, positions).unsqueeze(1),
    )
    for kind, draw in ((1, _draw_from_all), (2, _draw_from_cut)):
        chosen = [i for i, k in enumerate(kinds) if k == kind]
        if len(chosen) == len(kinds):
            tokens = draw(rows)
        elif chosen:
            some = torch.tensor(chosen, device=logits.device)
            tokens = tokens.index_copy(0, some, draw(_select(rows, some)))
    return tokens.masked_fill(~peak.isfinite(), -1)


def _select(rows: _Rows, some: Tensor | slice) -> _Rows:
    return _Rows(
        rows.logits[some], rows.temperature[some], rows.top_k[some],
        rows.top_p[some], rows.floor[some], rows.keys[some],
    )  # fmt: skip


def _draw_from_all(rows: _Rows) -> Tensor:
    """Draw where neither top-k nor top-p cuts; min-p needs no order."""
    return best_of_shard(rows.logits, rows.temperature, rows.floor, rows.keys, first_token=0)[1]


def best_of_shard(
    logits: Tensor, temperature: Tensor, floor: Tensor, keys: Tensor, *, first_token: int
) -> tuple[Tensor, Tensor]:
    """Return (score [N], token id [N]) of the best token of a slice of the vocabulary.

    logits [N, Vs] are tokens first_token .. first_token + Vs - 1; temperature (> 0), floor (lowest
    scaled logit, -inf: none) and keys (`row_keys`) are [N, 1]. The largest score of all slices, the
    lowest id among equals, is the draw over the whole vocabulary, bit for bit.
    """
    N, V = logits.shape
    best = logits.new_full((N,), float("-inf"))
    tokens = torch.full((N,), first_token, dtype=torch.int64, device=logits.device)
    width = max(1, _TILE // max(1, N))
    for start in range(0, V, width):
        scaled = logits[:, start : start + width] / temperature
        ids = torch.arange(scaled.shape[1], device=logits.device) + (first_token + start)
        scaled.masked_fill_(scaled < floor, float("-inf"))
        score, index = scaled.sub_(log_exponential(keys, ids)).max(dim=-1)
        better = score > best  # not >=: the lower id keeps a tie
        best = torch.where(better, score, best)
        tokens = torch.where(better, index + (first_token + start), tokens)
    return best, tokens


def _draw_from_cut(rows: _Rows) -> Tensor:
    """Draw where top-k or top-p cuts: sort, then keep a prefix of each row."""
    height = max(1, _SORTED // rows.logits.shape[1])
    parts = [
        _draw_sorted(_select(rows, slice(start, start + height)))
        for start in range(0, len(rows.logits), height)
    ]
    return torch.cat(parts)


def _draw_sorted(rows: _Rows) -> Tensor:
    # logits, not scaled ones: a division could make two of them equal
    ordered, tokens = rows.logits.sort(dim=-1, descending=True, stable=True)
    scaled = ordered.div_(rows.temperature)
    keep = torch.arange(scaled.shape[1], device=scaled.device) < rows.top_k
    mass = (scaled - scaled[:, :1]).exp_().mul_(_MASS).long().mul_(keep)
    before = mass.cumsum(-1).sub_(mass)
    limit = (mass.sum(-1, keepdim=True).float() * rows.top_p).long()
    keep &= (before < limit) | (rows.top_p >= 1)
    keep[:, 0] = True  # a top_p of 0 still leaves the best token
    keep &= scaled >= rows.floor
    score = scaled.sub_(log_exponential(rows.keys, tokens)).masked_fill_(~keep, float("-inf"))
    best = score.amax(dim=-1, keepdim=True)
    return tokens.masked_fill_(score != best, scaled.shape[1]).amin(dim=-1)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the stream [N] int64 of every (seed, position)."""
    return _mix(_mix(seeds.long() ^ _SEED_SALT) + positions.long())


def log_exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return log(E) float32 of every token, E ~ Exp(1): minus its Gumbel noise, always finite.

    keys [N, 1], tokens [V] or [N, V] int64; result [N, V].
    """
    uniform = noise_bits(keys, tokens).float().add_(0.5)
    # a hair under 2**-32: the largest float32 must stay below 1
    uniform.mul_((1 - 2.0**-24) * 2.0**-32)
    return uniform.neg_().log1p_().neg_().log_()


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return 32 hashed bits of every token as int64 [N, V]; int64 products wrap around."""
    x = (tokens * _GOLDEN + _GOLDEN) + keys
    x ^= _shifted(x, 30)
    x *= _FIRST
    x ^= _shifted(x, 27)
    x *= _SECOND
    return _shifted(x, 32)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right as if x were unsigned: torch's shift copies the sign."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


KERNELS = (Kernel(op="sample", name="torch", run=sample, invariant=True),)
