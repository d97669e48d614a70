"""Typed reading of a request's JSON object.

Owns the words of a field error. Knows no endpoint.
Invariant: an absent field and null are the same; a field of the wrong type is a RequestError that
names it, never another exception.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from oxplow.errors import RequestError

__all__ = ["Fields", "field_error", "parse_object"]


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body. Raises RequestError for anything but a JSON object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            "the body is not JSON", got=str(error), wanted="a JSON object", code="invalid_json"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(
            "the body is not a JSON object", got=type(value).__name__, code="invalid_json"
        )
    return value


def field_error(name: str, got: object, wanted: str) -> RequestError:
    """Return the error of a field that has the wrong type or value."""
    shown = repr(got)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    return RequestError(
        f"{name} is not valid", got=shown, wanted=wanted, param=name, code="invalid_value"
    )


class Fields:
    """One JSON object and the name under which errors show it."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values, self._prefix = values, prefix

    def name(self, key: str) -> str:
        """Return the full name of a field."""
        return self._prefix + key

    def has(self, key: str) -> bool:
        """Tell whether a field is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int) -> int | None:
        """Read a whole number; 3.0 counts as one."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not low <= value <= high:
            raise field_error(self.name(key), value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, key: str, low: float, high: float) -> float | None:
        """Read a finite number."""
        value = self.values.get(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise field_error(self.name(key), value, f"a number from {low} to {high}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """Read true or false."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise field_error(self.name(key), value, "true or false")

    def text(self, key: str) -> str | None:
        """Read text."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise field_error(self.name(key), value, "text")

    def items(self, key: str) -> list[Any] | None:
        """Read a list."""
        value = self.values.get(key)
        if value is None or isinstance(value, list):
            return value
        raise field_error(self.name(key), value, "a list")

    def inner(self, key: str) -> Fields | None:
        """Read an object."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise field_error(self.name(key), value, "an object")
        return Fields(value, f"{self.name(key)}.")

    def texts(self, key: str, most: int) -> tuple[str, ...]:
        """Read one text or a list of at most `most`; empty ones are refused."""
        value = self.values.get(key)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
            raise field_error(self.name(key), value, "text or a list of texts, none of them empty")
        if len(texts) > most:
            raise field_error(self.name(key), f"{len(texts)} texts", f"at most {most}")
        return tuple(texts)

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Read a list of token ids."""
        value = self.values.get(key)
        return () if value is None else tuple(token_ids(value, self.name(key), vocab_size))


def token_ids(value: Any, name: str, vocab_size: int) -> list[int]:
    """Check a list of token ids; 3.0 counts as one, as JSON Schema says."""
    if not isinstance(value, list):
        raise field_error(name, value, "a list of token ids")
    ids = [int(i) if isinstance(i, float) and i.is_integer() else i for i in value]
    for item in ids:
        if type(item) is not int or not 0 <= item < vocab_size:
            raise field_error(name, item, f"token ids from 0 to {vocab_size - 1}")
    return ids
