"""How many prefill tokens fit into a step of the wished length.

Owns an online linear model of step seconds. Knows no request and no clock: it is told what a step
held and how long it took. Invariant: the budget is between one block and the configured most, and
it at most doubles from one step to the next, so that a wrong early guess cannot make one huge
step.
"""

from __future__ import annotations

_FORGET = 0.97  # weight of the past per observation: costs drift with context length
_INERTIA = 1e-3  # pull towards the last answer: directions that nobody tries keep their cost


class StepModel:
    """seconds = c0 + c1 * decode rows + c2 * prefill tokens, by least squares that forget."""

    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self.num_observations = 0

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        x = (1.0, decode_rows / 8, prefill_tokens / 256)  # comparable scales keep it well posed
        for i in range(3):
            self._products[i] = _FORGET * self._products[i] + x[i] * seconds
            for j in range(3):
                self._squares[i][j] = _FORGET * self._squares[i][j] + x[i] * x[j]
        matrix = [
            [self._squares[i][j] + (_INERTIA if i == j else 0.0) for j in range(3)]
            for i in range(3)
        ]
        right = [p + _INERTIA * w for p, w in zip(self._products, self._weights, strict=True)]
        self._weights = _solve(matrix, right)
        self.num_observations += 1

    def predict(self, decode_rows: int, prefill_tokens: int) -> float:
        """Return the expected seconds of such a step, never negative."""
        fixed, decode, prefill = self._weights
        return max(0.0, fixed + decode * decode_rows / 8 + prefill * prefill_tokens / 256)

    @property
    def prefill_token_seconds(self) -> float:
        """Seconds that one more prefill token costs, never negative."""
        return max(0.0, self._weights[2] / 256)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    answer = [0.0] * size
    for i in range(size - 1, -1, -1):
        known = sum(rows[i][j] * answer[j] for j in range(i + 1, size))
        answer[i] = (rows[i][size] - known) / rows[i][i]
    return answer


class Pacer:
    """Turns a target for step seconds into a prefill budget."""

    def __init__(self, *, target_s: float | None, block_size: int, max_tokens: int) -> None:
        """`target_s` None fixes the budget at `max_tokens`."""
        self._target_s, self._block_size, self._max_tokens = target_s, block_size, max_tokens
        self._last = min(max_tokens, 4 * block_size)
        self.model = StepModel()

    def budget(self, decode_rows: int) -> int:
        """Return how many prefill tokens the next step may hold beside these decode rows."""
        if self._target_s is None:
            return self._max_tokens
        per_token = self.model.prefill_token_seconds
        room = self._target_s - self.model.predict(decode_rows, 0)
        fitting = int(room / per_token) if per_token > 0 else self._max_tokens
        budget = max(self._block_size, min(fitting, 2 * self._last, self._max_tokens))
        return min(budget, self._max_tokens)

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a finished step."""
        self.model.observe(decode_rows, prefill_tokens, seconds)
        if prefill_tokens:
            self._last = max(self._block_size, prefill_tokens)
