"""The `oxplow` program: the composition root.

Owns the list of commands, the handlers of logging and the exit codes. It must not compute anything:
each command is a module of `serve/commands`.
Invariant: an expected failure ends as one sentence on standard error and exit code 2; a traceback
is a bug of ours.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from oxplow import __version__
from oxplow.config import LogConfig
from oxplow.errors import OxplowError
from oxplow.serve.commands import (
    batch,
    bench,
    calibrate,
    chat,
    check,
    config,
    diagnose,
    doctor,
    explain,
    faults,
    generate,
    serve,
    sessions,
)
from oxplow.serve.commands import eval as evaluate
from oxplow.serve.console import Session, report_error
from oxplow.trace import open_log

__all__ = ["app", "main", "start_logging"]

_INTERRUPTED = 130  # as shells tell an interrupt, and typer too

app = typer.Typer(
    name="oxplow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve, debug and speed up hybrid linear-attention models.",
    epilog="Example: oxplow doctor",
)

# The order of `oxplow --help`.
for command in (
    serve, chat, generate, batch, sessions, check, diagnose, faults, explain, bench, calibrate,
    evaluate, config, doctor,
):  # fmt: skip
    command.register(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"oxplow {__version__}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    context: typer.Context,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Read settings from this TOML.")
    ] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated."),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    context.obj = Session(config_file=config_file, assignments=tuple(assign or ()))


def start_logging(config: LogConfig, *, rank: int = 0) -> None:
    """Set the handlers of this process: text on standard error, JSONL in `config.file` if named.

    Raises ConfigError where the file cannot be opened.
    """
    shown = logging.StreamHandler(sys.stderr)
    shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [shown]
    if config.file is not None:
        handlers.append(open_log(Path(config.file), rank=rank))
    logging.basicConfig(level=config.level.upper(), handlers=handlers, force=True)


def main() -> None:
    """Run the program and exit.

    0: done. 1: a check failed. 2: wrong use or an expected failure. 130: interrupted.
    """
    try:
        app()
    except SystemExit as ended:
        if ended.code != _INTERRUPTED:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)  # a thread that reads a checkpoint would hold the interpreter back
    except OxplowError as error:
        report_error(error, as_json="--json" in sys.argv)
        raise SystemExit(2) from error
