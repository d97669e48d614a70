"""What commands share: settings of this run, and printing as a table or as one JSON line.

Owns the console and the rule of `--json`: the last line of standard output is one JSON object. It
must not know any single command.
Invariant: standard output carries results only; logs and errors go to standard error.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oxplow.config import LoadedConfig, load_config
from oxplow.errors import ConfigError, OxplowError
from oxplow.trace.redact import plain

__all__ = ["AsJson", "Session", "report", "report_error", "session"]

_PIPE_COLUMNS = 160

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Hold what stands before the command's name: the config file and the settings given."""

    config_file: Path | None = None
    assignments: tuple[str, ...] = ()

    def load(self, flags: Mapping[str, object] | None = None) -> LoadedConfig:
        """Read the settings of this run; `flags` of the command win. Raises ConfigError."""
        given: dict[str, object] = {}
        for text in self.assignments:
            key, equals, value = text.partition("=")
            if not equals:
                raise ConfigError("--set needs a value", got=text, wanted="KEY=VALUE")
            given[key.strip()] = value.strip()
        origin = "command line" if flags else "--set"
        return load_config(self.config_file, given | dict(flags or {}), override_origin=origin)


def session(context: typer.Context) -> Session:
    """Return what was given before the command's name."""
    found = context.find_object(Session)
    return found if found is not None else Session()


def report(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str,
    record: Mapping[str, object],
    as_json: bool,
) -> None:
    """Print `rows` as a table, or `record` as one JSON line; secrets in `record` are redacted."""
    if as_json:
        sys.stdout.write(json.dumps(plain(record), allow_nan=False) + "\n")
        return
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    # A pipe has no width; at the usual 80 columns the cells would be cut into pieces.
    is_terminal = sys.stdout.isatty()
    Console(width=None if is_terminal else _PIPE_COLUMNS).print(table)


def report_error(error: OxplowError, *, as_json: bool) -> None:
    """Print an error for a person on standard error, and for a program as the last JSON line."""
    sys.stderr.write(f"oxplow: {error}\n")
    if as_json:
        told = {"error": {"type": type(error).__name__, "message": str(error)}}
        sys.stdout.write(json.dumps(told) + "\n")
