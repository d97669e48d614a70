"""`oxplow serve`: one OpenAI-compatible server.

Owns what is printed at start and how settings become the server's options; the server is
`oxplow.serve.server`.
Invariant: what is printed is what runs; the last line shows how to talk to it.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.config import LoadedConfig
from oxplow.serve.console import AsJson, session
from oxplow.serve.flags import SERVE_FLAGS, Given, parameter, with_flags
from oxplow.serve.model_files import default_model

if TYPE_CHECKING:
    from oxplow.serve.api.service import Service
    from oxplow.serve.server import ServeOptions

__all__ = ["register", "serve_options"]

_INPROCESS = Annotated[
    bool, typer.Option("--inprocess", help="Run engine and workers as threads of one process.")
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (parameter("inprocess", _INPROCESS, False), parameter("as_json", AsJson, False))
    example = "Example: oxplow serve --model ./GLM-5.3-Flash --port 9000"
    app.command("serve", epilog=example)(with_flags(_serve, SERVE_FLAGS, own))


def _serve(context: typer.Context, given: Given, *, inprocess: bool, as_json: bool) -> None:
    """Serve a model to any OpenAI or Anthropic client, by default on 127.0.0.1:8000."""
    # Until the server has its own way to leave, a signal ends this process as asked.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from oxplow.serve.cli import start_logging
    from oxplow.serve.server import run_server

    flags = {**given, "serve.inprocess": True} if inprocess else given
    loaded = session(context).load(flags)
    start_logging(loaded.runtime.log)
    options = serve_options(loaded)
    asyncio.run(run_server(options, lambda *ready: _tell(*ready, as_json=as_json)))


def serve_options(loaded: LoadedConfig) -> "ServeOptions":
    """Turn settings into the server's options. Raises ConfigError."""
    from oxplow.serve.api.service import Limits
    from oxplow.serve.engine_settings import engine_settings
    from oxplow.serve.server import ServeOptions

    serve, limits = loaded.runtime.serve, loaded.runtime.limits
    directory = (Path(serve.model) if serve.model else default_model()).resolve()
    return ServeOptions(
        engine=engine_settings(directory, loaded),
        names=_words(serve.names) or (directory.name,),
        host=serve.host,
        port=serve.port,
        is_inprocess=serve.inprocess,
        template_file=Path(serve.chat_template) if serve.chat_template else None,
        media_domains=tuple(d.lower() for d in _words(serve.allow_media_domains)),
        sessions_dir=Path(serve.sessions_dir) if serve.sessions_dir else None,
        limits=Limits(
            max_body_bytes=limits.max_body_mib << 20,
            body_timeout_s=limits.body_timeout_s,
            keep_alive_s=limits.keep_alive_s,
            grace_s=limits.grace_s,
            api_key=serve.api_key,
            allow_origins=_words(serve.allow_origins),
        ),
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(w.strip() for w in (text or "").split(",") if w.strip())


def _tell(service: "Service", url: str, first_s: float, *, as_json: bool) -> None:
    """Print what runs, how to talk to it, and how long it took to the first answer."""
    info, names = service.engine.info, service.prepare.names
    if as_json:
        record = {"url": url, "models": names, "max_model_len": info.max_model_len}
        record["first_answer_s"] = round(first_s, 3)
        sys.stdout.write(json.dumps({**record, "plan": info.lines}) + "\n")
    else:
        for line in info.lines:
            sys.stdout.write(line + "\n")
        body = {"model": names[0], "messages": [{"role": "user", "content": "Hello"}]}
        sys.stdout.write(
            f"first answer {first_s:.1f} s after the start\n"
            f"serving {', '.join(names)} at {url} (chat page: {url}/, numbers: {url}/metrics)\n"
            f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'"
            f" -d '{json.dumps(body)}'\n"
        )
    sys.stdout.flush()
