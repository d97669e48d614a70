"""`/sessions`: named conversations listed, saved to files and loaded from them.

Owns their forms and the header that names a request's session. Knows no file and no engine.
Invariant: a name is all that a request can say; where there is no folder of sessions, every one
of these answers 404. POST asks for a JSON content type, so that no foreign web page can send one
unasked.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxplow.errors import OxplowError, TransferError
from oxplow.serve.api.endpoint import json_response, read_body
from oxplow.serve.api.errors import ApiError, api_error, unavailable
from oxplow.serve.api.service import Service
from oxplow.serve.engine_port import SessionDone
from oxplow.serve.prepare.fields import parse_object
from oxplow.serve.sessions import Sessions

__all__ = ["list_sessions", "load_session", "save_session", "show_session"]


async def list_sessions(request: Request) -> Response:
    """List the sessions that this server holds or has files of."""
    sessions = _sessions(request)
    held = sessions.held()
    files = {f.name: _file(f) for f in sessions.files()}
    rows = [
        {"name": name, "held_tokens": held.get(name), "file": files.get(name)}
        for name in sorted(held.keys() | files.keys())
    ]
    return json_response({"object": "list", "data": rows})


async def show_session(request: Request) -> Response:
    """Describe one session."""
    sessions, name = _sessions(request), request.path_params["name"]
    try:
        found = sessions.file(name)
    except OxplowError as error:
        raise _told(request, error) from error
    held = sessions.held().get(name)
    if found is None and held is None:
        raise ApiError(404, f"unknown session: {name}", param="session", code="not_found")
    return json_response(
        {"name": name, "held_tokens": held, "file": None if found is None else _file(found)}
    )


async def save_session(request: Request) -> Response:
    """Save what the caches hold of a session to its file."""
    sessions = _sessions(request)
    await _ask_for_json(request)
    name = request.path_params["name"]
    try:
        return json_response(_done(name, await sessions.save(name)))
    except OxplowError as error:
        raise _told(request, error) from error


async def load_session(request: Request) -> Response:
    """Take a session's file into the prefix cache."""
    sessions = _sessions(request)
    await _ask_for_json(request)
    name = request.path_params["name"]
    try:
        return json_response(_done(name, await sessions.load(name)))
    except OxplowError as error:
        raise _told(request, error) from error


def _sessions(request: Request) -> Sessions:
    service: Service = request.app.state.service
    if service.sessions is None:
        raise ApiError(
            404, "sessions are off; start the server with --sessions-dir", code="not_found"
        )
    return service.sessions


async def _ask_for_json(request: Request) -> None:
    """Refuse a body that is no JSON object; there is nothing to choose in it yet."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json", code="invalid_value")
    service: Service = request.app.state.service
    try:
        parse_object(await read_body(request, service))
    except OxplowError as error:
        raise api_error(error) from error


def _told(request: Request, error: OxplowError) -> ApiError:
    """Turn an error into an answer; a file that does not fit this server is a conflict."""
    service: Service = request.app.state.service
    if not service.engine.is_alive:
        return unavailable(str(error))
    if isinstance(error, TransferError):
        return ApiError(409, str(error), param="session", code="session_refused")
    told = api_error(error)
    if told.code == "not_found":
        told.status = 404
    return told


def _file(file: Any) -> dict[str, Any]:
    told = asdict(file)
    told.pop("name")
    return told


def _done(name: str, done: SessionDone) -> dict[str, Any]:
    return {"name": name, "tokens": done.tokens, "bytes": done.num_bytes}
