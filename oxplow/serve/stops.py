"""Stop texts: where an answer ends because of what it says.

Owns the search over text that arrives in pieces. Knows no tokens.
Invariant: text that may still become part of a stop text is withheld; the text let out does not
depend on how it was split.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopSearch"]


class StopSearch:
    """Lets text through up to the first stop text; `keeps_stop` lets that through as well."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops, self._keeps_stop = tuple(stops), keeps_stop
        self._longest = max((len(s) for s in stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what is certain."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            # The stop that is complete first wins, wherever it began: pieces must not matter.
            at, self.found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            end = at + len(self.found) if self._keeps_stop else at
            certain, self._held = self._held[:end], ""
            return certain
        split = len(self._held) - self._possible()
        certain, self._held = self._held[:split], self._held[split:]
        return certain

    def finish(self) -> str:
        """Return what was withheld."""
        held, self._held = self._held, ""
        return held

    def _possible(self) -> int:
        """Return how many last characters may be the start of a stop text."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
