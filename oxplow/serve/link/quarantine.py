"""Which requests may have stopped the engine, so that none of them stops it again and again.

Owns the suspects and the convicted, by content. Knows no ticket and no engine.
Invariant: of the requests that were open when an engine died, at most one runs at a time until it
has proved harmless, so the next death names its cause; both lists are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import msgspec

from oxplow.serve.engine_port import Work, encode

__all__ = ["Quarantine"]

_MOST = 1024


class Quarantine:
    """Judges works by their fingerprints."""

    def __init__(self) -> None:
        self._suspects: OrderedDict[str, int] = OrderedDict()  # how often it was open at a death
        self._cleared: OrderedDict[str, int] = OrderedDict()  # suspects that gave a token since
        self._convicted: OrderedDict[str, None] = OrderedDict()
        self._open: dict[str, Work] = {}
        self._on_trial: str | None = None  # request id of the one suspect that runs

    def is_convicted(self, work: Work) -> bool:
        """Tell whether a work stopped the engine before, being the only suspect."""
        return bool(self._convicted) and fingerprint(work) in self._convicted

    def may_start(self, work: Work) -> bool:
        """Tell whether a work may go to the engine now; a suspect waits for the one on trial."""
        return self._on_trial is None or not self._is_suspect(work)

    def start(self, work: Work) -> None:
        """Note that a work goes to the engine."""
        self._open[work.request_id] = work
        if self._is_suspect(work):
            self._on_trial = work.request_id

    def note_token(self, request_id: str) -> bool:
        """Note that a request gave a token; True: that ends a trial after one death.

        What was open at two deaths must come to its end.
        """
        if request_id != self._on_trial:
            return False
        mark = fingerprint(self._open[request_id])
        if self._suspects.get(mark, 0) > 1:
            return False
        self._cleared[mark] = self._suspects.pop(mark, 1)
        _bound(self._cleared)
        self._on_trial = None
        return True

    def end(self, request_id: str, *, is_harmless: bool) -> bool:
        """Note that a request left the engine alive; True: that ends a trial."""
        work = self._open.pop(request_id, None)
        if work is not None and is_harmless and self._cleared:
            self._cleared.pop(fingerprint(work), None)
        if work is None or request_id != self._on_trial:
            return False
        self._on_trial = None
        if is_harmless:
            self._suspects.pop(fingerprint(work), None)
        return True

    def death(self) -> None:
        """Judge what was open when the engine died: the one on trial, else all are suspects."""
        if self._on_trial is not None:
            guilty = fingerprint(self._open[self._on_trial])
            self._suspects.pop(guilty, None)
            self._convicted[guilty] = None
            _bound(self._convicted)
        else:
            for mark in {fingerprint(w) for w in self._open.values()}:
                deaths = self._cleared.pop(mark, 0) or self._suspects.get(mark, 0)
                self._suspects[mark] = deaths + 1
                self._suspects.move_to_end(mark)
            _bound(self._suspects)
        self._open.clear()
        self._on_trial = None

    def _is_suspect(self, work: Work) -> bool:
        return bool(self._suspects) and fingerprint(work) in self._suspects


def fingerprint(work: Work) -> str:
    """Name a work by what the engine computes from, whoever sends it; pictures by their names."""
    pictures = tuple(msgspec.structs.replace(p, pixels=b"") for p in work.pictures)
    plain = msgspec.structs.replace(work, request_id="", priority=0, salt="", pictures=pictures)
    return blake2b(encode(plain), digest_size=16).hexdigest()


def _bound(marks: OrderedDict[str, Any]) -> None:
    while len(marks) > _MOST:
        marks.popitem(last=False)
