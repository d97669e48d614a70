"""How many prefill tokens fit into a step of the wished length.

Owns an online model of step seconds, in which a prompt token costs more the more context it reads.
Knows no request and no clock: it is told what a step held and how long it took. Invariant: the
budget is between a few tokens and the configured most, and its predicted time at most doubles from
one step to the next, so that a wrong early guess cannot make one huge step.
"""

from __future__ import annotations

_FORGET = 0.97  # weight of the past per observation: costs drift with load
_INERTIA = 1e-3  # pull towards the last answer: a number of rows that nobody tries keeps its cost
_CONTEXT = 1e4  # tokens; scales the context's cost to the size of a token's own
_LEAST = 16  # prefill tokens of a step, however slow: fewer would be all overhead


class StepModel:
    """seconds = fixed + decode cost * rows + sum over tokens of (token cost + context cost * T).

    T is the context that a prefill token reads. Fixed and decode cost come from steps without
    prefill only, and the other two from what is left of the others. One joint fit would blame
    prefill for a change of the decode cost that happened while nobody prefilled.
    """

    def __init__(self) -> None:
        self._fixed = self._decode = 0.0
        self._rows = self._rows_squared = self._count = 0.0
        self._seconds = self._rows_seconds = 0.0
        self._token = self._context = 0.0
        self._moments = (0.0, 0.0, 0.0)  # of tokens and scaled pairs
        self._products = (0.0, 0.0)  # with the seconds
        self.num_observations = 0

    def observe(
        self, decode_rows: int, prefill_tokens: int, seconds: float, pairs: float = 0.0
    ) -> None:
        """Learn from one step; `pairs` adds up the context that each prefill token read."""
        self.num_observations += 1
        if prefill_tokens:
            rest = max(0.0, seconds - self._fixed - self._decode * decode_rows)
            self._fit_prefill(prefill_tokens, pairs / _CONTEXT, rest)
            return
        self._count = _FORGET * self._count + 1
        self._rows = _FORGET * self._rows + decode_rows
        self._rows_squared = _FORGET * self._rows_squared + decode_rows**2
        self._seconds = _FORGET * self._seconds + seconds
        self._rows_seconds = _FORGET * self._rows_seconds + decode_rows * seconds
        self._fit()

    def predict(self, decode_rows: int, prefill_tokens: int, context: float = 0.0) -> float:
        """Return the expected seconds of such a step, never negative."""
        decode = self._fixed + self._decode * decode_rows
        return max(0.0, decode) + prefill_tokens * self.token_seconds(context)

    def token_seconds(self, context: float = 0.0) -> float:
        """Seconds that one more prefill token costs at this context; 0 before any was seen."""
        return self._token + self._context * context / _CONTEXT

    def _fit_prefill(self, tokens: float, pairs: float, seconds: float) -> None:
        """Solve for token and context cost, pulled to the last answer where steps say nothing."""
        xx, xy, yy = (
            _FORGET * old + new
            for old, new in zip(self._moments, (tokens**2, tokens * pairs, pairs**2), strict=True)
        )
        xs, ys = (
            _FORGET * old + new
            for old, new in zip(self._products, (tokens * seconds, pairs * seconds), strict=True)
        )
        self._moments, self._products = (xx, xy, yy), (xs, ys)
        pull = _INERTIA * (xx + yy)
        if self._token == 0.0 and self._context == 0.0:
            self._token = xs / xx  # nothing to be pulled to yet
        a, b, c = xx + pull, xy, yy + pull
        right, below = xs + pull * self._token, ys + pull * self._context
        size = a * c - b * b
        token, context = (c * right - b * below) / size, (a * below - b * right) / size
        if context < 0:
            token, context = xs / xx, 0.0
        elif token < 0:
            token, context = 0.0, ys / yy
        self._token, self._context = token, context

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
        self.target_s, self._max_tokens = target_s, max_tokens
        self._first = min(max_tokens, 4 * block_size)
        self._last_s = self._charged_s = 0.0
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

    def budget(self, decode_rows: int, context: float = 0.0) -> int:
        """Return how many prefill tokens of this context the next step may hold beside these
        decode rows.
        """
        if self.target_s is None:
            return self._max_tokens
        per_token = self.model.token_seconds(context)
        if per_token == 0.0:
            return self._first
        room = self.target_s - self._charged_s - self.model.predict(decode_rows, 0)
        fitting = int(min(room, 2 * self._last_s) / per_token)
        return min(max(_LEAST, fitting), self._max_tokens)

    def weight(self, context: float, reference: float) -> float:
        """Return how many tokens of the `reference` context one token of `context` costs."""
        base = self.model.token_seconds(reference)
        if self.target_s is None or base == 0.0:
            return 1.0
        return self.model.token_seconds(context) / base

    def observe(
        self, decode_rows: int, prefill_tokens: int, seconds: float, pairs: float = 0.0
    ) -> None:
        """Learn from a finished step; `pairs` adds up the context of its prefill tokens."""
        self.model.observe(decode_rows, prefill_tokens, seconds, pairs)
        if prefill_tokens:
            context = pairs / prefill_tokens
            least = _LEAST * self.model.token_seconds(context)
            self._last_s = max(least, prefill_tokens * self.model.token_seconds(context))
