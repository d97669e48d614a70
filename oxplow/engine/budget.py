"""How the prefill tokens of one step are divided.

Owns the arithmetic of shares and floors. Knows no request: it is told of each candidate only
whether it is short and which floor it holds, in order of rank. Invariant: grants never exceed the
total; where short and long prompts both want tokens, each kind can get its share; a floor is kept
until its holder had its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil


class PrefillBudget:
    """Tokens left, by kind, and the floors still to be honoured."""

    def __init__(
        self, total: int, *, share: float, shorts: Sequence[bool], floors: Sequence[int]
    ) -> None:
        """`share` of `total` stays with either kind while the other wants tokens too."""
        self.left = total
        kept = int(total * share) if len(set(shorts)) == 2 else 0
        self._of_kind = {True: total - kept, False: total - kept}
        self._floors = {True: 0, False: 0}
        for is_short, floor in zip(shorts, floors, strict=True):
            self._floors[is_short] += floor

    def begin_turn(self, floor: int, *, is_short: bool) -> None:
        """Stop keeping back the floor of the candidate whose turn it is."""
        self._floors[is_short] -= floor

    def grant(self, wanted: int, floor: int, *, is_short: bool, weight: float = 1.0) -> int:
        """Return how many of `wanted` tokens the candidate may take, at least its floor.

        Each of its tokens costs `weight` tokens of the budget.
        """
        costs = ceil(wanted * weight)
        of_kind = self._of_kind[is_short] - self._floors[is_short]
        of_all = self.left - self._floors[True] - self._floors[False]
        units = max(0, min(costs, floor, self.left), min(costs, of_kind, of_all))
        return min(wanted, max(int(units / weight), min(units, 1)))

    def spend(self, tokens: int, *, is_short: bool, weight: float = 1.0) -> None:
        """Book tokens that were really scheduled."""
        cost = ceil(tokens * weight)
        self.left -= cost
        self._of_kind[is_short] -= cost
