"""Contract of the router: sigmoid scores, biased selection, unbiased weights.

Owns the meaning of routing and the checks that near-ties need. Knows no kernel and no model.
Invariant: selection and order use the biased scores, weights never do; exact ties go to the lowest
expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import UNIT_ROUNDOFF, Evidence, Picks, Verdict
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
SUM_FLOOR = 1e-20
"""Added to the sum of the picked scores before it divides (model.md 7)."""


def router_reference(
    x: Tensor, weight: Tensor, bias: Tensor, *, top_k: int, scaling: float, renormalise: bool
) -> dict[str, Tensor]:
    """Score every expert, rank the biased scores by hand, weigh by the unbiased ones."""
    scores = _scores(x, weight)
    ids = []
    for biased in (scores + bias).tolist():
        ranked = sorted((-score, expert) for expert, score in enumerate(biased))
        ids.append([expert for _, expert in ranked[:top_k]])
    expert_ids = torch.tensor(ids, dtype=torch.int64).view(x.shape[0], top_k)
    return {
        "expert_ids": expert_ids,
        "expert_weights": _weights(scores, expert_ids, scaling, renormalise),
    }


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    logits = torch.stack([(x * row).sum(-1) for row in weight], dim=-1)
    return 1 / (1 + torch.exp(-logits))


def _weights(scores: Tensor, expert_ids: Tensor, scaling: float, renormalise: bool) -> Tensor:
    picked = scores.gather(-1, expert_ids)
    if renormalise:
        picked = picked / (picked.sum(-1, keepdim=True) + SUM_FLOOR)
    return scaling * picked


def _wide_scores(args: Mapping[str, Any]) -> Tensor:
    return _scores(args["x"].double(), args["weight"].double())


def _biased(args: Mapping[str, Any]) -> Tensor:
    return _wide_scores(args) + args["bias"].double()


def _score_error(args: Mapping[str, Any]) -> Tensor:
    """Return the error that a float32 dot product and sigmoid may leave in each score."""
    x, weight = args["x"].double().abs(), args["weight"].double().abs()
    scores, unit = _wide_scores(args), UNIT_ROUNDOFF[torch.float32]
    dot = 4 * unit * x.shape[-1] ** 0.5 * (x @ weight.t())
    return scores * (1 - scores) * dot + 4 * unit * scores


def _biased_error(args: Mapping[str, Any]) -> Tensor:
    return _score_error(args) + UNIT_ROUNDOFF[torch.float32] * _biased(args).abs()


@dataclass(frozen=True, slots=True)
class RankedExperts:
    """The right set, and in descending order of biased score, across the margins of `Picks`."""

    def judge(self, evidence: Evidence) -> Verdict:
        """Judge the set first, then each neighbouring pair; equal scores stand in rising order."""
        verdict = Picks(scores=_biased, margin=_biased_error).judge(evidence)
        if not verdict.ok or evidence.got.numel() == 0:
            return verdict
        ids = evidence.got
        biased = _biased(evidence.args).gather(-1, ids)
        error = _biased_error(evidence.args).gather(-1, ids)
        gap, slack = biased[:, 1:] - biased[:, :-1], error[:, 1:] + error[:, :-1]
        wrong = (gap > slack) | ((gap == 0) & (ids[:, 1:] < ids[:, :-1]))
        if not wrong.any():
            return verdict
        row, rank = wrong.nonzero()[0].tolist()
        return Verdict(
            ok=False,
            worst=float("inf"),
            index=(row, rank),
            reason=f"row {row}: experts {ids[row, rank]} and {ids[row, rank + 1]} stand in the"
            f" wrong order; their biased scores differ by {gap[row, rank]:.3e}",
        )


@dataclass(frozen=True, slots=True)
class WeightsOfPicked:
    """The weights that belong to the experts which the candidate itself picked."""

    def judge(self, evidence: Evidence) -> Verdict:
        """Compare with float64 weights of the same experts, within the error of their scores."""
        args, ids = evidence.args, evidence.outputs["expert_ids"]
        if ids.numel() == 0:
            return Verdict(ok=True)
        scores, scaling = _wide_scores(args), float(args["scaling"])
        want = _weights(scores, ids, scaling, bool(args["renormalise"]))
        score_error = _score_error(args).gather(-1, ids)
        bound = scaling * score_error
        if args["renormalise"]:
            total = scores.gather(-1, ids).sum(-1, keepdim=True) + SUM_FLOOR
            bound = bound / total + want * score_error.sum(-1, keepdim=True) / total
        bound = bound + 4 * UNIT_ROUNDOFF[torch.float32] * want
        error = (evidence.got.double() - want).abs()
        ratio = torch.where(error.isnan(), torch.inf, error / bound.clamp_min(1e-300))
        worst = int(ratio.argmax())
        row, slot = divmod(worst, ids.shape[1])
        top = float(ratio[row, slot])
        if top <= 1.0:
            return Verdict(ok=True, worst=top, index=(row, slot))
        return Verdict(
            ok=False,
            worst=top,
            index=(row, slot),
            reason=f"the weight of expert {ids[row, slot]} in row {row} is"
            f" {evidence.got[row, slot]:.9g}, wanted {want[row, slot]:.9g}: {top:.3g} bounds off",
        )


def _router_case(
    shape: tuple[int, int, int, int], g: torch.Generator, *, bias: float = 0.1
) -> Args:
    num_tokens, width, num_experts, top_k = shape
    return {
        "x": torch.randn(num_tokens, width, generator=g),
        "weight": torch.randn(num_experts, width, generator=g) * width**-0.5,
        "bias": bias * torch.randn(num_experts, generator=g),
        "top_k": top_k,
        "scaling": 2.5,
        "renormalise": True,
    }


def _unnormalised_case(g: torch.Generator) -> Args:
    return _router_case((4, 24, 12, 3), g) | {"renormalise": False, "scaling": 1.5}


def _near_ties_case(g: torch.Generator) -> Args:
    """Return experts whose logits differ by about 1e-3: half-precision logits rank them wrongly."""
    args = _router_case((16, 64, 64, 8), g, bias=0.0)
    shared = torch.randn(64, generator=g) * 0.125
    return args | {"weight": shared + 1e-4 * torch.randn(64, 64, generator=g)}


def _exact_ties_case(g: torch.Generator) -> Args:
    """Return rows of exact ties: scores all one half (a zero row) and all one (logits over 40)."""
    args = _router_case((5, 32, 20, 6), g)
    x = torch.cat((torch.zeros(2, 32), torch.ones(3, 32)))
    weight = 2 + torch.rand(20, 32, generator=g)
    return args | {"x": x, "weight": weight, "bias": torch.zeros(20)}


def _dead_rows_case(g: torch.Generator) -> Args:
    """Return logits near -48: the sum of the picked scores is of the size of its floor."""
    args = _router_case((4, 16, 10, 4), g)
    return args | {"x": torch.ones(4, 16), "weight": -3 + 0.1 * torch.randn(10, 16, generator=g)}


ROUTER = OpContract(
    name="router",
    summary="sigmoid scores in float32; top-k of score + bias; weights from the scores alone",
    source="model.md 7",
    axes={"T": "tokens", "D": "width", "E": "experts"},
    inputs={
        "x": tensor(Role.ACT, "T D"),
        "weight": tensor(Role.WEIGHT, "E D"),
        "bias": tensor(Role.F32, "E"),
    },
    scalars={
        "top_k": "experts per token",
        "scaling": "factor on the weights",
        "renormalise": "divide the weights by their sum + 1e-20",
    },
    outputs={
        "expert_ids": tensor(Role.INT, "T k"),
        "expert_weights": tensor(Role.F32, "T k"),
    },
    reference=router_reference,
    constraints=(
        Constraint("1 <= top_k <= experts", lambda a: 1 <= a["top_k"] <= a["weight"].shape[0]),
    ),
    cases=(
        Case("nano", ORDINARY, lambda g: _router_case((5, 48, 16, 4), g)),
        Case("many_experts", ORDINARY, lambda g: _router_case((9, 32, 288, 8), g)),
        Case("not_renormalised", ORDINARY, _unnormalised_case),
        Case("every_expert", EDGE, lambda g: _router_case((3, 17, 5, 5), g)),
        Case("one_of_one", EDGE, lambda g: _router_case((1, 8, 1, 1), g)),
        Case("no_rows", EDGE, lambda g: _router_case((0, 16, 8, 2), g)),
        Case(
            "many_rows",
            EXCITATION,
            lambda g: _router_case((4097, 8, 6, 2), g),
            note="over 4,096 rows: a wrong one behind the last whole tile, or a grid limit",
        ),
        Case(
            "bias_decides",
            EXCITATION,
            lambda g: _router_case((6, 32, 24, 6), g, bias=2.0),
            note="the bias outweighs the scores: catches weights taken from biased scores",
        ),
        Case(
            "near_ties",
            EXCITATION,
            _near_ties_case,
            note="catches logits or scores in half precision or TF32",
        ),
        Case(
            "exact_ties",
            EXCITATION,
            _exact_ties_case,
            note="zero rows and saturated scores: the lowest index wins; catches any other order",
        ),
        Case(
            "dead_rows",
            EXCITATION,
            _dead_rows_case,
            note="scores near 1e-21: catches a missing or another floor under the sum",
        ),
    ),
    checks={"expert_ids": RankedExperts(), "expert_weights": WeightsOfPicked()},
    cost=lambda a: Cost(
        bytes=moved_bytes(a, "x", "weight", "bias") + a["x"].shape[0] * int(a["top_k"]) * 12,
        flops=2 * a["x"].numel() * a["weight"].shape[0],
    ),
)
