"""Cases of the KDA contracts: ragged batches, poisoned pools, gates that excite known faults.

Owns the recipes for inputs only; what the ops mean stands in `contracts.kda`. Invariant: K != V and
H != K unless a case says otherwise, and states are random matrices without symmetry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from oxplow.contracts.paging import ragged
from oxplow.contracts.schema import Args, Case, CaseKind
from oxplow.contracts.slots import PACKED, deal_slots, fill_pool, mark_states

Gate = Callable[[torch.Generator, tuple[int, ...]], Tensor]
"""Draws a log decay of the given shape [T, H, K]."""

_EDGE, _EXCITE = CaseKind.EDGE, CaseKind.EXCITATION


def _gate(
    g: torch.Generator,
    *,
    tokens: int,
    lower_bound: float | None,
    sizes: tuple[int, int] = (3, 20),
) -> Args:
    heads, key = sizes
    return {
        "f": torch.randn(tokens, heads, key, generator=g) * 2,
        "a_log": torch.randn(heads, generator=g) * 0.7,
        "dt_bias": torch.randn(heads, key, generator=g),
        "lower_bound": lower_bound,
    }


def _gate_extremes(g: torch.Generator, *, lower_bound: float | None) -> Args:
    levels = torch.tensor([-20.0, -3.0, 0.0, 3.0, 20.0])
    return {
        "f": levels[torch.randint(0, 5, (10, 4, 6), generator=g)],
        "a_log": torch.tensor([-2.5, -0.4, 0.6, 2.5]),  # rates under and over 1
        "dt_bias": torch.randn(4, 6, generator=g) * 2,  # differs from channel to channel
        "lower_bound": lower_bound,
    }


_EXTREMES = (
    "inputs -20 to 20, rates under and over 1: a bound used as a clamp, a rate not exponentiated, "
    "a bias for each head, an infinite exponential"
)
KDA_GATE = (
    Case("bounded", CaseKind.ORDINARY, partial(_gate, tokens=9, lower_bound=-5.0)),
    Case("softplus", CaseKind.ORDINARY, partial(_gate, tokens=9, lower_bound=None)),
    Case("one_token", _EDGE, partial(_gate, tokens=1, lower_bound=-2.5, sizes=(1, 7))),
    Case("no_tokens", _EDGE, partial(_gate, tokens=0, lower_bound=-5.0)),
    Case("extremes", _EXCITE, partial(_gate_extremes, lower_bound=-5.0), note=_EXTREMES),
    Case("extremes_softplus", _EXCITE, partial(_gate_extremes, lower_bound=None), note=_EXTREMES),
)


def typical(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draw log decays in (-5, 0), most of them weak, as the bounded gate gives them."""
    return -5 * torch.sigmoid(torch.randn(shape, generator=g) * 1.5 - 3)


def weak(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draw log decays that forget nothing within a thousand tokens."""
    return -2e-3 * torch.rand(shape, generator=g)


def strong(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draw log decays next to the floor -5."""
    return -5 + 0.05 * torch.rand(shape, generator=g)


def bursts(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draw runs of 3 to 40 strong or weak decays: large sums in a chunk, small ones in a run."""
    flips = torch.rand(shape[0], 1, 1, generator=g) < 0.07
    is_strong = flips.cumsum(0) % 2 == 1
    against = torch.rand(shape, generator=g) < 0.1  # some channels go against the run
    return torch.where(is_strong ^ against, -4.99, -1e-3 * torch.rand(shape, generator=g))


def unbounded(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Draw weak log decays with -60 in a tenth of the places."""
    hit = torch.rand(shape, generator=g) < 0.1
    return torch.where(hit, -60.0, -0.3 * torch.rand(shape, generator=g))


def _inputs(
    g: torch.Generator, tokens: int, sizes: tuple[int, int, int], gate: Gate, scale: float
) -> Args:
    heads, key, value = sizes
    return {
        "q": torch.randn(tokens, heads, key, generator=g) * scale,
        "k": torch.randn(tokens, heads, key, generator=g) * scale,
        "v": torch.randn(tokens, heads, value, generator=g),
        "g": gate(g, (tokens, heads, key)),
        "beta": torch.sigmoid(torch.randn(tokens, heads, generator=g)),
    }


def prompts(
    g: torch.Generator,
    *,
    lengths: Sequence[int],
    fresh: Sequence[int] = (),
    padding: Sequence[int] = (),
    sizes: tuple[int, int, int] = (3, 16, 24),
    gate: Gate = typical,
    scale: float = 1.0,
    lower_bound: float | None = -5.0,
) -> Args:
    """Draw a prefill call: (H, K, V) = `sizes`, rows in `fresh` start without a state."""
    heads, key, value = sizes
    slots, kept = deal_slots(len(lengths), g, padding), mark_states(len(lengths), fresh)
    return {
        **_inputs(g, sum(lengths), sizes, gate, scale),
        "state": fill_pool((heads, value, key), slots, kept, g, 0.5),
        "state_slots": slots,
        "has_state": kept,
        "cu_seqlens": ragged(lengths),
        "lower_bound": lower_bound,
    }


def subspace_prompts(g: torch.Generator, *, lengths: Sequence[int], dims: int) -> Args:
    """Draw a prefill call whose keys share `dims` dimensions, written with beta near 1."""
    args = prompts(g, lengths=lengths, gate=weak)
    args["k"][..., dims:] = 0
    return {**args, "beta": 1 - 0.02 * args["beta"]}


def rows(
    g: torch.Generator,
    *,
    rows: int,
    padding: Sequence[int] = (),
    sizes: tuple[int, int, int] = (3, 16, 24),
    gate: Gate = typical,
    scale: float = 1.0,
    in_order: bool = False,
) -> Args:
    """Draw a decode call; `in_order` gives the rows neighbouring int32 slots, counting up."""
    heads, key, value = sizes
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    if not in_order:
        slots = deal_slots(rows, g, padding)
    return {
        **_inputs(g, rows, sizes, gate, scale),
        "state": fill_pool((heads, value, key), slots, mark_states(rows), g, 0.5),
        "state_slots": slots,
    }


_SQUARE = "K == V and no symmetry: key-first and value-first mixed up give no shape error"
_LAST_SLOT = "a write through index -1 lands in the last slot; slot 0 is no stand-in either"
_EPS = "the eps of the norm decides: 1e-6 inside the root, no other, no maximum"
KDA_PREFILL = (
    Case("one_prompt", CaseKind.ORDINARY, partial(prompts, lengths=(100,), fresh=(0,))),
    Case("continued", CaseKind.ORDINARY, partial(prompts, lengths=(70, 33, 130), fresh=(1,))),
    Case("softplus", CaseKind.ORDINARY, partial(prompts, lengths=(70, 20), lower_bound=None)),
    Case("packed_lengths", _EDGE, partial(prompts, lengths=PACKED, fresh=(1, 4, 6, 7))),
    Case("odd_sizes", _EDGE, partial(prompts, lengths=(67, 1), sizes=(1, 13, 7))),
    Case("single_tokens", _EDGE, partial(prompts, lengths=(1, 1, 1), fresh=(2,))),
    Case("no_tokens", _EDGE, partial(prompts, lengths=(0, 0), fresh=(0,))),
    Case("no_sequences", _EDGE, partial(prompts, lengths=())),
    Case("padding_only", _EDGE, partial(prompts, lengths=(3, 2), padding=(0, 1))),
    Case(
        "padding_between",
        _EXCITE,
        partial(prompts, lengths=(5, 66, 9), padding=(1,)),
        note=_LAST_SLOT,
    ),
    Case(
        "stale_slots",
        _EXCITE,
        partial(prompts, lengths=(20, 3, 65), fresh=(0, 1, 2)),
        note="recycled slots hold NaN: has_state False reads zeros, no product with them",
    ),
    Case(
        "square_state",
        _EXCITE,
        partial(prompts, lengths=(40, 30), sizes=(2, 16, 16)),
        note=_SQUARE,
    ),
    Case(
        "weak_decay_long",
        _EXCITE,
        partial(prompts, lengths=(400, 20), gate=weak),
        note="nothing is forgotten: rounding and wrong decays add up over the sequence",
    ),
    Case(
        "strong_decay",
        _EXCITE,
        partial(prompts, lengths=(200,), gate=strong),
        note="sums of g reach -320 in a chunk: exp(-G) over more than 16 tokens overflows",
    ),
    Case(
        "bursts",
        _EXCITE,
        partial(prompts, lengths=(200, 70), gate=bursts),
        note="differences of large sums lose the digits of the small decays between them",
    ),
    Case(
        "unbounded_gate",
        _EXCITE,
        partial(prompts, lengths=(150, 10), gate=unbounded, lower_bound=None),
        note="g = -60 at single tokens: a factorisation centred in 16 rows overflows too",
    ),
    Case(
        "keys_in_a_subspace",
        _EXCITE,
        partial(subspace_prompts, lengths=(140, 64), dims=4),
        note="four dimensions rewritten all the time: the system is far from the identity",
    ),
    Case("tiny_keys", _EXCITE, partial(prompts, lengths=(30, 40), scale=3e-4), note=_EPS),
)

KDA_DECODE = (
    Case("decode", CaseKind.ORDINARY, partial(rows, rows=5)),
    Case("neighbouring_slots", CaseKind.ORDINARY, partial(rows, rows=4, in_order=True)),
    Case("one_row_odd_sizes", _EDGE, partial(rows, rows=1, sizes=(1, 13, 7))),
    Case("no_rows", _EDGE, partial(rows, rows=0)),
    Case("padding_only", _EDGE, partial(rows, rows=3, padding=(0, 1, 2))),
    Case("padding_rows", _EXCITE, partial(rows, rows=6, padding=(0, 3, 5)), note=_LAST_SLOT),
    Case("square_state", _EXCITE, partial(rows, rows=3, sizes=(2, 16, 16)), note=_SQUARE),
    Case(
        "strong_decay",
        _EXCITE,
        partial(rows, rows=3, gate=unbounded),
        note="the correction reads the decayed state, the output the written one",
    ),
    Case("tiny_keys", _EXCITE, partial(rows, rows=3, scale=3e-4), note=_EPS),
)
