"""`oxplow batch`: a file of requests in, a file of answers out.

Owns the options and the progress; the work is `oxplow.serve.batch`.
Invariant: a run that was interrupted goes on where it stopped when it is started again.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from oxplow.serve.console import AsJson, report, session
from oxplow.serve.flags import MODEL_FLAGS, Given, parameter, with_flags

__all__ = ["register"]

_INPUT = Annotated[Path, typer.Argument(help="JSONL: OpenAI batch lines, or bare bodies.")]
_OUTPUT = Annotated[Path, typer.Argument(help="JSONL of answers; what is in it is not repeated.")]
_CONCURRENCY = Annotated[int, typer.Option("--concurrency", min=1, help="Requests at once.")]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (
        parameter("source", _INPUT),
        parameter("output", _OUTPUT),
        parameter("concurrency", _CONCURRENCY, 32),
        parameter("as_json", AsJson, False),
    )
    example = "Example: oxplow batch in.jsonl out.jsonl --concurrency 16"
    app.command("batch", epilog=example)(with_flags(_batch, MODEL_FLAGS, own))


def _batch(
    context: typer.Context,
    given: Given,
    *,
    source: Path,
    output: Path,
    concurrency: int,
    as_json: bool,
) -> None:
    """Answer every request of a file; start it again to go on after an interruption."""
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from oxplow.serve.batch import read_items, run_batch
    from oxplow.serve.llm import open_llm

    items = read_items(source)
    with (
        open_llm(session(context).load(given)) as llm,
        Progress(console=Console(file=sys.stderr), transient=True) as progress,
    ):
        task = progress.add_task("requests", total=len(items))
        done = asyncio.run(
            run_batch(
                items,
                output,
                llm.answer,
                concurrency=concurrency,
                on_done=lambda r: progress.update(task, completed=r.asked + r.skipped),
            )
        )
    report(
        ("asked", "skipped", "failed", "completion tokens"),
        [(done.asked, done.skipped, done.failed, done.completion_tokens)],
        title=f"Answers in {output}",
        record={**asdict(done), "output": str(output)},
        as_json=as_json,
    )
    if done.failed:
        raise typer.Exit(1)
