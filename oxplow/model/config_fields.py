"""Typed reading of a checkpoint's config dictionary, with errors that name the field.

Owns the small reader that model families share. Knows no model. Invariant: a wrong type, a
missing field or an unsupported value raises ConfigError with field, got, wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from oxplow.errors import ConfigError

T = TypeVar("T")


class Fields:
    """A read-only view of one section of a config."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(
                "config section is not an object", got=type(values).__name__, where=where
            )
        self._values = values
        self.where = where

    def has(self, name: str) -> bool:
        """True when the field is present and not null."""
        return self._values.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = 2**40
    ) -> int:
        """Return an integer in [low, high]; without a default the field is required."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"config field {name} is out of range",
                got=value,
                wanted=f"an integer from {low} to {high}",
                where=self.where,
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or abs(value) == float("inf")
        ):
            raise ConfigError(f"config field {name} is not a number", got=value, where=self.where)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"config field {name} is not true or false", got=value, where=self.where
            )
        return value

    def names(self, name: str, count: int) -> list[str] | None:
        """Return a list of `count` strings, or None when absent; extra entries beyond `count`
        are an error.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or not all(isinstance(v, str) for v in value)
            or len(value) != count
        ):
            raise ConfigError(
                f"config field {name} has a wrong length or type",
                got=value,
                wanted=f"{count} strings",
                where=self.where,
            )
        return value

    def choice(self, name: str, value: str, known: Mapping[str, T]) -> T:
        """Map `value` through `known`, or refuse it."""
        if value not in known:
            raise ConfigError(
                f"config field {name}: unknown kind",
                got=value,
                wanted=sorted(known),
                where=self.where,
            )
        return known[value]

    def section(self, name: str) -> Fields:
        """Return a nested section, empty when absent."""
        return Fields(self._values.get(name) or {}, f"{self.where}.{name}")

    def refuse_other_than(self, fixed: Mapping[str, Any]) -> None:
        """Raise when a present field has another value than the only one we compute."""
        for name, wanted in fixed.items():
            if self.has(name) and self._values[name] != wanted:
                raise ConfigError(
                    f"config field {name} is not supported with this value",
                    got=self._values[name],
                    wanted=wanted,
                    where=self.where,
                )

    def refuse_entries_other_than(self, name: str, wanted: str, *alike: str) -> None:
        """Raise when a present list or string holds anything but `wanted` or its synonyms."""
        value = self._values.get(name)
        if value is None:
            return
        if not isinstance(value, list | str) or any(v not in (wanted, *alike) for v in value):
            raise ConfigError(
                f"config field {name} is not supported with this value",
                got=value,
                wanted=f"{wanted} everywhere",
                where=self.where,
            )

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config field {name} is missing", where=self.where)
        return value


def token_ids(value: Any, name: str = "eos_token_id") -> tuple[int, ...]:
    """Normalise a field of token ids: absent, one id or a list of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
        raise ConfigError(f"config field {name} holds no token ids", got=value, where="config")
    return tuple(ids)
