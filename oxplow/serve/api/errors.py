"""Errors as clients see them: status, type, code, and whether to come back.

Owns the translation from our errors to HTTP. Knows no endpoint.
Invariant: a client's mistake is 4xx and never `rate_limit_error`; 429 and 503 carry Retry-After in
whole seconds; both shapes, OpenAI's and Anthropic's, hold the same message.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from oxplow.errors import CapacityError, OxplowError, RequestError
from oxplow.serve.engine_port import Refused

__all__ = [
    "ApiError",
    "api_error",
    "error_body",
    "error_response",
    "failure_of",
    "overloaded",
    "refusal_of",
    "unavailable",
]

_STATUS_OF_CODE: Mapping[str, int] = {"model_not_found": 404}
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_RESTART_S = 5
_JITTER = 0.25


@dataclass(slots=True)
class ApiError(Exception):
    """An answer that is not the one asked for."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def api_error(error: OxplowError, retry_s: float = 1.0) -> ApiError:
    """Turn one of our errors into an answer; `retry_s` is when it is worth trying again."""
    if isinstance(error, RequestError):
        code = error.code or "invalid_request"
        return ApiError(_STATUS_OF_CODE.get(code, 400), str(error), param=error.param, code=code)
    if isinstance(error, CapacityError):
        return overloaded(str(error), retry_s)
    return ApiError(500, str(error), kind="server_error", code="internal_error")


def overloaded(message: str, retry_s: float) -> ApiError:
    """Return the answer of a full queue."""
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", headers=_retry(retry_s)
    )


def unavailable(message: str, retry_s: float = _RESTART_S) -> ApiError:
    """Return the answer of a server that starts, restarts or leaves."""
    return ApiError(503, message, kind="server_error", code="unavailable", headers=_retry(retry_s))


def refusal_of(refused: Refused, retry_s: float) -> ApiError:
    """Turn an engine's refusal into an answer."""
    match refused.kind:
        case "request":
            code = refused.code or "invalid_request"
            return ApiError(400, refused.message, param=refused.param, code=code)
        case "capacity":
            return overloaded(refused.message, retry_s)
        case "lost":
            return unavailable(refused.message)
    return ApiError(500, refused.message, kind="server_error", code="internal_error")


def failure_of(reason: str, failure: str) -> ApiError:
    """Return the error of a choice that did not come to an end of its own."""
    if reason == "aborted":
        return unavailable(failure or "the request was cut short")
    if "engine stopped" in failure or "shutting down" in failure:
        return unavailable(failure)
    return ApiError(500, failure or "the request failed", kind="server_error", code="failed")


def error_body(error: ApiError, *, is_anthropic: bool = False) -> dict[str, Any]:
    """Return the JSON of an error, in OpenAI's or Anthropic's shape."""
    if is_anthropic:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: ApiError, *, is_anthropic: bool = False) -> Response:
    """Return the HTTP answer of an error."""
    return Response(
        msgspec.json.encode(error_body(error, is_anthropic=is_anthropic)),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def _retry(seconds: float) -> dict[str, str]:
    """Say when to come back: never too early, and up to a quarter later, so that not all who were
    refused together return together.
    """
    spread = 1 + _JITTER * random.random()
    return {"Retry-After": str(max(1, math.ceil(seconds * spread)))}
