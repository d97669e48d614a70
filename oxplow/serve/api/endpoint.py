"""The path that every generating endpoint takes: read, prepare, admit, answer.

Owns the order of these steps and the choice between a stream and one answer. Knows no wire form:
each API hands in a `Form`.
Invariant: nothing is sent before admission; a client that leaves ends its request within one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from oxplow.errors import OxplowError
from oxplow.serve.api.errors import ApiError, api_error, overloaded
from oxplow.serve.api.run import Run, Told
from oxplow.serve.api.service import Service
from oxplow.serve.api.sse import EventStream, client_left
from oxplow.serve.prepare.jobs import prepare
from oxplow.serve.sessions import check_name

__all__ = ["ClientLeftError", "Form", "answer", "job", "json_response", "read_body"]

_T = TypeVar("_T")
_SESSION_HEADER = "X-Oxplow-Session"


class ClientLeftError(Exception):
    """The client closed its side; nobody reads an answer."""


class Form(Protocol):
    """Writes the events of one request in the form of one API."""

    def begin(self) -> Iterable[bytes]:
        """Return what a stream opens with."""
        ...

    def tell(self, told: Told) -> Iterable[bytes]:
        """Take events in and return their part of a stream."""
        ...

    def end(self) -> Iterable[bytes]:
        """Return what a stream closes with."""
        ...

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Return how a stream that broke says so."""
        ...

    def whole(self) -> object:
        """Return the one answer, after all events were told."""
        ...


async def answer(request: Request, endpoint: str, make_form: Callable[[Run], Form]) -> Response:
    """Answer a request of `endpoint` as its body asks. Raises ApiError or ClientLeftError."""
    service: Service = request.app.state.service
    session = _session_name(request, service)
    body = await read_body(request, service)
    most = service.engine.info.max_model_len - 1
    prepared = await while_connected(request, job(service, prepare, body, endpoint, most))
    if session is not None and service.sessions is not None:
        await service.sessions.open(session)
    run = Run(service, prepared, request.state.request_id, session=session)
    await while_connected(request, run.admit())
    form = make_form(run)
    if prepared.shape.is_stream:
        return EventStream(
            _stream(run, form),
            keep_alive_s=service.limits.keep_alive_s,
            on_leave=service.metrics.cancelled.inc,
            on_close=run.close,
        )
    try:
        await while_connected(request, _collect(run, form))
        return json_response(form.whole())
    except ClientLeftError:
        service.metrics.cancelled.inc()
        raise
    finally:
        run.close()


def _session_name(request: Request, service: Service) -> str | None:
    """Return the session that a request names in its header; raises ApiError."""
    name = request.headers.get(_SESSION_HEADER)
    if name is None:
        return None
    if service.sessions is None:
        message = "sessions are off; start the server with --sessions-dir"
        raise ApiError(400, message, param=_SESSION_HEADER, code="unsupported")
    try:
        return check_name(name)
    except OxplowError as error:
        raise api_error(error) from error


async def job(service: Service, work: Callable[..., _T], body: bytes, *more: object) -> _T:
    """Run a job of the worker pool on a body. Raises ApiError."""
    try:
        return await service.workers.run(work, body, *more, num_bytes=len(body))
    except OxplowError as error:
        raise api_error(error) from error


async def read_body(request: Request, service: Service) -> bytes:
    """Read the whole body within the limits. Raises ApiError or ClientLeftError."""
    limits = service.limits
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        while True:
            try:
                chunk = await asyncio.wait_for(anext(stream), limits.body_timeout_s)
            except StopAsyncIteration:
                return b"".join(chunks)
            except ClientDisconnect:
                raise ClientLeftError from None
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="timeout") from None
            size += len(chunk)
            service.body_bytes += len(chunk)
            if size > limits.max_body_bytes:
                raise _too_large(limits.max_body_bytes)
            if service.body_bytes > limits.max_bodies_bytes:
                raise overloaded("too many bytes of requests are being read", 1.0)
            chunks.append(chunk)
    finally:
        service.body_bytes -= size


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Await `work`; raises ClientLeftError, after cancelling it, when the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(client_left(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _collect(run: Run, form: Form) -> None:
    async with aclosing(run.events()) as events:
        async for told in events:
            for _ in form.tell(told):
                continue


async def _stream(run: Run, form: Form) -> AsyncGenerator[bytes, None]:
    """Yield a stream; a failure after its start becomes its last event."""
    yield b"".join(form.begin()) or b": started\n\n"
    try:
        async with aclosing(run.events()) as events:
            async for told in events:
                chunk = b"".join(form.tell(told))
                if chunk:
                    yield chunk
    except ApiError as error:
        yield b"".join(form.fail(error))
        return
    yield b"".join(form.end())


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is too large; at most {limit} bytes", code="body_too_large")
