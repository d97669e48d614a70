"""Contract of the pooled index: the choice of pools per query.

Owns meaning only: the reference scores and sorts every candidate. Knows no kernel and no model.
Invariant: every reference works in the dtype of its floating inputs, so float64 in gives the truth;
an exact tie goes to the lowest pool, in the reference as in the law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import UNIT_ROUNDOFF, Evidence, Picks, Verdict
from oxplow.contracts.paging import (
    cu_seqlens_fit,
    paged_blocks,
    paged_rows,
    ragged,
    spans,
    table_reaches,
)
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor

POOL = 4
"""Tokens of a pool in most cases; the released models use the same."""


def pool_scores(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """Score keys [pools, Di] for one query [Hi, Di]: sum_h w_h relu(q_h.k / sqrt(Di)), [pools]."""
    # sums over the last axis alone: equal keys have equal scores, so that a tie stays a tie
    dots = (query.unsqueeze(0) * keys.unsqueeze(1)).sum(-1) * query.shape[1] ** -0.5
    return (dots.relu() * head_weights).sum(-1)


def _scored_rows(args: Mapping[str, Any], score: Callable[..., Tensor]) -> list[tuple[int, Tensor]]:
    """Return (position, scores of its candidates) for every query, in row order."""
    P, PB = args["pool_size"], args["pool_cache"].shape[1]
    rows = []
    for i, (a, b) in enumerate(spans(args["cu_seqlens"])):
        for t in range(a, b):
            position = int(args["computed_tokens"][i]) + t - a
            count = (position + 1) // P
            blocks = args["block_table"][i, : -(-count // PB)]
            keys = args["pool_cache"][blocks].flatten(0, 1)[:count]
            rows.append((position, score(args["query"][t], args["head_weights"][t], keys)))
    return rows


def index_select_reference(
    query: Tensor,
    head_weights: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
    *,
    top_pools: int,
    pool_size: int,
) -> dict[str, Tensor]:
    """Score every complete pool of every query, sort them all, take the first, add the raw tail."""
    args = {
        "query": query,
        "head_weights": head_weights,
        "pool_cache": pool_cache,
        "block_table": block_table,
        "computed_tokens": computed_tokens,
        "cu_seqlens": cu_seqlens,
        "pool_size": pool_size,
    }
    width = top_pools * pool_size + pool_size - 1
    selected = torch.full((len(query), width), -1, dtype=torch.int32)
    for t, (position, scores) in enumerate(_scored_rows(args, pool_scores)):
        best = scores.sort(descending=True, stable=True).indices[:top_pools].sort().values.tolist()
        tokens = [p * pool_size + j for p in best for j in range(pool_size)]
        tokens += range((position + 1) // pool_size * pool_size, position + 1)
        selected[t, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    return {"selected": selected}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicks:
    """Judge rows of ascending positions: whole pools by `picks`, then the tail, then -1."""

    picks: Picks

    def judge(self, evidence: Evidence) -> Verdict:
        """Check the form of every row exactly, then the chosen pools with the law's margin."""
        P, got = evidence.args["pool_size"], evidence.got
        for row, (mine, want) in enumerate(
            zip(got.tolist(), evidence.truth.long().tolist(), strict=True)
        ):
            fault = _form_fault(mine, want, P)
            if fault:
                reason = f"row {row}: {fault}: got {mine}, for example {want} is right"
                return Verdict(ok=False, worst=float("inf"), index=(row,), reason=reason)
        pooled = dataclasses.replace(
            evidence, got=_pools_of(got, P), truth=_pools_of(evidence.truth.to(got.dtype), P)
        )
        return self.picks.judge(pooled)


def _form_fault(mine: list[int], want: list[int], P: int) -> str:
    used = sum(p >= 0 for p in want)
    tokens, tail = mine[:used], used % P
    if any(p != -1 for p in mine[used:]) or min(tokens, default=0) < 0:
        return f"wants {used} positions and then only -1"
    if any(a >= b for a, b in zip(tokens[:-1], tokens[1:], strict=True)):
        return "positions do not ascend"
    if tokens[used - tail :] != want[used - tail : used]:
        return f"the raw tail is {want[used - tail : used]}"
    starts = tokens[: used - tail : P]
    if tokens[: used - tail] != [s + j for s in starts if s % P == 0 for j in range(P)]:
        return "a pool is not whole"
    return ""


def _pools_of(selected: Tensor, P: int) -> Tensor:
    """Reduce well-formed rows to pool numbers, -1 for the tail and the pads."""
    used = (selected >= 0).sum(1, keepdim=True) // P
    first = selected[:, : selected.shape[1] - (P - 1) : P]
    return torch.where(torch.arange(first.shape[1]) < used, first // P, -1)


def _padded_scores(args: Mapping[str, Any], score: Callable[..., Tensor]) -> Tensor:
    """Return scores [T, most candidates] float64, -inf where a query has no such candidate."""
    wide = {k: v.double() if k in _SCORED else v for k, v in args.items()}
    rows = [scores for _, scores in _scored_rows(wide, score)]
    table = torch.full((len(rows), max((len(r) for r in rows), default=0) + 1), float("-inf"))
    table = table.double()
    for row, scores in zip(table, rows, strict=True):
        row[: len(scores)] = scores
    return table


_SCORED = ("query", "head_weights", "pool_cache")


def _margin(args: Mapping[str, Any]) -> Tensor:
    """Bound the float32 error of each row: the dot bound of its largest candidate."""
    Hi, Di = args["query"].shape[1:]

    def absolute(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        return pool_scores(query.abs(), weights.abs(), keys.abs())

    largest = _padded_scores(args, absolute).amax(1).clamp_min(0.0)
    return 4 * UNIT_ROUNDOFF[torch.float32] * (Hi + Di) ** 0.5 * largest.unsqueeze(1)


def _index_case(
    sequences: Sequence[tuple[int, int]],
    g: torch.Generator,
    *,
    heads: int = 4,
    width: int = 16,
    top: int = 8,
    pool: int = POOL,
    per_block: int = 4,
) -> Args:
    N, T = len(sequences), sum(n for _, n in sequences)
    pools = [(c + n) // pool for c, n in sequences]
    table, blocks = paged_blocks(pools, per_block, g)
    return {
        "query": torch.randn(T, heads, width, generator=g),
        "head_weights": torch.randn(T, heads, generator=g) * heads**-0.5,
        "pool_cache": paged_rows(table, pools, blocks, per_block, width, g),
        "block_table": table,
        "computed_tokens": torch.tensor([c for c, _ in sequences], dtype=torch.int64).reshape(N),
        "cu_seqlens": ragged([n for _, n in sequences]),
        "top_pools": top,
        "pool_size": pool,
    }


def _tied_case(g: torch.Generator, *, negative_weights: bool) -> Args:
    """Make most dot products negative: ReLU zeros them, and their scores tie at (minus) zero."""
    args = _index_case([(70, 30), (39, 1)], g, heads=2)
    args["query"] = args["query"].abs()
    sign = torch.randint(0, 8, args["pool_cache"].shape[:2], generator=g) > 0
    args["pool_cache"] = args["pool_cache"].abs() * torch.where(sign, -1.0, 1.0).unsqueeze(-1)
    if negative_weights:
        # a pool that scores at all is the worst, or (where the heads disagree) maybe the best
        args["head_weights"] = -args["head_weights"].abs()
        args["head_weights"][::3, 0] *= -1
    return args


def _twins_case(g: torch.Generator) -> Args:
    """Repeat eight keys over all pools: every cut runs through exact ties of real scores."""
    args = _index_case([(90, 12), (61, 3)], g)
    args["pool_cache"] = _by_pool(args, torch.randn(8, 16, generator=g).repeat(4, 1))
    return args


def _near_ties_case(g: torch.Generator) -> Args:
    """Let scores differ by less than bfloat16 can see but more than float32 rounding."""
    args = _index_case([(117, 8)], g)
    step = 1 + torch.arange(32.0).view(-1, 1)[torch.randperm(32, generator=g)] * 2e-4
    args["pool_cache"] = _by_pool(args, torch.randn(1, 16, generator=g) * step)
    args["head_weights"] = args["head_weights"].abs()
    return args


def _own_pool_case(g: torch.Generator) -> Args:
    """Point every query away from the pool that ends with it, and towards all others."""
    args = _index_case([(35, 29)], g, heads=1)
    keys = torch.rand(16, 16, generator=g) + 0.1
    args["query"] = args["query"].abs()
    args["head_weights"] = args["head_weights"].abs()
    keys[9:, :] *= -1  # the pools that complete during this call score zero
    args["pool_cache"] = _by_pool(args, keys)
    return args


def _by_pool(args: Args, keys: Tensor) -> Tensor:
    """Return the pool cache with pool p of every sequence holding keys[p], as far as both reach."""
    cache, PB = args["pool_cache"].clone(), args["pool_cache"].shape[1]
    for i, (a, b) in enumerate(spans(args["cu_seqlens"])):
        total = int(args["computed_tokens"][i]) + b - a
        for p in range(min(total // args["pool_size"], len(keys))):
            cache[args["block_table"][i, p // PB], p % PB] = keys[p]
    return cache


def _index_cost(args: Args) -> Cost:
    T, Hi, Di = args["query"].shape
    P, top, pairs, keys, sparse = args["pool_size"], args["top_pools"], 0, 0, 0
    for (a, b), known in zip(
        spans(args["cu_seqlens"]), args["computed_tokens"].tolist(), strict=True
    ):
        counts = [n // P for n in range(known + 1, known + b - a + 1) if n // P > top]
        pairs, sparse, keys = (
            pairs + sum(counts),
            sparse + len(counts),
            keys + max(counts, default=0),
        )
    moved = sparse * Hi * (Di * args["query"].element_size() + 4)
    moved += keys * Di * args["pool_cache"].element_size()
    return Cost(bytes=moved + 4 * T * (top * P + P - 1), flops=pairs * Hi * (2 * Di + 3))


INDEX_SELECT = OpContract(
    name="index_select",
    summary="Choose the best complete pools of each query and add its raw tail",
    source="model.md 6; DeepSeek-V3.2 (lightning indexer)",
    axes={
        "T": "queries",
        "N": "sequences",
        "Hi": "index heads",
        "Di": "index width",
        "B": "blocks",
        "PB": "pools of a block",
        "MB": "most blocks of a sequence",
        "W": "top_pools * P + P - 1",
    },  # fmt: skip
    inputs={
        "query": tensor(Role.ACT, "T Hi Di"),
        "head_weights": tensor(Role.F32, "T Hi"),
        "pool_cache": tensor(Role.ACT, "B PB Di"),
        "block_table": tensor(Role.INT, "N MB"),
        "computed_tokens": tensor(Role.INT, "N"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    scalars={
        "top_pools": "pools of a query at most",
        "pool_size": "tokens of a pool; a query at n visible tokens has n // pool_size candidates",
    },
    outputs={"selected": tensor(Role.INT, "T W")},
    constraints=(
        Constraint(
            "at least one pool and one token per pool",
            lambda a: a["top_pools"] >= 1 <= a["pool_size"],
        ),
        Constraint("cu_seqlens rises from 0 to T", lambda a: cu_seqlens_fit(a, "query")),
        Constraint(
            "block tables reach every complete pool",
            lambda a: table_reaches(a, a["pool_cache"].shape[1], a["pool_size"]),
        ),
    ),
    reference=index_select_reference,
    cases=(
        Case("chunked_prefill", CaseKind.ORDINARY, lambda g: _index_case([(40, 25)], g)),
        Case(
            "decode_batch", CaseKind.ORDINARY, lambda g: _index_case([(50, 1), (9, 1), (99, 1)], g)
        ),
        Case("decode_one", CaseKind.ORDINARY, lambda g: _index_case([(77, 1)], g)),
        Case(
            "one_among_empty",
            CaseKind.EDGE,
            lambda g: _index_case([(9, 0), (77, 1), (0, 0)], g),
            note="a single query whose sequence is not the first",
        ),
        Case("no_queries", CaseKind.EDGE, lambda g: _index_case([(0, 0), (50, 0)], g)),
        Case("few_pools", CaseKind.EDGE, lambda g: _index_case([(n, 1) for n in range(10)], g)),
        Case(
            "dense_limit",
            CaseKind.EDGE,
            lambda g: _index_case([(30, 9)] + [(n, 1) for n in range(30, 39)], g),
            note="n = 31 .. 39 around the last dense n of 35, in prefill and in decode",
        ),
        Case("block_edges", CaseKind.EDGE, lambda g: _index_case([(46, 4), (62, 3)], g, top=3)),
        Case(
            "pool_of_three",
            CaseKind.EDGE,
            lambda g: _index_case([(20, 9), (44, 1)], g, pool=3, top=5),
        ),
        Case(
            "cached_prefixes",
            CaseKind.EXCITATION,
            lambda g: _index_case([(0, 5), (7, 3), (128, 1), (0, 0), (1, 130)], g),
            note="start and end of a row's keys built with one offset for every sequence",
        ),
        Case(
            "own_pool_loses",
            CaseKind.EXCITATION,
            _own_pool_case,
            note="the pool that the query completes is offered early, or forced in",
        ),
        Case(
            "tied_at_zero",
            CaseKind.EXCITATION,
            lambda g: _tied_case(g, negative_weights=False),
            note="all ReLUs zero for most pools: an unspecified tie rule",
        ),
        Case(
            "tied_negative",
            CaseKind.EXCITATION,
            lambda g: _tied_case(g, negative_weights=True),
            note="negative weights: zero beats every score, so the ties are at the top",
        ),
        Case("twin_pools", CaseKind.EXCITATION, _twins_case, note="exact ties of non-zero scores"),
        Case("near_ties", CaseKind.EXCITATION, _near_ties_case, note="scores in reduced precision"),
    ),  # fmt: skip
    checks={
        "selected": PoolPicks(
            picks=Picks(scores=lambda a: _padded_scores(a, pool_scores), margin=_margin)
        )
    },
    cost=_index_cost,
)

CONTRACTS = (INDEX_SELECT,)
