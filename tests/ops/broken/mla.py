"""Broken MLA and index kernels: faults that field reports and the model notes list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from oxplow.contracts.index import index_select_reference, pool_scores
from oxplow.contracts.mla import dense_mla_reference, expanded_attention
from oxplow.contracts.paging import spans
from oxplow.feedback.gate import Reason
from oxplow.ops.kernels.torch import index, mla
from tests.ops.broken import Broken

Run = Callable[..., Any]


def _with(run: Run, **changes: Callable[[dict[str, Any]], Any]) -> Run:
    """Return `run` with some arguments replaced: each change sees all of them."""

    def broken(**args: Any) -> Any:
        return run(**{**args, **{name: change(args) for name, change in changes.items()}})

    return broken


def _patched(run: Run, module: object, name: str, fault: Run) -> Run:
    """Return `run` with one inner function of its module replaced."""

    def broken(**args: Any) -> Any:
        with patch.object(module, name, fault):
            return run(**args)

    return broken


# latent_write


def _last_row(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    cache.view(-1, cache.shape[2])[slot_mapping] = latent


# pool_keys_write


def _bare_softmax(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    shape = (-1, *ape.shape)
    weights = (gates.view(shape) + ape).exp()
    return (weights * keys.view(shape)).sum(1) / weights.sum(1)


def _straight_table(args: dict[str, Any]) -> Tensor:
    table = args["block_table"]
    return torch.arange(table.shape[1]).expand_as(table)


def _neighbours_tail(**args: Any) -> None:
    held = {name: args[name].nan_to_num().roll(1, 0) for name in ("tail_key", "tail_gate")}
    index.pool_keys_write(**{**args, **held})
    index.pool_keys_write(**{**args, "pool_cache": args["pool_cache"].clone()})


def _last_slot(args: dict[str, Any]) -> Tensor:
    slots = args["state_slots"]
    return torch.where(slots < 0, len(args["tail_key"]) - 1, slots)


# index_select


def _selection(score: Run = pool_scores, change: Run | None = None) -> Run:
    """Return the slow selection with another score, or with rows changed after the choice."""

    def broken(**args: Any) -> Tensor:
        with patch("oxplow.contracts.index.pool_scores", score):
            selected = index_select_reference(**args)["selected"]
        return selected if change is None else change(selected, args)

    return broken


def _sum_before_relu(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return (head_weights.unsqueeze(1) * query * query.shape[1] ** -0.5 @ keys.T).sum(0).relu()


def _in_bfloat16(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    scores = pool_scores(query.bfloat16(), head_weights.bfloat16(), keys.bfloat16())
    return scores.float()


def _highest_first(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    scores = pool_scores(query, head_weights, keys)
    order = scores.flip(0).sort(descending=True, stable=True).indices
    rank = torch.empty(len(scores))
    rank[len(scores) - 1 - order] = torch.arange(len(scores), 0, -1.0)
    return rank


def _no_relu(query: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return (head_weights.unsqueeze(1) * query * query.shape[1] ** -0.5 @ keys.T).sum(0)


def _positions(args: dict[str, Any]) -> list[int]:
    starts = zip(spans(args["cu_seqlens"]), args["computed_tokens"].tolist(), strict=True)
    return [known + t for (a, b), known in starts for t in range(b - a)]


def _own_pool_forced(selected: Tensor, args: dict[str, Any]) -> Tensor:
    P, top = args["pool_size"], args["top_pools"]
    for row, position in zip(selected, _positions(args), strict=True):
        if position % P == P - 1 and position >= top * P:
            row[(top - 1) * P : top * P] = torch.arange(position - P + 1, position + 1)
    return selected


def _tail_dropped(selected: Tensor, args: dict[str, Any]) -> Tensor:
    for row, position in zip(selected, _positions(args), strict=True):
        row[row >= (position + 1) // args["pool_size"] * args["pool_size"]] = -1
    return selected


def _leftovers(selected: Tensor, args: dict[str, Any]) -> Tensor:
    return selected.clamp_min(0)


def _dense_to_2048(selected: Tensor, args: dict[str, Any]) -> Tensor:
    """Take top_pools * P visible tokens, without the tail, for the dense limit."""
    dense = args["pool_size"] * args["top_pools"]
    for row, position in zip(selected, _positions(args), strict=True):
        if position + 1 > dense:
            row[row == position] = -1
    return selected


# attention


def _no_rescale(**args: Any) -> Tensor:
    def attend(query: Tensor, w_uk: Tensor, w_uv: Tensor, rows: Tensor) -> Tensor:
        parts = rows.split(512)
        mean = sum(len(p) * expanded_attention(query, w_uk, w_uv, p) for p in parts)
        return mean / len(rows)

    with patch("oxplow.contracts.mla.expanded_attention", attend):
        return dense_mla_reference(**args)["o"]


def _nan_without_picks(**args: Any) -> Tensor:
    out = mla.sparse_mla_decode(**args)
    out[(args["selected"] < 0).all(1)] = float("nan")
    return out


def _scaled(args: dict[str, Any], ratio: float) -> Tensor:
    return args["query"] * ratio**0.5


_POOL, _INDEX = "pool_keys_write", "index_select"
_SPARSE, _DECODE, _DENSE = "sparse_mla_prefill", "sparse_mla_decode", "dense_mla"


def _pool(fault: str, case: str, tensor: str, run: Run, reason: Reason = Reason.NUMERICS) -> Broken:
    return Broken(op=_POOL, fault=fault, run=run, case=case, tensor=tensor, reason=reason)


def _choice(fault: str, case: str, run: Run) -> Broken:
    return Broken(op=_INDEX, fault=fault, run=run, case=case, tensor="selected")


def _attention(op: str, fault: str, case: str, run: Run) -> Broken:
    return Broken(op=op, fault=fault, run=run, case=case, tensor="o")


_write, _choose = index.pool_keys_write, index.index_select
_prefill, _step, _dense = mla.sparse_mla_prefill, mla.sparse_mla_decode, mla.dense_mla

BROKEN = (
    Broken(
        op="latent_write", fault="slot -1 is the last row", run=_last_row,
        case="padding_rows", tensor="cache",
    ),
    _pool("ape left out", "prefill", "pool_cache", _with(_write, ape=lambda a: a["ape"] * 0)),
    _pool(
        "softmax without its maximum", "extreme_gates", "pool_cache",
        _patched(_write, index, "_pooled", _bare_softmax),
    ),
    _pool(
        "block table ignored", "block_edges", "pool_cache",
        _with(_write, block_table=_straight_table),
    ),
    _pool(
        "raw tail keys not kept", "tail_spans_calls", "tail_key",
        _with(_write, tail_key=lambda a: a["tail_key"].clone()),
    ),
    _pool(
        "raw tail gates not kept", "tail_spans_calls", "tail_gate",
        _with(_write, tail_gate=lambda a: a["tail_gate"].clone()),
    ),
    _pool(
        "earlier members taken from another slot", "tail_spans_calls", "pool_cache",
        _neighbours_tail,
    ),
    _pool(
        "first sequence's offset for all", "cached_prefixes", "tail_key",
        _with(_write, computed_tokens=lambda a: a["computed_tokens"][:1].expand(4)),
    ),
    _pool(
        "padding row is the last slot", "padding_rows", "",
        _with(_write, state_slots=_last_slot), Reason.RAISED,
    ),
    _choice("own pool forced in", "own_pool_loses", _selection(change=_own_pool_forced)),
    _choice("tail dropped", "chunked_prefill", _selection(change=_tail_dropped)),
    _choice("unused slots left at zero", "few_pools", _selection(change=_leftovers)),
    _choice("dense limit without the tail", "dense_limit", _selection(change=_dense_to_2048)),
    _choice("ReLU after the head sum", "chunked_prefill", _selection(_sum_before_relu)),
    _choice("scores in bfloat16", "near_ties", _selection(_in_bfloat16)),
    _choice("highest index wins ties at zero", "tied_at_zero", _selection(_highest_first)),
    _choice("highest index wins ties", "twin_pools", _selection(_highest_first)),
    _choice("ReLU left out", "tied_negative", _selection(_no_relu)),
    _choice(
        "first sequence's offset for all", "cached_prefixes",
        _with(_choose, computed_tokens=lambda a: a["computed_tokens"][:1].expand(5)),
    ),
    _attention(
        _SPARSE, "one block table for all", "second_sequence_offsets",
        _with(_prefill, block_table=lambda a: a["block_table"][2:].expand(3, -1)),
    ),
    _attention(
        _SPARSE, "scale of the latent rank", "sharp_scores",
        _with(_prefill, query=lambda a: _scaled(a, a["w_uk"].shape[1] / a["w_uk"].shape[2])),
    ),
    _attention(
        _SPARSE, "latents in bfloat16", "ragged",
        _with(_prefill, cache=lambda a: a["cache"].bfloat16().float()),
    ),
    _attention(
        _DECODE, "pads counted as the first token", "batch",
        _with(_step, selected=lambda a: a["selected"].clamp_min(0)),
    ),
    _attention(_DECODE, "softmax over nothing", "rows_without_picks", _nan_without_picks),
    _attention(
        _DENSE, "cached tokens left out of the mask", "cached_prefixes",
        _with(_dense, computed_tokens=lambda a: a["computed_tokens"] * 0),
    ),
    _attention(
        _DENSE, "scale without the shared dims", "prefill",
        _with(_dense, query=lambda a: _scaled(a, a["query"].shape[2] / a["w_uk"].shape[1])),
    ),
    _attention(_DENSE, "tiles merged without their maxima", "two_key_tiles", _no_rescale),
)  # fmt: skip
