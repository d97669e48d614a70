"""The endpoints that generate nothing: models, tokens, health, readiness, metrics, the page.

Owns their forms. Knows no engine beyond its client.
Invariant: `/health` answers as long as this process lives; `/ready` is red whenever a new request
would not be served in time, and says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from oxplow.serve.api.endpoint import job, json_response, read_body, while_connected
from oxplow.serve.api.errors import ApiError
from oxplow.serve.api.openapi import openapi_document
from oxplow.serve.api.service import Service
from oxplow.serve.prepare.jobs import count_tokens, detokenize, tokenize

__all__ = [
    "count_message_tokens",
    "detokenize_ids",
    "health",
    "metrics",
    "model",
    "models",
    "openapi",
    "page",
    "ready",
    "tokenize_text",
    "version",
]

_MOST_TOKENS = 1 << 20
_PAGE = Path(__file__).with_name("chat.html")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def models(request: Request) -> Response:
    """List the served names."""
    service = _service(request)
    listed = [_model(service, name) for name in service.prepare.names]
    return json_response({"object": "list", "data": listed})


async def model(request: Request) -> Response:
    """Describe one served name; it may contain slashes."""
    service, name = _service(request), request.path_params["name"]
    if name not in service.prepare.names:
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; served: {', '.join(service.prepare.names)}",
            param="model",
            code="model_not_found",
        )
    return json_response(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "oxplow",
        "max_model_len": info.max_model_len,
        "has_vision": info.has_vision,
    }


async def tokenize_text(request: Request) -> Response:
    """Return the token ids of a text or of a conversation."""
    service = _service(request)
    body = await read_body(request, service)
    told = await while_connected(request, job(service, tokenize, body, _most_tokens(service)))
    return json_response({**told, "max_model_len": service.engine.info.max_model_len})


async def detokenize_ids(request: Request) -> Response:
    """Return the text of token ids."""
    service = _service(request)
    work = job(service, detokenize, await read_body(request, service))
    return json_response(await while_connected(request, work))


async def count_message_tokens(request: Request) -> Response:
    """Count the prompt tokens of a `/v1/messages` body."""
    service = _service(request)
    body = await read_body(request, service)
    work = job(service, count_tokens, body, _most_tokens(service))
    return json_response(await while_connected(request, work))


def _most_tokens(service: Service) -> int:
    """Return how many tokens are counted at all: texts may exceed the context, not without end."""
    return max(_MOST_TOKENS, service.engine.info.max_model_len) - 1


async def health(request: Request) -> Response:
    """Say that the server lives; `engine` tells whether its engine does."""
    service = _service(request)
    dead = "failed" if service.engine.is_gone.is_set() else "restarting"
    engine = "alive" if service.engine.is_alive else dead
    return json_response({"status": "ok", "engine": engine})


async def ready(request: Request) -> Response:
    """Say whether requests are served in time."""
    service = _service(request)
    reason = "the server is shutting down" if service.is_leaving else service.engine.not_ready()
    if reason:
        return json_response({"status": "not ready", "reason": reason}, 503)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Return the numbers in Prometheus' text form."""
    page_bytes = _service(request).metrics.page()
    return PlainTextResponse(page_bytes, media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(request: Request) -> Response:
    """Return the description of this API."""
    service = _service(request)
    names, vocab_size = service.prepare.names, service.engine.info.vocab_size
    return json_response(openapi_document(names, vocab_size))


async def version(request: Request) -> Response:
    """Return the version of Oxplow."""
    from oxplow import __version__

    return json_response({"version": __version__})


async def page(request: Request) -> Response:
    """Return the chat page."""
    return HTMLResponse(_PAGE.read_text(encoding="utf-8"))
