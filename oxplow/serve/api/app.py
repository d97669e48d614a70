"""The application: routes, the order of checks, and the one place that catches everything.

Owns routing, keys, request ids and the answer to faults of ours. Knows no API form.
Invariant: every answer carries X-Request-Id; every fault becomes an answer in the API's error shape
and a log record.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oxplow.serve.api import info
from oxplow.serve.api.chat import chat_completions
from oxplow.serve.api.completions import completions
from oxplow.serve.api.endpoint import ClientLeftError
from oxplow.serve.api.errors import ApiError, error_response
from oxplow.serve.api.messages import messages
from oxplow.serve.api.responses import responses
from oxplow.serve.api.service import Service
from oxplow.serve.api.sessions import (
    list_sessions,
    load_session,
    save_session,
    show_session,
)

__all__ = ["build_app"]

log = logging.getLogger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ready", "/"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LAG_INTERVAL_S = 0.5

Endpoint = Callable[[Request], Awaitable[Response]]

_POSTS: tuple[tuple[str, Endpoint], ...] = (
    ("/v1/chat/completions", chat_completions),
    ("/v1/completions", completions),
    ("/v1/responses", responses),
    ("/v1/messages", messages),
    ("/v1/messages/count_tokens", info.count_message_tokens),
    ("/tokenize", info.tokenize_text),
    ("/detokenize", info.detokenize_ids),
    ("/sessions/{name}/save", save_session),
    ("/sessions/{name}/load", load_session),
)
_GETS: tuple[tuple[str, Endpoint], ...] = (
    ("/v1/models", info.models),
    ("/v1/models/{name:path}", info.model),
    ("/sessions", list_sessions),
    ("/sessions/{name}", show_session),
    ("/health", info.health),
    ("/ready", info.ready),
    ("/metrics", info.metrics),
    ("/version", info.version),
    ("/openapi.json", info.openapi),
    ("/", info.page),
)


def build_app(service: Service) -> Starlette:
    """Return the application over a started service."""
    routes = [Route(path, _guarded(call), methods=["POST"]) for path, call in _POSTS]
    routes += [Route(path, _guarded(call), methods=["GET"]) for path, call in _GETS]
    middleware = [Middleware(_Door, service=service)]
    if service.limits.allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.limits.allow_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _routing_fault},
        lifespan=_watch_lag,
    )
    app.state.service = service
    return app


def _guarded(call: Endpoint) -> Endpoint:
    """Turn every fault of an endpoint into an answer."""

    async def guarded(request: Request) -> Response:
        service: Service = request.app.state.service
        is_anthropic = request.url.path.startswith("/v1/messages")
        try:
            return await call(request)
        except ApiError as error:
            if error.status in (429, 503) or error.status < 500:
                service.metrics.refused.labels(error.code or str(error.status)).inc()
            return error_response(error, is_anthropic=is_anthropic)
        except ClientLeftError:
            return Response(status_code=499)
        except Exception:
            log.exception("request %s failed", request.state.request_id)
            fault = ApiError(
                500,
                f"a fault of the server; its log names request {request.state.request_id}",
                kind="server_error",
                code="internal_error",
            )
            return error_response(fault, is_anthropic=is_anthropic)

    return guarded


async def _routing_fault(request: Request, error: Exception) -> Response:
    """Answer a path or method that is not served, in the API's own shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "fault"
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    message = f"{detail}: {request.method} {request.url.path}"
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return error_response(
        ApiError(status, message, code=code, headers=headers),
        is_anthropic=request.url.path.startswith("/v1/messages"),
    )


class _Door:
    """Gives each request its id, checks its key, and counts its answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        asked = headers.get("x-request-id", "")
        shown_id = asked if _REQUEST_ID.fullmatch(asked) else request_id

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = shown_id
                self._service.metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        if shown_id != request_id:
            log.debug("request %s is %s to its client", request_id, shown_id)
        if not self._may_enter(scope, headers):
            refusal = ApiError(
                401,
                "the API key is missing or wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            is_anthropic = str(scope["path"]).startswith("/v1/messages")
            await error_response(refusal, is_anthropic=is_anthropic)(scope, receive, tell)
            return
        await self._app(scope, receive, tell)

    def _may_enter(self, scope: Scope, headers: Headers) -> bool:
        key = self._service.limits.api_key
        if key is None or scope["method"] == "OPTIONS" or scope["path"] in _OPEN_PATHS:
            return True
        given = headers.get("x-api-key") or headers.get("authorization", "")
        given = given[7:] if given[:7].lower() == "bearer " else given
        return hmac.compare_digest(given.encode(), key.encode())


@asynccontextmanager
async def _watch_lag(app: Starlette) -> AsyncIterator[None]:
    """Measure how late the event loop runs, as long as the application lives."""

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            app.state.service.metrics.loop_lag.set(max(0.0, loop.time() - due))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
