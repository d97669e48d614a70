"""`oxplow sessions`: conversations of a running server, kept in files over its end.

Owns the four commands and their call of the server; the server owns the files.
Invariant: a session is named, never a path; what the server refuses ends as one sentence here.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.console import AsJson, report, session

__all__ = ["register"]

_TIMEOUT_S = 600.0  # a long conversation is gigabytes

_NAME = Annotated[str, typer.Argument(help="The session, as requests name it.")]
_URL = Annotated[
    str | None,
    typer.Option("--url", help="Address of the server; else serve.host and serve.port."),
]

_EFFECT = (
    "List, show, save and load the named conversations of a running server.\n\n"
    "A request names its conversation in the header X-Oxplow-Session. `save` writes what the"
    " server has computed of it into a file of the server's --sessions-dir; `load`, there or on"
    " another server with the same model, takes it back, so that the next turn reports those"
    " tokens as cached. The server does both by itself: it saves at its end and loads on a"
    " session's first turn. A server with a key asks for it: OXPLOW_SERVE_API_KEY=KEY."
)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    example = "Example: oxplow sessions save monday"
    group = typer.Typer(
        help=_EFFECT,
        epilog=example,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
    )
    group.command("list", epilog="Example: oxplow sessions list --json")(_list)
    group.command("show", epilog="Example: oxplow sessions show monday")(_show)
    group.command("save", epilog=example)(_save)
    load = "Example: oxplow sessions load monday --url http://127.0.0.1:9000"
    group.command("load", epilog=load)(_load)
    app.add_typer(group, name="sessions")


def _list(context: typer.Context, url: _URL = None, as_json: AsJson = False) -> None:
    """List the sessions that the server holds or has files of."""
    found = _Server(context, url).call("GET", "/sessions")["data"]
    _tell(found, {"sessions": found}, as_json=as_json)


def _show(context: typer.Context, name: _NAME, url: _URL = None, as_json: AsJson = False) -> None:
    """Describe one session: its tokens, and what its file says of itself."""
    found = _Server(context, url).call("GET", f"/sessions/{quote(name, safe='')}")
    file = found["file"] or {}
    rows = [("tokens held by the server", str(found["held_tokens"] or 0))]
    rows += [(key.replace("_", " "), _shown(key, value)) for key, value in file.items()]
    report(("what", "value"), rows, title=f"Session {name}", record=found, as_json=as_json)


def _save(context: typer.Context, name: _NAME, url: _URL = None, as_json: AsJson = False) -> None:
    """Save what the server's caches hold of a session to its file."""
    done = _Server(context, url).call("POST", f"/sessions/{quote(name, safe='')}/save")
    _tell_done(done, "saved", as_json=as_json)


def _load(context: typer.Context, name: _NAME, url: _URL = None, as_json: AsJson = False) -> None:
    """Load a session's file into the server's prefix cache."""
    done = _Server(context, url).call("POST", f"/sessions/{quote(name, safe='')}/load")
    _tell_done(done, "loaded", as_json=as_json)


def _tell_done(done: Mapping[str, Any], what: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(done) + "\n")
        return
    size = done["bytes"] / 2**20
    sys.stdout.write(f"{done['name']}: {done['tokens']} tokens {what}, {size:.1f} MiB\n")


def _tell(found: Iterable[Mapping[str, Any]], record: dict[str, Any], *, as_json: bool) -> None:
    rows = []
    for row in found:
        file = row["file"] or {}
        rows.append(
            (
                row["name"],
                row["held_tokens"] or "",
                file.get("tokens", ""),
                _shown("num_bytes", file["num_bytes"]) if file else "",
                _shown("saved_at", file["saved_at"]) if file else "never",
            )
        )
    columns = ("session", "tokens held", "tokens in its file", "size", "saved")
    report(columns, rows, title="Sessions", record=record, as_json=as_json)


def _shown(key: str, value: Any) -> str:
    if key == "num_bytes":
        return f"{value / 2**20:.1f} MiB"
    if key == "saved_at":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


class _Server:
    """The server that a command speaks to: `--url`, else the one that the settings describe."""

    def __init__(self, context: typer.Context, url: str | None) -> None:
        serve = session(context).load().runtime.serve
        host = "127.0.0.1" if serve.host in ("0.0.0.0", "::") else serve.host
        host = f"[{host}]" if ":" in host else host
        self._url = (url or f"http://{host}:{serve.port}").rstrip("/")
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise ConfigError("the address is none", got=url, wanted="http://HOST:PORT")
        self._headers = {"Content-Type": "application/json"}
        if serve.api_key:
            self._headers["Authorization"] = f"Bearer {serve.api_key}"

    def call(self, method: str, path: str) -> Any:
        """Call the server and return its JSON; raises ConfigError or RequestError."""
        data = b"{}" if method == "POST" else None
        url = self._url + path
        asked = urllib.request.Request(url, data=data, headers=self._headers, method=method)
        # A proxy of the environment has no business between a server and its operator.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(asked, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                "no Oxplow server answers",
                got=getattr(error, "reason", error),
                wanted="a running server: oxplow serve --sessions-dir DIR",
                where=self._url,
            ) from error


def _refusal(error: urllib.error.HTTPError) -> RequestError:
    try:
        told = json.load(error)["error"]
        return RequestError(str(told["message"]), code=told["code"])
    except (KeyError, TypeError, ValueError):
        return RequestError("the server refused", got=error.code)
