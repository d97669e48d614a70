"""The tail of routing that the fast and the deterministic router share.

Owns the weights of picked experts. Knows no selection. Invariant: biased scores never reach a
weight.
"""

from __future__ import annotations

from torch import Tensor

from oxplow.contracts.router import SUM_FLOOR


def weigh(
    scores: Tensor, expert_ids: Tensor, scaling: float, renormalise: bool
) -> tuple[Tensor, Tensor]:
    """Return expert_ids [T, k] and their weights from the unbiased scores [T, E] in float32."""
    picked = scores.gather(-1, expert_ids)
    if renormalise:
        picked = picked / (picked.sum(-1, keepdim=True) + SUM_FLOOR)
    return expert_ids, picked * scaling
