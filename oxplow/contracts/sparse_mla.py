"""Contracts of sparse MLA: attention over the tokens that each query selected.

Owns meaning only: references attend pick by pick with expanded keys and values. Knows no kernel, no
model. Invariant: every reference works in the dtype of its floating inputs, so float64 in gives the
truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.mla import (
    ATTENTION_AXES,
    AttendOne,
    attention_bytes,
    attention_error_scale,
    attention_flops,
    attention_law,
    attention_weights,
    expanded_attention,
)
from oxplow.contracts.paging import (
    GARBAGE,
    cu_seqlens_fit,
    paged_blocks,
    paged_rows,
    ragged,
    spans,
    widened,
)
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor


def _attend_picks(attend: AttendOne, args: Mapping[str, Any]) -> Tensor:
    """Run `attend` for each query over its picks; a query without picks gives zeros, [T, H, Dv]."""
    query, cache, table = args["query"], args["cache"], args["block_table"]
    if "cu_seqlens" in args:
        table = table[
            [i for i, (a, b) in enumerate(spans(args["cu_seqlens"])) for _ in range(a, b)]
        ]
    out = query.new_zeros(*query.shape[:2], args["w_uv"].shape[1])
    for t, picks in enumerate(args["selected"].tolist()):
        rows = [cache[table[t, p // cache.shape[1]], p % cache.shape[1]] for p in picks if p >= 0]
        if rows:
            out[t] = attend(query[t], args["w_uk"], args["w_uv"], torch.stack(rows))
    return out


def sparse_mla_prefill_reference(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    selected: Tensor,
    cu_seqlens: Tensor,
) -> dict[str, Tensor]:
    """Attend each query to its picks in its own sequence, expanded."""
    args = {
        "query": query,
        "w_uk": w_uk,
        "w_uv": w_uv,
        "cache": cache,
        "block_table": block_table,
        "selected": selected,
        "cu_seqlens": cu_seqlens,
    }
    return {"o": _attend_picks(expanded_attention, args)}


def sparse_mla_decode_reference(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    selected: Tensor,
) -> dict[str, Tensor]:
    """Attend as in prefill, with one query per sequence."""
    one_each = torch.arange(len(query) + 1)
    return sparse_mla_prefill_reference(
        query, w_uk, w_uv, cache, block_table, selected, cu_seqlens=one_each
    )


def _sparse_case(
    sequences: Sequence[tuple[int, int]],
    g: torch.Generator,
    *,
    shape: tuple[int, int, int, int] = (3, 16, 12, 24),
    picks: int = 11,
    block_size: int = 8,
    scale: float = 1.0,
) -> Args:
    """Build (cached, new) sequences whose queries pick up to `picks` visible positions."""
    H, Dn, Dv, R = shape
    totals = [c + n for c, n in sequences]
    table, blocks = paged_blocks(totals, block_size, g)
    rows = []
    for c, n in sequences:
        for position in range(c, c + n):
            chosen = torch.randperm(position + 1, generator=g)[:picks].sort().values
            rows.append(torch.nn.functional.pad(chosen, (0, picks - len(chosen)), value=-1))
    args: Args = {
        "query": torch.randn(len(rows), H, Dn, generator=g) * scale,
        **attention_weights(H, Dn, Dv, R, g),
        "cache": paged_rows(table, totals, blocks, block_size, R, g),
        "block_table": table,
        "selected": torch.stack(rows).int() if rows else torch.empty(0, picks, dtype=torch.int32),
        "cu_seqlens": ragged([n for _, n in sequences]),
    }
    return args


def _decode_case(
    totals: Sequence[int],
    g: torch.Generator,
    *,
    empty: Sequence[int] = (),
    shape: tuple[int, int, int, int] = (3, 16, 12, 24),
    picks: int = 11,
) -> Args:
    """Build one query per sequence; rows in `empty` have no pick and a garbage block table."""
    args = _sparse_case([(t - 1, 1) for t in totals], g, shape=shape, picks=picks)
    del args["cu_seqlens"]
    args["selected"][list(empty)] = -1
    args["block_table"][list(empty)] = GARBAGE[1]
    return args


def _picked_rows(args: Mapping[str, Any]) -> tuple[int, int]:
    """Return (picks, distinct tokens picked)."""
    selected = args["selected"]
    if "cu_seqlens" in args:
        owner = torch.repeat_interleave(args["cu_seqlens"].long().diff())
    else:
        owner = torch.arange(len(selected))
    pairs = torch.stack([owner.unsqueeze(1).expand_as(selected), selected.long()], -1)[
        selected >= 0
    ]
    return len(pairs), len(pairs.unique(dim=0)) if len(pairs) else 0


def _sparse_cost(args: Args) -> Cost:
    pairs, keys = _picked_rows(args)
    return Cost(
        bytes=attention_bytes(keys, args),
        flops=attention_flops(len(args["query"]), pairs, keys, args),
    )


def _picks_distinct(args: Args) -> bool:
    rows = [[p for p in row if p >= 0] for row in args["selected"].tolist()]
    return all(len(set(row)) == len(row) for row in rows)


_SPARSE_INPUTS = {
    "query": tensor(Role.ACT, "T H Dn"),
    "w_uk": tensor(Role.WEIGHT, "H Dn R"),
    "w_uv": tensor(Role.WEIGHT, "H Dv R"),
    "cache": tensor(Role.ACT, "B S R"),
    "block_table": tensor(Role.INT, "N MB"),
    "selected": tensor(Role.INT, "T K"),
    "cu_seqlens": tensor(Role.INT, "N+1"),
}
_DISTINCT = Constraint("a query picks a position once; -1 anywhere is no pick", _picks_distinct)

_LAW = attention_law(lambda a: _attend_picks(attention_error_scale, widened(a)))

SPARSE_MLA_PREFILL = OpContract(
    name="sparse_mla_prefill",
    summary="Attend each query to its selected tokens through the latent cache",
    source="model.md 5, 6; DeepSeek-V3.2 (sparse MLA)",
    axes=ATTENTION_AXES,
    inputs=_SPARSE_INPUTS,
    outputs={"o": tensor(Role.ACT, "T H Dv")},
    constraints=(
        _DISTINCT,
        Constraint("cu_seqlens rises from 0 to T", lambda a: cu_seqlens_fit(a, "query")),
    ),
    reference=sparse_mla_prefill_reference,
    cases=(
        Case(
            "ragged",
            CaseKind.ORDINARY,
            lambda g: _sparse_case([(0, 5), (7, 3), (128, 1), (1, 30)], g),
        ),
        Case(
            "nano_heads",
            CaseKind.ORDINARY,
            lambda g: _sparse_case([(40, 9)], g, shape=(6, 64, 64, 128), picks=35),
        ),
        Case("no_queries", CaseKind.EDGE, lambda g: _sparse_case([(0, 0), (9, 0)], g)),
        Case(
            "empty_between",
            CaseKind.EDGE,
            lambda g: _sparse_case([(0, 1), (5, 0), (0, 0), (15, 2)], g, block_size=4),
        ),
        Case(
            "second_sequence_offsets",
            CaseKind.EXCITATION,
            lambda g: _sparse_case([(3, 6), (0, 6), (17, 6)], g, block_size=4),
            note="the first sequence's block table, or a row number, taken for everybody",
        ),
        Case(
            "sharp_scores",
            CaseKind.EXCITATION,
            lambda g: _sparse_case([(60, 4)], g, scale=12.0, picks=40),
            note="a softmax without its maximum, or with a wrong scale",
        ),
    ),
    checks={"o": _LAW},
    cost=_sparse_cost,
)

SPARSE_MLA_DECODE = OpContract(
    name="sparse_mla_decode",
    summary="Attend one query per sequence to its selected tokens through the latent cache",
    source="model.md 5, 6; DeepSeek-V3.2 (sparse MLA)",
    axes={**ATTENTION_AXES, "N": "sequences, one query each"},
    inputs={
        **{k: v for k, v in _SPARSE_INPUTS.items() if k != "cu_seqlens"},
        "query": tensor(Role.ACT, "N H Dn"),
        "selected": tensor(Role.INT, "N K"),
    },
    outputs={"o": tensor(Role.ACT, "N H Dv")},
    constraints=(_DISTINCT,),
    reference=sparse_mla_decode_reference,
    cases=(
        Case("batch", CaseKind.ORDINARY, lambda g: _decode_case((40, 3, 17, 64), g)),
        Case(
            "one",
            CaseKind.ORDINARY,
            lambda g: _decode_case((33,), g, shape=(6, 64, 64, 128), picks=19),
        ),
        Case("nobody", CaseKind.EDGE, lambda g: _decode_case((), g)),
        Case("block_edges", CaseKind.EDGE, lambda g: _decode_case((1, 7, 8, 9, 16), g)),
        Case(
            "rows_without_picks",
            CaseKind.EXCITATION,
            lambda g: _decode_case((5, 30, 2, 9), g, empty=(0, 2)),
            note="softmax over nothing, garbage block tables read, pads counted as a token",
        ),
        Case(
            "single_pick",
            CaseKind.EXCITATION,
            lambda g: _decode_case((21, 4), g, picks=1, shape=(2, 5, 9, 7)),
            note="odd sizes; the answer is one value row, whatever the scores are",
        ),
    ),
    checks={"o": _LAW},
    cost=_sparse_cost,
)


CONTRACTS = (SPARSE_MLA_PREFILL, SPARSE_MLA_DECODE)
