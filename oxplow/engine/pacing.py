"""How many prefill tokens fit into a step of the wished length.

Owns an online linear model of step seconds. Knows no request and no clock: it is told what a step
held and how long it took. Invariant: the budget is between one block and the configured most, and
it at most doubles from one step to the next, so that a wrong early guess cannot make one huge
step.
"""

from __future__ import annotations

_FORGET = 0.97  # weight of the past per observation: costs drift with context length
_INERTIA = 1e-3  # pull towards the last answer: a number of rows that nobody tries keeps its cost


class StepModel:
    """seconds = fixed + decode cost * rows + prefill cost * tokens, learnt online.

    Fixed and decode cost come from steps without prefill only, and the prefill cost from what is
    left of the others. One joint fit would blame prefill for a change of the decode cost that
    happened while nobody prefilled.
    """

    def __init__(self) -> None:
        self._fixed = self._decode = 0.0
        self._rows = self._rows_squared = self._count = 0.0
        self._seconds = self._rows_seconds = 0.0
        self._prefill_tokens = self._prefill_seconds = 0.0
        self.num_observations = 0

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one step."""
        self.num_observations += 1
        if prefill_tokens:
            rest = max(0.0, seconds - self._fixed - self._decode * decode_rows)
            self._prefill_tokens = _FORGET * self._prefill_tokens + prefill_tokens
            self._prefill_seconds = _FORGET * self._prefill_seconds + rest
            return
        self._count = _FORGET * self._count + 1
        self._rows = _FORGET * self._rows + decode_rows
        self._rows_squared = _FORGET * self._rows_squared + decode_rows**2
        self._seconds = _FORGET * self._seconds + seconds
        self._rows_seconds = _FORGET * self._rows_seconds + decode_rows * seconds
        self._fit()

    def predict(self, decode_rows: int, prefill_tokens: int) -> float:
        """Return the expected seconds of such a step, never negative."""
        decode = self._fixed + self._decode * decode_rows
        return max(0.0, decode) + prefill_tokens * self.prefill_token_seconds

    @property
    def prefill_token_seconds(self) -> float:
        """Seconds that one more prefill token costs; 0 before any was seen."""
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0

    def _fit(self) -> None:
        """Solve the two normal equations, pulled a little towards the last answer."""
        a, b, c = self._count + _INERTIA, self._rows, self._rows_squared + _INERTIA
        right = self._seconds + _INERTIA * self._fixed
        slope = self._rows_seconds + _INERTIA * self._decode
        size = a * c - b * b
        self._fixed, self._decode = (
            (c * right - b * slope) / size,
            (a * slope - b * right) / size,
        )


class Pacer:
    """Turns a target for step seconds into a prefill budget."""

    def __init__(self, *, target_s: float | None, block_size: int, max_tokens: int) -> None:
        """`target_s` None fixes the budget at `max_tokens`."""
        self.target_s, self._block_size, self._max_tokens = target_s, block_size, max_tokens
        self._last = min(max_tokens, 4 * block_size)
        self._charged_s = 0.0
        self.model = StepModel()

    def charge(self, seconds: float) -> None:
        """Take what the next step has spent on other work, such as pictures, off its target."""
        self._charged_s = seconds

    def encoding_seconds(self, decode_rows: int, *, shared: bool) -> float | None:
        """Return how long a step beside these decode rows may work on pictures.

        Half of what is left where prompts want it too (`shared`); None: until one is done.
        """
        if self.target_s is None:
            return None
        room = max(0.0, self.target_s - self.model.predict(decode_rows, 0))
        return room / 2 if shared else room

    def budget(self, decode_rows: int) -> int:
        """Return how many prefill tokens the next step may hold beside these decode rows."""
        if self.target_s is None:
            return self._max_tokens
        per_token = self.model.prefill_token_seconds
        room = self.target_s - self._charged_s - self.model.predict(decode_rows, 0)
        most = min(2 * self._last, self._max_tokens)
        fitting = most if per_token * most <= room else int(room / per_token)
        return min(max(self._block_size, min(fitting, most)), self._max_tokens)

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from a finished step."""
        self.model.observe(decode_rows, prefill_tokens, seconds)
        if prefill_tokens:
            self._last = max(self._block_size, prefill_tokens)
