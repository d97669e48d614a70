"""Contract of the pool keys: a gated mean per pool, frozen when its last token is in.

Owns meaning only: the reference feeds tokens one by one. Knows no kernel and no model.
Invariant: the reference works in the dtype of its floating inputs, so float64 in gives the truth;
tail entries that hold no token of the open pool keep their bits (exported tails are checksummed).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Close, Exact
from oxplow.contracts.paging import (
    cu_seqlens_fit,
    paged_blocks,
    paged_rows,
    ragged,
    spans,
    tensor_bytes,
    widened,
)
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor

POOL = 4
"""Tokens of a pool in most cases; the released models use the same."""


def _pooled(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Mean of keys [P, Di], weighted per channel by softmax over the pool of gates + ape: [Di]."""
    return ((gates + ape).softmax(0) * keys).sum(0)


def _pooled_error_scale(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Return what one rounding can move: sum_j w_j (|k_j| + |score_j| |k_j - mean|), [Di]."""
    spread = (gates.abs() + ape.abs()) * (keys - _pooled(keys, gates, ape)).abs()
    return ((gates + ape).softmax(0) * (keys.abs() + spread)).sum(0)


def _fill_pools(pooled: Callable[..., Tensor], args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Feed tokens one by one into their open pools; store `pooled` of every full one."""
    tail_key, tail_gate = args["tail_key"].clone(), args["tail_gate"].clone()
    pool_cache, ape = args["pool_cache"].clone(), args["ape"]
    P, PB = len(ape), pool_cache.shape[1]
    for i, (a, b) in enumerate(spans(args["cu_seqlens"])):
        slot, position = int(args["state_slots"][i]), int(args["computed_tokens"][i])
        if slot < 0 or a == b:
            continue
        held = [
            (tail_key[slot, j].clone(), tail_gate[slot, j].clone()) for j in range(position % P)
        ]
        for t in range(a, b):
            held.append((args["index_key"][t], args["gate"][t]))
            position += 1
            if len(held) == P:
                keys, gates = (torch.stack(rows) for rows in zip(*held, strict=True))
                pool = position // P - 1
                block = args["block_table"][i, pool // PB]
                pool_cache[block, pool % PB] = pooled(keys, gates, ape)
                held = []
        for j, (key, score) in enumerate(held):
            tail_key[slot, j], tail_gate[slot, j] = key, score
    return {"tail_key": tail_key, "tail_gate": tail_gate, "pool_cache": pool_cache}


def pool_keys_write_reference(
    index_key: Tensor,
    gate: Tensor,
    ape: Tensor,
    tail_key: Tensor,
    tail_gate: Tensor,
    pool_cache: Tensor,
    block_table: Tensor,
    state_slots: Tensor,
    computed_tokens: Tensor,
    cu_seqlens: Tensor,
) -> dict[str, Tensor]:
    """Fill pools token by token and store their gated means."""
    args = {
        "index_key": index_key,
        "gate": gate,
        "ape": ape,
        "tail_key": tail_key,
        "tail_gate": tail_gate,
        "pool_cache": pool_cache,
        "block_table": block_table,
        "state_slots": state_slots,
        "computed_tokens": computed_tokens,
        "cu_seqlens": cu_seqlens,
    }
    return _fill_pools(_pooled, args)


def _pool_case(
    sequences: Sequence[tuple[int, int]],
    g: torch.Generator,
    *,
    width: int = 12,
    pool: int = POOL,
    per_block: int = 4,
    padding: Sequence[int] = (),
    gate_scale: float = 1.0,
) -> Args:
    """Build (cached, new) sequences; those in `padding` have slot -1 and garbage blocks."""
    N, T = len(sequences), sum(n for _, n in sequences)
    totals = [0 if i in padding else c + n for i, (c, n) in enumerate(sequences)]
    table, blocks = paged_blocks([t // pool for t in totals], per_block, g)
    slots = torch.randperm(N + 2, generator=g)[:N]
    tails = torch.full((2, N + 2, pool - 1, width), float("nan"))
    for i, (c, _) in enumerate(sequences):
        if i not in padding:
            tails[:, slots[i], : c % pool] = torch.randn(2, c % pool, width, generator=g)
    slots[list(padding)] = -1
    cached_pools = [0 if i in padding else c // pool for i, (c, _) in enumerate(sequences)]
    tails[1] *= gate_scale
    return {
        "index_key": torch.randn(T, width, generator=g),
        "gate": torch.randn(T, width, generator=g) * gate_scale,
        "ape": torch.randn(pool, width, generator=g),
        "tail_key": tails[0].contiguous(),
        "tail_gate": tails[1].contiguous(),
        "pool_cache": paged_rows(table, cached_pools, blocks, per_block, width, g),
        "block_table": table,
        "state_slots": slots,
        "computed_tokens": torch.tensor([c for c, _ in sequences], dtype=torch.int64),
        "cu_seqlens": ragged([n for _, n in sequences]),
    }


def _distinct(slots: Tensor) -> bool:
    used = [s for s in slots.tolist() if s >= 0]
    return len(set(used)) == len(used)


def _without_old(args: Mapping[str, Any]) -> Args:
    """Return the arguments with an empty pool cache: what is not written may not move."""
    return {**args, "pool_cache": torch.zeros_like(args["pool_cache"])}


def _pool_cost(args: Args) -> Cost:
    (T, Di), P = args["index_key"].shape, len(args["ape"])
    done = read_back = kept = 0
    live = zip(
        spans(args["cu_seqlens"]),
        args["computed_tokens"].tolist(),
        args["state_slots"].tolist(),
        strict=True,
    )
    for (a, b), known, slot in live:
        total = known + b - a
        if slot >= 0 and b > a:
            pools = total // P - known // P
            done += pools
            read_back += known % P if pools else 0
            kept += min(total % P, b - a)
    rows = 2 * T + 2 * read_back + done + 2 * kept
    size = args["index_key"].element_size()
    return Cost(bytes=rows * Di * size + tensor_bytes(args["ape"]), flops=done * P * Di * 6)


POOL_KEYS_WRITE = OpContract(
    name="pool_keys_write",
    summary="Store the gated mean of every pool that fills up; keep the raw rest of an open pool",
    source="model.md 6",
    axes={
        "T": "new tokens",
        "N": "sequences",
        "P": "tokens of a pool",
        "P-1": "tail entries",
        "Di": "index width",
        "slots": "state slots",
        "B": "blocks",
        "PB": "pools of a block",
        "MB": "most blocks of a sequence",
    },  # fmt: skip
    inputs={
        "index_key": tensor(Role.ACT, "T Di"),
        "gate": tensor(Role.ACT, "T Di"),
        "ape": tensor(Role.WEIGHT, "P Di"),
        "tail_key": tensor(Role.ACT, "slots P-1 Di"),
        "tail_gate": tensor(Role.ACT, "slots P-1 Di"),
        "pool_cache": tensor(Role.ACT, "B PB Di"),
        "block_table": tensor(Role.INT, "N MB"),
        "state_slots": tensor(Role.INT, "N"),
        "computed_tokens": tensor(Role.INT, "N"),
        "cu_seqlens": tensor(Role.INT, "N+1"),
    },
    outputs={},
    mutates=("tail_key", "tail_gate", "pool_cache"),
    constraints=(
        Constraint("cu_seqlens rises from 0 to T", lambda a: cu_seqlens_fit(a, "index_key")),
        Constraint(
            "sequences own different slots; a negative slot is a padding row",
            lambda a: _distinct(a["state_slots"]),
        ),
    ),
    reference=pool_keys_write_reference,
    cases=(
        Case("prefill", CaseKind.ORDINARY, lambda g: _pool_case([(0, 37)], g)),
        Case("decode", CaseKind.ORDINARY, lambda g: _pool_case([(n, 1) for n in range(9)], g)),
        Case("one_token_kept", CaseKind.ORDINARY, lambda g: _pool_case([(17, 1)], g)),
        Case("one_token_fills", CaseKind.ORDINARY, lambda g: _pool_case([(19, 1)], g)),
        Case("no_tokens", CaseKind.EDGE, lambda g: _pool_case([(3, 0), (0, 0)], g)),
        Case("nothing_fills", CaseKind.EDGE, lambda g: _pool_case([(0, 1), (4, 2), (1, 2)], g)),
        Case(
            "block_edges",
            CaseKind.EDGE,
            lambda g: _pool_case([(15, 1), (14, 3), (16, 16), (0, 0), (31, 2)], g, per_block=4),
        ),
        Case(
            "pool_of_three",
            CaseKind.EDGE,
            lambda g: _pool_case([(4, 9), (2, 1)], g, pool=3, width=7),
        ),
        Case(
            "cached_prefixes",
            CaseKind.EXCITATION,
            lambda g: _pool_case([(0, 5), (7, 3), (128, 1), (1, 130)], g, per_block=8),
            note="one offset for every sequence; pools shifted by a cut inside a pool",
        ),
        Case(
            "tail_spans_calls",
            CaseKind.EXCITATION,
            lambda g: _pool_case([(1, 1), (2, 1), (3, 1), (5, 2), (6, 5)], g),
            note="earlier members lost or taken from a stale slot; the tail not kept on",
        ),
        Case(
            "padding_rows",
            CaseKind.EXCITATION,
            lambda g: _pool_case([(3, 1), (7, 1), (2, 1), (11, 1)], g, padding=(0, 2)),
            note="a padding row that completes a pool, or writes slot -1 as the last one",
        ),
        Case(
            "extreme_gates",
            CaseKind.EXCITATION,
            lambda g: _pool_case([(2, 18)], g, gate_scale=60.0),
            note="a softmax without its maximum overflows; one member takes all",
        ),
    ),
    checks={
        "tail_key": Exact(),
        "tail_gate": Exact(),
        "pool_cache": Close(
            length=lambda a: len(a["ape"]),
            magnitude=lambda a: _fill_pools(_pooled_error_scale, widened(_without_old(a)))[
                "pool_cache"
            ],
        ),
    },
    cost=_pool_cost,
)


CONTRACTS = (POOL_KEYS_WRITE,)
