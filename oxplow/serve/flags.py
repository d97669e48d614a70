"""Options of a command that stand for settings: one table, one effect with file and environment.

Owns the table of flags. Knows no command.
Invariant: a flag sets exactly the setting that it names, and wins over file and environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

__all__ = [
    "MODEL_FLAGS",
    "SERVE_FLAGS",
    "SESSIONS_FLAG",
    "Flag",
    "Given",
    "parameter",
    "with_flags",
]


@dataclass(frozen=True, slots=True)
class Flag:
    """Name an option, the setting that it sets, its type and its effect."""

    option: str
    key: str
    kind: type
    effect: str

    @property
    def parameter(self) -> str:
        """The parameter's name."""
        return self.option.removeprefix("--").replace("-", "_")


MODEL_FLAGS: tuple[Flag, ...] = (
    Flag("--model", "serve.model", str, "Folder of the model; the bundled nano model if none."),
    Flag("--chat-template", "serve.chat_template", str, "File of a chat template."),
    Flag("--device", "compute.device", str, "Where to compute, such as cpu or cuda:0."),
    Flag("--threads", "compute.threads", int, "CPU threads; one per physical core if none."),
    Flag("--deterministic", "compute.deterministic", bool, "Same bits in any batch; slower."),
    Flag("--max-model-len", "cache.max_model_len_tokens", int, "Longest request in tokens."),
    Flag("--cache-mib", "limits.cache_mib", int, "MiB for cached state."),
    Flag("--max-running", "limits.max_running", int, "Answers that are computed at once."),
)
SESSIONS_FLAG = Flag(
    "--sessions-dir", "serve.sessions_dir", str, "Folder where named sessions are kept."
)
SERVE_FLAGS: tuple[Flag, ...] = (
    *MODEL_FLAGS,
    Flag("--host", "serve.host", str, "Address to listen on; 127.0.0.1 if none."),
    Flag("--port", "serve.port", int, "Port; 8000 if none, 0 takes a free one."),
    Flag("--served-model-name", "serve.names", str, "Names in the API, with commas."),
    Flag("--api-key", "serve.api_key", str, "Key that requests must carry."),
    Flag("--allow-origin", "serve.allow_origins", str, "Web origins, with commas; or *."),
    Flag(
        "--allow-media-domain",
        "serve.allow_media_domains",
        str,
        "Hosts that pictures may be fetched from, with commas.",
    ),
    SESSIONS_FLAG,
    Flag("--max-waiting", "limits.max_waiting", int, "Answers that may queue."),
    Flag("--grace-s", "limits.grace_s", int, "Seconds that answers get at the end."),
    Flag("--keep-alive-s", "limits.keep_alive_s", int, "Seconds between signs of life."),
)

Given = Mapping[str, object]


def parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> Any:
    """Return a parameter of a command in the form that `with_flags` takes."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_flags(
    call: Callable[..., None], flags: Sequence[Flag], more: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """Return a command function with one option for each flag.

    `call` gets the context, the settings given by flags under their keys, and the values of `more`,
    parameters in typer's form, by name.
    """

    def command(context: typer.Context, **values: Any) -> None:
        given = {f.key: values.pop(f.parameter) for f in flags}
        own = {p.name: values[p.name] for p in more}
        call(context, {k: v for k, v in given.items() if v is not None}, **own)

    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(
            flag.parameter,
            keyword,
            default=None,
            annotation=Annotated[flag.kind | None, typer.Option(flag.option, help=flag.effect)],
        )
        for flag in flags
    ]
    first = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    everything = [first, *(p.replace(kind=keyword) for p in more), *options]
    command.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in everything}
    command.__doc__ = call.__doc__
    command.__name__ = call.__name__
    return command
