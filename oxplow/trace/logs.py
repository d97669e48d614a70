"""Structured log records: one JSON object a line, with request, step, rank and thread.

Owns the formatter, the handler for a JSONL file and `bind`. It must not install anything: handlers
are set by the composition root alone.
Invariant: every line is one JSON object with the same leading keys, and no secret is in it.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from oxplow.errors import ConfigError
from oxplow.trace.redact import plain

__all__ = ["JsonlFormatter", "bind", "open_log"]

# What logging itself puts on a record; anything else came in through `extra`.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonlFormatter(logging.Formatter):
    """Write a record as one JSON line; `rank` is the process's place in its group."""

    def __init__(self, *, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end. Fields given by `extra` or `bind` follow the fixed."""
        fields = record.__dict__
        row: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request": fields.get("request"),
            "step": fields.get("step"),
            "rank": fields.get("rank", self.rank),
            "thread": record.thread,
            "thread_name": record.threadName,
            "pid": record.process,
        }
        row |= {k: v for k, v in fields.items() if k not in _STANDARD and k not in row}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(plain(row), allow_nan=False)


def open_log(path: Path, *, rank: int = 0) -> logging.Handler:
    """Return a handler that appends JSON lines to `path`; the caller adds and closes it.

    Raises ConfigError where the file cannot be opened.
    """
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError("cannot open the log file", got=error.strerror, where=path) from error
    handler.setFormatter(JsonlFormatter(rank=rank))
    return handler


def bind(
    logger: logging.Logger, *, request: str | None = None, step: int | None = None
) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose records all carry `request` and `step`."""
    given: Mapping[str, object] = {"request": request, "step": step}
    return logging.LoggerAdapter(logger, {k: v for k, v in given.items() if v is not None})
