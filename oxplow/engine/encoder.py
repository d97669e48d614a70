"""Encoded pictures by content: which are kept, which are being encoded, whose turn is next.

Owns the encoder rows, their token budget and the pictures in progress. Knows no scheduler; the work
itself is the model's. Invariant: the kept rows never exceed the budget; a picture that the
best-ranked prefill needs can always be made room for, because a picture larger than the budget is
refused when its request arrives; work on a picture that nobody wants any more is dropped before
the next piece.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oxplow.engine.request import Picture
from oxplow.errors import ContractError, OxplowError, RequestError
from oxplow.trace import EventRing, EventType, Lane

_NO_TIME = 1e-9  # told for work that a coarse clock did not see


class Encoding(Protocol):
    """The work on one picture, done piece by piece."""

    rows: Tensor | None

    def advance(self) -> None:
        """Do the next piece; after the last one `rows` is there."""
        ...


@dataclass(slots=True)
class _Job:
    """A picture in progress and the seconds that it has had so far."""

    encoding: Encoding
    seconds: float = 0.0


class EncoderCache:
    """Rows of encoded pictures, least recently used out first."""

    def __init__(
        self,
        begin: Callable[[Tensor, Tensor], Encoding],
        *,
        hidden: int,
        max_tokens: int,
        ring: EventRing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`begin` opens the work on pixels and their grid; nothing of it is done there."""
        self._begin, self._hidden, self._max_tokens = begin, hidden, max_tokens
        self._clock = clock
        self._ring = ring or EventRing(0)
        self._rows: OrderedDict[str, Tensor] = OrderedDict()
        self._jobs: dict[str, _Job] = {}
        self.num_encoded = self.num_pieces = 0
        self.failures: dict[str, str] = {}  # content hash -> what the tower said

    @property
    def num_tokens(self) -> int:
        """Picture positions kept now."""
        return sum(len(rows) for rows in self._rows.values())

    @property
    def num_open(self) -> int:
        """Pictures in progress."""
        return len(self._jobs)

    def refuse_impossible(self, pictures: Iterable[Picture]) -> None:
        """Raise RequestError for a picture that can never be encoded or does not fit its place."""
        for picture in pictures:
            count = picture.span.num_tokens
            if picture.rows is not None:
                shape = getattr(picture.rows, "shape", None)
                if shape is None or tuple(shape) != (count, self._hidden):
                    raise _refusal(
                        "encoder rows do not fit their place", shape, (count, self._hidden)
                    )
            elif picture.pixel_values is None or picture.grid_thw is None:
                raise _refusal("a picture has neither rows nor pixels", None, "one of them")
            elif count > self._max_tokens:
                raise _refusal("a picture is too large", f"{count} tokens", f"{self._max_tokens}")

    def is_resident(self, picture: Picture) -> bool:
        """Tell whether a picture's rows are here."""
        return picture.rows is not None or _name(picture) in self._rows

    def rows(self, picture: Picture) -> Tensor:
        """Return a resident picture's rows [num_tokens, hidden]."""
        if isinstance(picture.rows, Tensor):
            return picture.rows
        self._rows.move_to_end(_name(picture))
        return self._rows[_name(picture)]

    def encode_some(self, wanted: Iterable[Picture], seconds: float | None) -> float:
        """Work on wanted pictures for about `seconds` (None: until one is done), a piece at least.

        `wanted` is in order of rank. Of those that are missing and fit beside the better-ranked
        ones, the one that had the least time so far goes first: a small picture does not wait for
        a large one, and large ones take turns. Work on any other picture is dropped. Returns the
        seconds that were spent; 0 means that there was nothing to do.
        """
        kept, missing = self._choose(wanted)
        for name in [n for n in self._jobs if n not in missing]:
            del self._jobs[name]
        if not missing:
            return 0.0
        began, spent, is_enough = self._clock(), 0.0, False
        while missing and not is_enough:
            name = min(missing, key=lambda n: self._jobs[n].seconds if n in self._jobs else 0.0)
            is_done = self._work(name, missing[name], kept)
            if is_done:
                del missing[name]
            spent = self._clock() - began
            is_enough = is_done if seconds is None else spent >= seconds
        return max(spent, _NO_TIME)

    def _choose(self, wanted: Iterable[Picture]) -> tuple[set[str], dict[str, Picture]]:
        """Return the names to keep, and of them the missing ones, as far as the budget reaches."""
        kept: set[str] = set()
        missing: dict[str, Picture] = {}
        used = 0
        for picture in wanted:
            name, count = _name(picture), picture.span.num_tokens
            if picture.rows is not None or name in kept:
                continue
            if used + count > self._max_tokens:
                break
            kept.add(name)
            used += count
            if name not in self._rows:
                missing[name] = picture
        return kept, missing

    def _work(self, name: str, picture: Picture, kept: set[str]) -> bool:
        """Do one piece; True where the picture is done, or has failed."""
        began = self._clock()
        try:
            job = self._jobs.get(name) or self._open(name, picture)
            with self._ring.span(EventType.ENCODE, Lane.STEP, name=picture.span.content_hash[:16]):
                job.encoding.advance()
            self.num_pieces += 1
            job.seconds += self._clock() - began
            rows = job.encoding.rows
            if rows is None:
                return False
            del self._jobs[name]
            if len(rows) != picture.span.num_tokens:
                raise ContractError(
                    "a picture gives another number of rows than its place has",
                    got=len(rows),
                    wanted=picture.span.num_tokens,
                )
        except OxplowError as error:
            self._jobs.pop(name, None)
            self.failures[picture.span.content_hash] = str(error)
            return True
        self._make_room(len(rows), kept)
        self._rows[name] = rows
        self.num_encoded += 1
        return True

    def _open(self, name: str, picture: Picture) -> _Job:
        """Begin a picture; pixels may be any array type."""
        pixels, grid = torch.as_tensor(picture.pixel_values), torch.as_tensor(picture.grid_thw)
        self._jobs[name] = _Job(self._begin(pixels, grid))
        return self._jobs[name]

    def _make_room(self, count: int, kept: set[str]) -> None:
        for name in [n for n in self._rows if n not in kept]:
            if self.num_tokens + count <= self._max_tokens:
                return
            del self._rows[name]


def _name(picture: Picture) -> str:
    """Name rows by content and count: a hash that lies about the size harms nobody else."""
    return f"{picture.span.content_hash}/{picture.span.num_tokens}"


def _refusal(what: str, got: object, wanted: object) -> RequestError:
    return RequestError(what, got=got, wanted=wanted, param="messages", code="invalid_image")
