"""`oxplow batch`: a file of requests in, a file of answers out.

Owns the options and the progress; the work is `oxplow.serve.batch`.
Invariant: a run that was interrupted goes on where it stopped when it is started again, and says
so; the exit code is 0 only where every line of the input has its answer.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report, session
from oxplow.serve.flags import MODEL_FLAGS, Given, parameter, with_flags

if TYPE_CHECKING:
    from oxplow.serve.batch import BatchReport

__all__ = ["register"]

_INTERRUPTED = 130  # as shells tell an interrupt
_TERMINAL_S = 0.5

_INPUT = Annotated[Path, typer.Argument(help="JSONL: OpenAI batch lines, or bare bodies.")]
_OUTPUT = Annotated[Path, typer.Argument(help="JSONL of answers; what is in it is not repeated.")]
_CONCURRENCY = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once.")]
_RETRY = Annotated[
    bool,
    typer.Option("--retry-failed", help="Ask the lines again whose failure is in the output."),
]
_EVERY = Annotated[
    int, typer.Option("--progress-s", min=1, help="Seconds between lines of progress.")
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (
        parameter("source", _INPUT),
        parameter("output", _OUTPUT),
        parameter("concurrency", _CONCURRENCY, 32),
        parameter("retry_failed", _RETRY, False),
        parameter("progress_s", _EVERY, 10),
        parameter("as_json", AsJson, False),
    )
    example = "Example: oxplow batch in.jsonl out.jsonl --retry-failed"
    app.command("batch", epilog=example)(with_flags(_batch, MODEL_FLAGS, own))


def _batch(
    context: typer.Context,
    given: Given,
    *,
    source: Path,
    output: Path,
    concurrency: int,
    retry_failed: bool,
    progress_s: int,
    as_json: bool,
) -> None:
    """Answer every request of a file, without a server.

    Progress goes to standard error: a bar on a terminal, else a line every --progress-s seconds.
    Ctrl-C stops; what was answered is in the output, and the same command goes on from there.
    A request that fails is written with its error, and is asked again with --retry-failed only.
    Exit code: 0 every line has its answer, 1 some failed, now or before, 130 interrupted.
    """
    from oxplow.serve.batch import BatchReport, read_answers, read_items, run_batch
    from oxplow.serve.llm import open_llm

    items = read_items(source)
    if source.exists() and output.exists() and source.samefile(output):
        raise ConfigError("input and output are one file", got=source)
    done = BatchReport(total=len(items))
    try:
        with open_llm(session(context).load(given)) as llm:
            work = run_batch(
                items, output, llm, done, concurrency=concurrency, retries_failed=retry_failed
            )
            asyncio.run(_watched(work, done, progress_s))
    except KeyboardInterrupt as interrupt:
        found = read_answers(output)
        held = sum(item.name in found for item in items)
        sys.stderr.write(
            f"interrupted: {held} of {len(items)} lines are in {output};"
            f" start the same command again to go on\n"
        )
        if as_json:
            told = {**asdict(done), "output": str(output), "interrupted": True}
            sys.stdout.write(json.dumps(told) + "\n")
        raise typer.Exit(_INTERRUPTED) from interrupt
    report(
        ("asked", "skipped", "failed", "failed before", "completion tokens"),
        [(done.asked, done.skipped, done.failed, done.failed_before, done.completion_tokens)],
        title=f"Answers in {output}",
        record={**asdict(done), "output": str(output), "interrupted": False},
        as_json=as_json,
    )
    failed = done.failed + done.failed_before
    if failed:
        sys.stderr.write(
            f"{failed} of {done.total} lines failed; their errors are in {output};"
            f" --retry-failed asks them again\n"
        )
        raise typer.Exit(1)


async def _watched(work: Coroutine[None, None, None], done: "BatchReport", every_s: int) -> None:
    """Run the work and tell how far it is, in the way that standard error can show."""
    began = time.monotonic()
    running = asyncio.ensure_future(work)
    if not sys.stderr.isatty():
        await _until(running, every_s, lambda: sys.stderr.write(_line(done, began) + "\n"))
        return
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("requests", total=done.total)
        await _until(running, _TERMINAL_S, lambda: progress.update(task, completed=done.done))


async def _until(
    running: "asyncio.Future[None]", every_s: float, tell: Callable[[], object]
) -> None:
    """Tell every so often until the work has ended; raises what it raised."""
    try:
        while not running.done():
            await asyncio.wait({running}, timeout=every_s)
            if not running.done():
                tell()
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _line(done: "BatchReport", began: float) -> str:
    """Say how far the work is, and for how long it will go on at this pace."""
    took_s = time.monotonic() - began
    text = f"batch: {done.done} of {done.total} lines, {done.failed + done.failed_before} failed"
    text += f", {done.completion_tokens} tokens in {took_s:.0f} s"
    if done.asked:
        left_s = took_s / done.asked * (done.total - done.done)
        text += f", about {left_s:.0f} s" if left_s < 120 else f", about {left_s / 60:.0f} min"
        text += " left"
    return text
