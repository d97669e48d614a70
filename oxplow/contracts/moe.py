"""Contracts of the mixture of experts: routed experts in floating weights and in e4m3 blocks.

Owns meaning only; the router has a module of its own. Knows no kernel and no model.
Invariant: the references visit every expert for every token and multiply by a one-hot weight, so
they share no grouping, sorting or padding with any kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.dense import (
    block_scales,
    dequantise_blocks,
    has_nan_code,
    normal_codes,
    swiglu_reference,
)
from oxplow.contracts.laws import Close
from oxplow.contracts.router import ROUTER
from oxplow.contracts.schema import (
    Args,
    Case,
    CaseKind,
    Constraint,
    Cost,
    OpContract,
    Role,
    moved_bytes,
    tensor,
)

ORDINARY, EDGE, EXCITATION = CaseKind.ORDINARY, CaseKind.EDGE, CaseKind.EXCITATION


def experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    limit: float | None,
) -> dict[str, Tensor]:
    """Add, expert after expert, its output on all tokens times the weight that each gives it."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        chosen = expert_ids == expert  # [T, k]
        if not chosen.any():  # weights of an expert that nobody chose may be anything
            continue
        share = torch.where(chosen, expert_weights, 0.0).sum(-1, keepdim=True)  # [T, 1]
        rows = torch.where(chosen.any(-1, keepdim=True), x, 0.0)
        gate, up = rows @ gate_up[expert, 0].t(), rows @ gate_up[expert, 1].t()
        y += share * (swiglu_reference(gate, up, limit=limit)["y"] @ down[expert].t())
    return {"y": y}


def experts_fp8_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    limit: float | None,
    block: int,
) -> dict[str, Tensor]:
    """Multiply every code by the scale of its block, then do plain experts."""
    wide_gate_up = dequantise_blocks(gate_up, gate_up_scale, block)
    wide_down = dequantise_blocks(down, down_scale, block)
    return experts_reference(x, expert_ids, expert_weights, wide_gate_up, wide_down, limit=limit)


def _wide(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return gate_up and down in float64, whatever their format."""
    gate_up, down = args["gate_up"].double(), args["down"].double()
    if "block" not in args:
        return gate_up, down
    block = int(args["block"])
    return (
        dequantise_blocks(gate_up, args["gate_up_scale"].double(), block),
        dequantise_blocks(down, args["down_scale"].double(), block),
    )


def _errors(args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return per element of y what cancels in float32, and the effect of stored intermediates.

    First: |w| (|down| |h|, and by root-sum-square what the errors of gate and up move h by; they
    are independent). Second, root-sum-square: one relative error in each gate, up and hidden
    value, and in each expert's output.
    """
    x, ids = args["x"].double(), args["expert_ids"]
    weights = torch.where(ids < 0, 0.0, args["expert_weights"].double())
    gate_up, down = _wide(args)
    cancels, stored = torch.zeros_like(x), torch.zeros_like(x)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert, share = int(ids[token, slot]), weights[token, slot].abs()
        gate, up = gate_up[expert, 0] @ x[token], gate_up[expert, 1] @ x[token]
        sizes = gate_up[expert].abs() @ x[token].abs()  # [2, I]
        hidden = swiglu_reference(gate, up, limit=args["limit"])["y"]
        bound = torch.inf if args["limit"] is None else args["limit"]
        silu = gate.clamp(max=bound) * torch.sigmoid(gate.clamp(max=bound))
        up = up.clamp(-bound, bound)
        moved = 1.1 * up.abs() * sizes[0] + silu.abs() * sizes[1]  # |silu'| <= 1.1
        inherited = (down[expert].square() @ moved.square()).sqrt()
        cancels[token] += share * (down[expert].abs() @ hidden.abs() + inherited)
        each = (1.1 * up * gate).square() + (silu * up).square() + hidden.square()
        output = down[expert] @ hidden
        stored[token] += share.square() * (down[expert].square() @ each + output.square())
    return cancels, stored.sqrt()


def _longest_sum(args: Mapping[str, Any]) -> int:
    return max(args["down"].shape[-2:])


_CLOSE = Close(
    length=_longest_sum, magnitude=lambda a: _errors(a)[0], stored=lambda a: _errors(a)[1]
)


def _picked(args: Args) -> int:
    """Return how many experts a call needs: its distinct ids."""
    ids = args["expert_ids"]
    assert isinstance(ids, Tensor)
    return int(ids[ids >= 0].unique().numel())


def _experts_cost(args: Args) -> Cost:
    ids, names = args["expert_ids"], [n for n in args if n.startswith(("gate_up", "down"))]
    weights = moved_bytes(args, *names) * _picked(args) // max(1, args["down"].shape[0])
    rows = 2 * moved_bytes(args, "x") + moved_bytes(args, "expert_ids", "expert_weights")
    slots, (width, inner) = int((ids >= 0).sum()), args["down"].shape[-2:]
    per_slot = 6 * width * inner + 7 * inner + 2 * width
    return Cost(bytes=rows + weights, flops=slots * per_slot)


_IDS_FIT = Constraint(
    "expert_ids are below the number of experts",
    lambda a: bool((a["expert_ids"] < a["down"].shape[0]).all()),
)


def _routing(num_tokens: int, num_experts: int, top_k: int, g: torch.Generator) -> Args:
    ids = torch.rand(num_tokens, num_experts, generator=g).argsort(-1)[:, :top_k]
    return {
        "expert_ids": ids,
        "expert_weights": 0.1 + torch.rand(num_tokens, top_k, generator=g),
    }


def _experts_case(
    sizes: tuple[int, int, int, int, int], g: torch.Generator, *, limit: float | None = 10.0
) -> Args:
    """Draw a case; sizes = tokens, experts, top_k, width, inner width."""
    num_tokens, num_experts, top_k, width, inner = sizes
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        **_routing(num_tokens, num_experts, top_k, g),
        "gate_up": torch.randn(num_experts, 2, inner, width, generator=g) * width**-0.5,
        "down": torch.randn(num_experts, width, inner, generator=g) * inner**-0.5,
        "limit": limit,
    }


def _experts_fp8_case(
    sizes: tuple[int, int, int, int, int], g: torch.Generator, *, spread: float = 1.0
) -> Args:
    """Draw a case in e4m3 blocks of 128; sizes as in `_experts_case`."""
    num_tokens, num_experts, top_k, width, inner = sizes
    across, within = -(-width // 128), -(-inner // 128)
    first = block_scales((num_experts, 2, within, across), spread, g)
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        **_routing(num_tokens, num_experts, top_k, g),
        "gate_up": normal_codes((num_experts, 2, inner, width), g),
        "gate_up_scale": first * 3 * width**-0.5,
        "down": normal_codes((num_experts, width, inner), g),
        "down_scale": block_scales((num_experts, across, within), spread, g),
        "limit": 10.0,
        "block": 128,
    }


def _with_padding(args: Args) -> Args:
    """Turn some slots and one whole row into padding that holds NaN in x and in the weights."""
    x, ids, weights = args["x"], args["expert_ids"].clone(), args["expert_weights"].clone()
    x[1], ids[1], weights[1] = torch.nan, -1, torch.nan
    ids[-1, 0], weights[-1, 0] = -7, torch.nan
    return args | {"expert_ids": ids, "expert_weights": weights}


def _with_dead_experts(args: Args, poison: float) -> Args:
    """Send everything to two experts; fill all the others with `poison`."""
    ids = args["expert_ids"] % 2 + 2
    ids[:, 1] = 5 - ids[:, 0]  # the other one of experts 2 and 3
    dead = [e for e in range(args["down"].shape[0]) if e not in (2, 3)]
    for name in ("gate_up", "down") if "block" not in args else ("gate_up_scale", "down_scale"):
        args[name][dead] = poison
    return args | {"expert_ids": ids}


def _large(args: Args, factor: float) -> Args:
    return args | {"x": args["x"] * factor}


_SLOTS = {
    "expert_ids": tensor(Role.INT, "T k"),
    "expert_weights": tensor(Role.F32, "T k"),
}
_AXES = {
    "T": "tokens",
    "k": "experts per token",
    "E": "experts",
    "D": "width",
    "I": "inner width of an expert",
}

EXPERTS = OpContract(
    name="experts",
    summary="sum over the picked experts of weight * down(swiglu(gate x, up x))",
    source="model.md 7",
    axes=_AXES,
    inputs={
        "x": tensor(Role.ACT, "T D"),
        **_SLOTS,
        "gate_up": tensor(Role.WEIGHT, "E 2 I D"),
        "down": tensor(Role.WEIGHT, "E D I"),
    },
    scalars={"limit": "clamp of the SwiGLU; None: no clamp"},
    outputs={"y": tensor(Role.ACT, "T D")},
    reference=experts_reference,
    constraints=(_IDS_FIT,),
    cases=(
        Case("nano_decode", ORDINARY, lambda g: _experts_case((3, 16, 4, 48, 24), g)),
        Case("prefill", ORDINARY, lambda g: _experts_case((41, 6, 2, 40, 56), g)),
        Case("few_of_many", ORDINARY, lambda g: _experts_case((2, 96, 8, 32, 16), g)),
        Case("one_row_odd_sizes", EDGE, lambda g: _experts_case((1, 5, 3, 33, 17), g, limit=None)),
        Case("one_expert", EDGE, lambda g: _experts_case((9, 1, 1, 16, 8), g)),
        Case("no_rows", EDGE, lambda g: _experts_case((0, 4, 2, 16, 8), g)),
        Case(
            "padding",
            EDGE,
            lambda g: _with_padding(_experts_case((6, 8, 3, 32, 16), g)),
            note="ids below 0 with NaN weights and a NaN row: contribute nothing",
        ),
        Case(
            "only_padding",
            EDGE,
            lambda g: _experts_case((3, 4, 2, 16, 8), g) | {"expert_ids": torch.full((3, 2), -1)},
        ),
        Case(
            "dead_experts",
            EXCITATION,
            lambda g: _with_dead_experts(_experts_case((7, 6, 2, 24, 16), g), torch.nan),
            note="weights nobody picked are NaN: catches dense products times zero, empty groups",
        ),
        Case(
            "clamps_bind",
            EXCITATION,
            lambda g: _large(_experts_case((5, 6, 2, 32, 24), g, limit=1.0), 3.0),
            note="most values pass the limit: catches a clamp left out of the experts",
        ),
    ),
    checks={"y": _CLOSE},
    cost=_experts_cost,
)

EXPERTS_FP8 = OpContract(
    name="experts_fp8",
    summary="experts with e4m3 codes and block scales; only the picked experts are widened",
    source="model.md 7 and 11",
    axes={**_AXES, "IB": "ceil(I / block)", "DB": "ceil(D / block)"},
    inputs={
        "x": tensor(Role.ACT, "T D"),
        **_SLOTS,
        "gate_up": tensor(Role.E4M3, "E 2 I D"),
        "gate_up_scale": tensor(Role.F32, "E 2 IB DB"),
        "down": tensor(Role.E4M3, "E D I"),
        "down_scale": tensor(Role.F32, "E DB IB"),
    },
    scalars={
        "limit": "clamp of the SwiGLU; None: no clamp",
        "block": "rows and columns that share one scale",
    },
    outputs={"y": tensor(Role.ACT, "T D")},
    reference=experts_fp8_reference,
    constraints=(
        _IDS_FIT,
        Constraint(
            "scales have ceil(size / block) entries on both axes",
            lambda a: (
                tuple(a["down_scale"].shape[1:])
                == tuple(-(-size // a["block"]) for size in a["down"].shape[1:])
                and a["gate_up_scale"].shape[2:] == a["down_scale"].shape[:0:-1]
            ),
        ),
        Constraint(
            "the codes hold no NaN",
            lambda a: not has_nan_code(a["gate_up"]) and not has_nan_code(a["down"]),
        ),
    ),
    cases=(
        Case("decode", ORDINARY, lambda g: _experts_fp8_case((2, 8, 2, 256, 128), g)),
        Case("prefill", ORDINARY, lambda g: _experts_fp8_case((21, 5, 2, 128, 256), g)),
        Case("ragged_blocks", EDGE, lambda g: _experts_fp8_case((3, 5, 2, 200, 140), g)),
        Case("one_row_odd_sizes", EDGE, lambda g: _experts_fp8_case((1, 4, 3, 67, 33), g)),
        Case("no_rows", EDGE, lambda g: _experts_fp8_case((0, 4, 2, 32, 16), g)),
        Case(
            "padding",
            EDGE,
            lambda g: _with_padding(_experts_fp8_case((6, 8, 3, 64, 32), g)),
            note="ids below 0 with NaN weights and a NaN row: contribute nothing",
        ),
        Case(
            "dead_experts",
            EXCITATION,
            lambda g: _with_dead_experts(_experts_fp8_case((7, 6, 2, 48, 32), g), torch.nan),
            note="scales nobody picked are NaN: catches experts that were widened for nothing",
        ),
        Case(
            "unlike_scales",
            EXCITATION,
            lambda g: _experts_fp8_case((4, 4, 2, 260, 150), g, spread=8.0),
            note="scales differ by up to 256: catches a transposed scale, or the gate's for the up",
        ),
    ),
    checks={"y": _CLOSE},
    cost=_experts_cost,
)

CONTRACTS = (ROUTER, EXPERTS, EXPERTS_FP8)
