"""Contracts of dense MLA: latents into paged blocks, attention over all earlier tokens.

Owns meaning only: references expand keys and values per token (k_j = w_uk c_j, v_j = w_uv c_j),
with plain loops. Also owns what sparse attention shares: weights, law, cost. Knows no kernel and no
model. Invariant: every reference works in the dtype of its floating inputs, so float64 in gives the
truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxplow.contracts.laws import Close, Exact
from oxplow.contracts.paging import (
    cu_seqlens_fit,
    paged_blocks,
    paged_rows,
    ragged,
    spans,
    table_reaches,
    tensor_bytes,
    widened,
)
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor

# latent_write


def latent_write_reference(
    latent: Tensor, slot_mapping: Tensor, cache: Tensor
) -> dict[str, Tensor]:
    """Copy token by token; a negative slot is no slot."""
    cache = cache.clone()
    for row, slot in zip(latent, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row
    return {"cache": cache}


def _latent_write_case(
    num_tokens: int, width: int, skipped: Sequence[int], g: torch.Generator
) -> Args:
    blocks, block_size = num_tokens // 4 + 3, 5
    cache = torch.full((blocks, block_size, width), float("nan"))
    cache[1] = torch.randn(block_size, width, generator=g)  # tokens of others
    free = torch.tensor([s for s in range(blocks * block_size) if s // block_size != 1])
    slots = free[torch.randperm(len(free), generator=g)[:num_tokens]]
    slots[list(skipped)] = -1
    return {
        "latent": torch.randn(num_tokens, width, generator=g),
        "slot_mapping": slots,
        "cache": cache,
    }


def _slots_distinct(args: Args) -> bool:
    used = [s for s in args["slot_mapping"].tolist() if s >= 0]
    return (
        len(set(used)) == len(used)
        and max(used, default=0) < args["cache"].shape[0] * args["cache"].shape[1]
    )


LATENT_WRITE = OpContract(
    name="latent_write",
    summary="Store each token's latent at its slot of the paged cache",
    source="model.md 5",
    axes={
        "T": "tokens",
        "R": "latent width, with un-rotated key dims where a model has them",
        "B": "blocks",
        "S": "block size",
    },
    inputs={
        "latent": tensor(Role.ACT, "T R"),
        "slot_mapping": tensor(Role.INT, "T"),
        "cache": tensor(Role.ACT, "B S R"),
    },
    outputs={},
    mutates=("cache",),
    constraints=(
        Constraint(
            "slots are distinct and inside the cache; a negative one is skipped", _slots_distinct
        ),
    ),
    reference=latent_write_reference,
    cases=(
        Case("prefill", CaseKind.ORDINARY, lambda g: _latent_write_case(23, 32, (), g)),
        Case("decode_one", CaseKind.ORDINARY, lambda g: _latent_write_case(1, 128, (), g)),
        Case("no_tokens", CaseKind.EDGE, lambda g: _latent_write_case(0, 8, (), g)),
        Case("all_skipped", CaseKind.EDGE, lambda g: _latent_write_case(3, 7, (0, 1, 2), g)),
        Case(
            "padding_rows",
            CaseKind.EXCITATION,
            lambda g: _latent_write_case(9, 13, (0, 4, 8), g),
            note="a slot of -1 taken for the last row of memory, as an index from the end",
        ),
    ),
    checks={"cache": Exact()},
    cost=lambda a: Cost(
        bytes=tensor_bytes(a["slot_mapping"])
        + 2
        * int((a["slot_mapping"] >= 0).sum())
        * a["latent"].shape[1]
        * a["latent"].element_size(),
        flops=0,
    ),
)


# what the attention contracts share


AttendOne: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of one query [H, Dq] over rows [S, Rc] of the cache, given w_uk and w_uv: [H, Dv]."""


def expanded_attention(query: Tensor, w_uk: Tensor, w_uv: Tensor, rows: Tensor) -> Tensor:
    """Attend one query with keys and values of their own per head: softmax(q k / sqrt(Dq)) v."""
    keys, values = _expanded(w_uk, w_uv, rows)
    weights = _scores(query, keys).softmax(-1)
    return torch.einsum("hs,hsv->hv", weights, values)


def attention_error_scale(query: Tensor, w_uk: Tensor, w_uv: Tensor, rows: Tensor) -> Tensor:
    """Return what one unit of rounding can move: sum_j a_j (|v|_j + |s|_j |v_j - o|), [H, Dv].

    |v|_j and |s|_j are the value and the score of row j computed on absolute values (the |A||B| of
    the dot bound); a score's error reaches the output through the derivative of the softmax, a_j
    (v_j - o).
    """
    keys, values = _expanded(w_uk, w_uv, rows)
    weights = _scores(query, keys).softmax(-1)
    out = torch.einsum("hs,hsv->hv", weights, values)
    large_keys, large_values = _expanded(w_uk.abs(), w_uv.abs(), rows.abs())
    spread = _scores(query.abs(), large_keys).unsqueeze(-1) * (values - out.unsqueeze(1)).abs()
    return torch.einsum("hs,hsv->hv", weights, large_values + spread)


def _expanded(w_uk: Tensor, w_uv: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    R = w_uk.shape[2]
    shared = rows[:, R:].expand(len(w_uk), *rows[:, R:].shape)
    keys = torch.cat([torch.einsum("hdr,sr->hsd", w_uk, rows[:, :R]), shared], -1)
    return keys, torch.einsum("hvr,sr->hsv", w_uv, rows[:, :R])


def _scores(query: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("hd,hsd->hs", query, keys) * query.shape[1] ** -0.5


def attention_weights(H: int, Dn: int, Dv: int, R: int, g: torch.Generator) -> Args:
    """Return w_uk [H, Dn, R] and w_uv [H, Dv, R] that keep the size of what they multiply."""
    return {
        "w_uk": torch.randn(H, Dn, R, generator=g) * R**-0.5,
        "w_uv": torch.randn(H, Dv, R, generator=g) * R**-0.5,
    }


def attention_flops(rows: int, pairs: int, keys: int, args: Mapping[str, Any]) -> int:
    """Return the cheaper of absorbed and expanded (once per key) attention."""
    H, Dn, R = args["w_uk"].shape
    Dv, extra = args["w_uv"].shape[1], args["query"].shape[2] - Dn
    projection = 2 * H * R * (Dn + Dv)
    absorbed = rows * projection + pairs * 2 * H * (2 * R + extra)
    expanded = keys * projection + pairs * 2 * H * (Dn + extra + Dv)
    return min(absorbed, expanded)


def attention_bytes(keys: int, args: Mapping[str, Any]) -> int:
    """Return the bytes of queries, weights, picks, output and `keys` cache rows, once each."""
    query, cache = args["query"], args["cache"]
    out = query.shape[0] * query.shape[1] * args["w_uv"].shape[1] * query.element_size()
    latents = keys * cache.shape[2] * cache.element_size()
    return tensor_bytes(query, args["w_uk"], args["w_uv"], args.get("selected")) + out + latents


ATTENTION_AXES = {
    "T": "queries", "N": "sequences", "H": "heads", "Dn": "query width", "Dv": "value width",
    "R": "latent rank", "B": "blocks", "S": "block size", "MB": "most blocks of a sequence",
    "K": "picks of a query at most",
}  # fmt: skip


def attention_law(error_scale: Callable[[Mapping[str, Any]], Tensor]) -> Close:
    """Return the law of attention: dots of Dn + R terms, one rounding at the end."""
    return Close(length=lambda a: sum(a["w_uk"].shape[1:]), magnitude=error_scale)


def _attend_before(attend: AttendOne, args: Mapping[str, Any]) -> Tensor:
    """Run `attend` for each query over every position up to its own, [T, H, Dv]."""
    query, cache, w_uv = args["query"], args["cache"], args["w_uv"]
    out = query.new_zeros(*query.shape[:2], w_uv.shape[1])
    for i, (a, b) in enumerate(spans(args["cu_seqlens"])):
        for t in range(a, b):
            visible = int(args["computed_tokens"][i]) + t - a + 1
            blocks = args["block_table"][i, : -(-visible // cache.shape[1])]
            rows = cache[blocks].flatten(0, 1)[:visible]
            out[t] = attend(query[t], args["w_uk"], w_uv, rows)
    return out


def dense_mla_reference(
    query: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> dict[str, Tensor]:
    """Attend each query to every position up to its own, expanded."""
    args = {
        "query": query,
        "w_uk": w_uk,
        "w_uv": w_uv,
        "cache": cache,
        "block_table": block_table,
        "computed_tokens": computed_tokens,
        "cu_seqlens": cu_seqlens,
    }
    return {"o": _attend_before(expanded_attention, args)}


def _dense_case(
    sequences: Sequence[tuple[int, int]],
    g: torch.Generator,
    *,
    shape: tuple[int, int, int, int] = (3, 16, 12, 24),
    extra: int = 0,
    block_size: int = 8,
    scale: float = 1.0,
) -> Args:
    H, Dn, Dv, R = shape
    totals = [c + n for c, n in sequences]
    table, blocks = paged_blocks(totals, block_size, g)
    return {
        "query": torch.randn(sum(n for _, n in sequences), H, Dn + extra, generator=g) * scale,
        **attention_weights(H, Dn, Dv, R, g),
        "cache": paged_rows(table, totals, blocks, block_size, R + extra, g),
        "block_table": table,
        "computed_tokens": torch.tensor([c for c, _ in sequences], dtype=torch.int64),
        "cu_seqlens": ragged([n for _, n in sequences]),
    }


def _dense_cost(args: Args) -> Cost:
    pairs = keys = 0
    for (a, b), known in zip(
        spans(args["cu_seqlens"]), args["computed_tokens"].tolist(), strict=True
    ):
        pairs += (b - a) * known + (b - a) * (b - a + 1) // 2
        keys += known + b - a if b > a else 0
    return Cost(
        bytes=attention_bytes(keys, args),
        flops=attention_flops(len(args["query"]), pairs, keys, args),
    )


DENSE_MLA = OpContract(
    name="dense_mla",
    summary="Causal attention over the whole latent cache and its un-rotated shared key dims",
    source="model.md 5, 16; DeepSeek-V2 2.1 (MLA)",
    axes={
        **ATTENTION_AXES,
        "Dq": "query width: Dn and the shared key dims",
        "Rc": "cache width: R and the shared key dims",
    },
    inputs={
        "query": tensor(Role.ACT, "T H Dq"),
        "w_uk": tensor(Role.WEIGHT, "H Dn R"),
        "w_uv": tensor(Role.WEIGHT, "H Dv R"),
        "cache": tensor(Role.ACT, "B S Rc"),
        "block_table": tensor(Role.INT, "N MB"),
        "computed_tokens": tensor(Role.INT, "N"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    outputs={"o": tensor(Role.ACT, "T H Dv")},
    constraints=(
        Constraint(
            "query and cache have the same shared key dims",
            lambda a: (
                a["query"].shape[2] - a["w_uk"].shape[1]
                == a["cache"].shape[2] - a["w_uk"].shape[2]
                >= 0
            ),
        ),
        Constraint("cu_seqlens rises from 0 to T", lambda a: cu_seqlens_fit(a, "query")),
        Constraint(
            "block tables reach every token", lambda a: table_reaches(a, a["cache"].shape[1])
        ),
    ),
    reference=dense_mla_reference,
    cases=(
        Case("prefill", CaseKind.ORDINARY, lambda g: _dense_case([(0, 37)], g, extra=4)),
        Case(
            "decode_batch",
            CaseKind.ORDINARY,
            lambda g: _dense_case([(39, 1), (0, 1), (7, 1), (8, 1)], g, extra=8),
        ),
        Case("decode_one", CaseKind.ORDINARY, lambda g: _dense_case([(20, 1)], g)),
        Case("one_among_empty", CaseKind.EDGE, lambda g: _dense_case([(9, 0), (20, 1), (0, 0)], g)),
        Case("no_queries", CaseKind.EDGE, lambda g: _dense_case([(0, 0), (9, 0)], g)),
        Case(
            "no_extra_dims",
            CaseKind.EDGE,
            lambda g: _dense_case([(6, 2), (0, 9)], g, shape=(2, 5, 9, 7)),
        ),
        Case(
            "cached_prefixes",
            CaseKind.EXCITATION,
            lambda g: _dense_case([(0, 5), (7, 3), (128, 1), (0, 0), (1, 130)], g, extra=4),
            note="one offset for every sequence, a causal mask without the cached tokens",
        ),
        Case(
            "two_key_tiles",
            CaseKind.EXCITATION,
            lambda g: _dense_case(
                [(1021, 6), (3, 1)], g, shape=(2, 8, 8, 12), extra=3, block_size=16, scale=6.0
            ),
            note="an online softmax that forgets to rescale when the maximum rises",
        ),
    ),
    checks={"o": attention_law(lambda a: _attend_before(attention_error_scale, widened(a)))},
    cost=_dense_cost,
)

CONTRACTS = (LATENT_WRITE, DENSE_MLA)
