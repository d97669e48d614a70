"""`oxplow doctor`: what is wrong with this machine or install, and how to mend it.

Owns the presentation and the exit code; the checks are in `oxplow.serve.doctor`.
Invariant: exit code 1 exactly when a finding has the verdict "fail".
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from oxplow.serve.console import AsJson, report, session

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("doctor", epilog="Example: oxplow doctor --json")(_doctor)


def _doctor(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where logs and caches would be written.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check Python, torch, threads, devices, packages, memory and disk."""
    from oxplow.serve.doctor import examine

    threads = session(context).load().runtime.compute.threads
    findings = examine(folder.resolve(), threads)
    failed = [f.check for f in findings if f.verdict == "fail"]
    report(
        ("check", "verdict", "found", "how to mend it"),
        [(f.check, f.verdict, f.found, f.mend) for f in findings],
        title="Oxplow doctor: " + (f"{len(failed)} failed" if failed else "fit to run"),
        record={
            "fit": not failed,
            "failed": failed,
            "findings": [asdict(f) for f in findings],
        },
        as_json=as_json,
    )
    if failed:
        raise typer.Exit(1)
