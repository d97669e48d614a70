"""How far a checkpoint has been read, told to a person.

Owns the bar on a terminal and the lines elsewhere. Knows no checkpoint: it is told bytes.
Invariant: everything goes to standard error, and a load that takes no time shows nothing.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

__all__ = ["told_progress"]

log = logging.getLogger(__name__)

_LINE_EVERY_S = 5.0


@contextmanager
def told_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Give a callback (bytes done, bytes in all); a bar on a terminal, else a line every 5 s."""
    if not sys.stderr.isatty():
        yield _Lines(name)
        return
    columns = (TextColumn(f"loading {name}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """Log how far a long load is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        """Take bytes done and bytes in all."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_EVERY_S
        share = 100 * done / max(1, total)
        log.info("loading %s: %.0f%% of %d MiB", self._name, share, total >> 20)
