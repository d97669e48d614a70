"""`oxplow config`: every setting with its value and where that value came from.

Owns the presentation only; the settings are those of `oxplow.config`.
Invariant: what is printed is what a command started in the same way would use.
"""

from typing import Annotated

import typer

from oxplow.serve.console import AsJson, report, session

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("config", epilog="Example: oxplow --set cache.block_size_tokens=32 config --show")(
        _config
    )


def _config(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--show", help="Show the settings (the default).")] = True,
    as_json: AsJson = False,
) -> None:
    """Show every setting, its value, its origin and the variable that sets it."""
    settings = session(context).load().settings
    report(
        ("setting", "value", "origin", "variable", "effect"),
        [
            (s.key, "unset" if s.value is None else s.value, s.origin, s.env, s.doc)
            for s in settings
        ],
        title="Settings",
        record={
            "settings": {s.key: {"value": s.value, "origin": s.origin} for s in settings},
        },
        as_json=as_json,
    )
