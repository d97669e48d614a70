"""Encoded pictures by content: which are kept, which is encoded next.

Owns the encoder rows and their token budget. Knows no scheduler; `encode` is the model's.
Invariant: the kept rows never exceed the budget; a picture that the best-ranked prefill needs can
always be made room for, because a picture larger than the budget is refused when its request
arrives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from oxplow.engine.request import Picture
from oxplow.errors import ContractError, OxplowError, RequestError
from oxplow.trace import EventRing, EventType, Lane


class EncoderCache:
    """Rows of encoded pictures, least recently used out first."""

    def __init__(
        self,
        encode: Callable[[Tensor, Tensor], Tensor],
        *,
        hidden: int,
        max_tokens: int,
        ring: EventRing | None = None,
    ) -> None:
        self._encode, self._hidden, self._max_tokens = encode, hidden, max_tokens
        self._ring = ring or EventRing(0)
        self._rows: OrderedDict[str, Tensor] = OrderedDict()
        self.num_encoded = 0
        self.failures: dict[str, str] = {}  # content hash -> what the tower said

    @property
    def num_tokens(self) -> int:
        """Picture positions kept now."""
        return sum(len(rows) for rows in self._rows.values())

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

    def encode_next(self, wanted: Iterable[Picture]) -> bool:
        """Encode the first wanted picture that is missing and fits beside those before it.

        `wanted` is in order of rank; earlier ones are kept, others may go. False: nothing to do.
        """
        kept: set[str] = set()
        used = 0
        for picture in wanted:
            name, count = _name(picture), picture.span.num_tokens
            if picture.rows is not None or name in kept:
                continue
            if used + count > self._max_tokens:
                return False
            kept.add(name)
            used += count
            if name not in self._rows:
                self._make_room(count, kept)
                try:
                    self._rows[name] = self._encoded(picture)
                except OxplowError as error:
                    self.failures[picture.span.content_hash] = str(error)
                return True
        return False

    def _encoded(self, picture: Picture) -> Tensor:
        """Run the tower; pixels may be any array type. Raises ContractError if they do not fit."""
        pixels, grid = torch.as_tensor(picture.pixel_values), torch.as_tensor(picture.grid_thw)
        with self._ring.span(EventType.ENCODE, Lane.STEP, name=picture.span.content_hash[:16]):
            rows = self._encode(pixels, grid)
        if len(rows) != picture.span.num_tokens:
            raise ContractError(
                "a picture gives another number of rows than its place has",
                got=len(rows),
                wanted=picture.span.num_tokens,
            )
        self.num_encoded += 1
        return rows

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
