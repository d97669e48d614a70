"""Evidence on disk: findings as JSON lines, each carrying the hash of the line before.

Owns the file format and its verification. Knows nothing of what a finding means. Invariant: a line
is written once and whole; changing, dropping or reordering any earlier line breaks the chain and
`read_records` says at which line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oxplow.errors import ConfigError

__all__ = ["Record", "RecordFile", "read_records"]

_START = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line: its kind ("finding", "environment", ...), its body and its hash (sha256, hex)."""

    kind: str
    body: Mapping[str, object]
    previous: str
    digest: str


class RecordFile:
    """Append to one chain; the chain that the file already holds is verified first."""

    def __init__(self, path: Path) -> None:
        """Open `path`, which need not exist. Raises ConfigError for a broken chain."""
        self.path = path
        held = read_records(path) if path.exists() else ()
        self._last = held[-1].digest if held else _START

    def append(self, kind: str, body: Mapping[str, object]) -> Record:
        """Write one line and force it to disk. Raises ConfigError for values JSON cannot hold."""
        try:
            text = json.dumps(body, sort_keys=True, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"record of kind {kind!r} is not plain data: {error}", where=str(self.path)
            ) from error
        plain = json.loads(text)
        digest = _digest(kind, plain, self._last)
        row = {"kind": kind, "body": plain, "previous": self._last, "digest": digest}
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row, sort_keys=True) + "\n")
            out.flush()
            os.fsync(out.fileno())
        record = Record(kind=kind, body=plain, previous=self._last, digest=digest)
        self._last = digest
        return record


def read_records(path: Path) -> tuple[Record, ...]:
    """Read and verify a chain. Raises ConfigError that names the first line that does not hold."""
    records: list[Record] = []
    last = _START
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = _parse(line, f"{path}:{number}")
            if record.previous != last:
                raise ConfigError(
                    "the chain of records is broken: a line before this one was changed or removed",
                    got=record.previous,
                    wanted=last,
                    where=f"{path}:{number}",
                )
            if record.digest != _digest(record.kind, record.body, record.previous):
                raise ConfigError("a record was changed", where=f"{path}:{number}")
            records.append(record)
            last = record.digest
    return tuple(records)


def _parse(line: str, where: str) -> Record:
    try:
        row = json.loads(line)
        return Record(
            kind=row["kind"], body=row["body"], previous=row["previous"], digest=row["digest"]
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"this is no record: {error!r}", where=where) from error


def _digest(kind: str, body: Mapping[str, object], previous: str) -> str:
    text = json.dumps([kind, body, previous], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not plain data")
