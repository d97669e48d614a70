"""`oxplow config`: every setting with its value and where that value came from.

Owns the presentation only; the settings are those of `oxplow.config`.
Invariant: what is printed is what a command started in the same way would use.
"""

from dataclasses import replace
from typing import Annotated

import typer

from oxplow.config import Setting
from oxplow.serve.console import AsJson, report, session
from oxplow.trace.redact import REDACTED, is_secret

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
    settings = [_hidden(s) for s in session(context).load().settings]
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


def _hidden(setting: Setting) -> Setting:
    """Return a setting as it may be shown: secrets are named, not told."""
    secret = is_secret(setting.key.rpartition(".")[2]) and setting.value is not None
    return replace(setting, value=REDACTED) if secret else setting
