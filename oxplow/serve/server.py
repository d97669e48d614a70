"""A whole server: engine, workers and HTTP brought up, watched, and taken down in order.

Owns the order of start and end, and signals. Knows no endpoint.
Invariant: the address is taken before anything slow starts; after the first signal nothing new is
accepted, what runs has its grace time, and every child process is gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oxplow.engine.request import SamplingParams
from oxplow.errors import ConfigError, OxplowError
from oxplow.serve.api.app import build_app
from oxplow.serve.api.metrics import Metrics
from oxplow.serve.api.service import Limits, Service
from oxplow.serve.engine_port import Accepted, Core, Work, pack_ids
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.link.client import EngineClient, Transport
from oxplow.serve.link.local import ThreadTransport
from oxplow.serve.link.process import ProcessTransport
from oxplow.serve.machine import process_age_s
from oxplow.serve.model_files import read_model_files
from oxplow.serve.prepare.prepared import PrepareSettings
from oxplow.serve.sessions import Sessions
from oxplow.serve.text import load_text
from oxplow.serve.workers import WorkerPool

__all__ = ["ServeOptions", "http_server", "open_service", "run_server"]

log = logging.getLogger(__name__)

_FIRST_ANSWER_S = 60.0

_LEAST_SAVE_S = 10.0  # for the files of sessions, also where answers get no grace


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Say what to serve, where, and within which limits."""

    engine: EngineSettings
    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    is_inprocess: bool = False
    template_file: Path | None = None
    media_domains: tuple[str, ...] = ()
    sessions_dir: Path | None = None
    limits: Limits = field(default_factory=Limits)


async def open_service(options: ServeOptions) -> Service:
    """Start engine and workers side by side. Raises ConfigError or WeightError."""
    directory = Path(options.engine.directory)
    read_model_files(directory)  # a wrong folder is told before anything starts
    prepare = PrepareSettings(
        directory=directory,
        names=options.names,
        template_file=options.template_file,
        media_domains=options.media_domains,
    )
    text = load_text(directory, options.template_file)
    workers = WorkerPool(prepare, processes=not options.is_inprocess)
    engine = EngineClient(_transport(options))
    metrics = Metrics(lambda: engine.stats)
    engine.on_restart = metrics.restarts.inc
    sessions = None
    if options.sessions_dir is not None:
        sessions = Sessions(
            options.sessions_dir, engine, lambda what: metrics.session_files.labels(what).inc()
        )
    starts = (asyncio.ensure_future(engine.start()), asyncio.ensure_future(workers.start()))
    is_open = False
    try:
        await asyncio.gather(*starts)
        is_open = True
    finally:
        if not is_open:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await engine.abandon()
            workers.close()
    return Service(
        engine=engine,
        workers=workers,
        text=text,
        prepare=prepare,
        limits=options.limits,
        metrics=metrics,
        started_at=int(time.time()),
        sessions=sessions,
    )


def http_server(service: Service) -> uvicorn.Server:
    """Return the HTTP server of a started service; it leaves signals alone."""
    config = uvicorn.Config(
        build_app(service),
        http=_Protocol,
        log_config=None,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its life is told by us
    return _Server(config)


async def run_server(
    options: ServeOptions, on_ready: Callable[[Service, str, float], None]
) -> None:
    """Serve until a signal comes; `on_ready` gets the service, its address, and the seconds from
    the start of the process to the first answer, of one token, that the engine has given.

    Raises ConfigError, WeightError, or OxplowError where the engine failed for good.
    """
    began = time.monotonic() - (process_age_s() or 0.0)
    listener = _listen(options)
    loop = asyncio.get_running_loop()
    leave, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if leave.is_set() else leave).set()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, on_signal)
    opening = asyncio.ensure_future(open_service(options))
    leaving = asyncio.ensure_future(leave.wait())
    await asyncio.wait({opening, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        listener.close()
        return
    service = opening.result()
    server = http_server(service)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    on_ready(service, _address(listener, options.host), await _first_answer(service, began))
    gone = asyncio.ensure_future(service.engine.is_gone.wait())
    await asyncio.wait({serving, leaving, gone}, return_when=asyncio.FIRST_COMPLETED)
    await _take_down(service, hurry)
    server.should_exit = True
    await serving
    if service.engine.is_gone.is_set():
        raise OxplowError(
            "the engine failed; it shares a process with the server, so it cannot be restarted",
            wanted="a new start; without --inprocess a failed engine is replaced",
        )


async def _first_answer(service: Service, began: float) -> float:
    """Let the engine answer once, so that the first client does not pay for what is made on first
    use; return the seconds since `began`.
    """
    work = Work(
        request_id="first-answer",
        prompt=pack_ids([0]),
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        reuse_prefix=False,
    )
    ticket = service.engine.submit(work)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_ANSWER_S):
            taken = isinstance(await ticket.admission, Accepted)  # nothing follows a refusal
            while taken and await ticket.next_deltas():
                continue
    service.engine.close_ticket(ticket)
    return time.monotonic() - began


async def _take_down(service: Service, hurry: asyncio.Event) -> None:
    """Let answers finish within the grace time; a second signal ends the waiting."""
    service.is_leaving = True

    async def keep_sessions() -> None:
        if service.sessions is not None:
            await service.sessions.save_changed(max(_LEAST_SAVE_S, service.limits.grace_s))

    left, grace = service.engine.num_open, service.limits.grace_s
    if left:
        noun = "request" if left == 1 else "requests"
        hint = "; a second Ctrl-C ends them now"
        log.info("leaving; %s %s may finish within %.0f s%s", left, noun, grace, hint)
    else:
        log.info("leaving; no request is open")
    drain = asyncio.ensure_future(
        service.engine.drain(service.limits.grace_s, service.until_answered, keep_sessions)
    )
    second = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
    if not drain.done():
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)
        await service.engine.drain(0.0, service.until_answered)
    second.cancel()
    service.workers.close()


def _transport(options: ServeOptions) -> Transport:
    settings = options.engine
    if not options.is_inprocess:
        return ProcessTransport(settings)

    def build() -> Core:
        from importlib import import_module

        module, _, name = settings.factory.partition(":")
        core: Core = getattr(import_module(module), name)(settings)
        return core

    return ThreadTransport(build)


def _listen(options: ServeOptions) -> socket.socket:
    """Take the address. Raises ConfigError where it is taken, or open to others without a key."""
    if not _is_loopback(options.host) and options.limits.api_key is None:
        raise ConfigError(
            "an address that others can reach asks for a key",
            got=options.host,
            wanted="--api-key KEY, or --host 127.0.0.1",
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        # The address is ours from here on, not only after the model was read.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            "the address cannot be used",
            got=f"{options.host}:{options.port}, {error.strerror}",
            wanted="a free one: --port PORT",
        ) from error
    listener.setblocking(False)
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _address(listener: socket.socket, host: str) -> str:
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Protocol(HttpToolsProtocol):
    """An HTTP connection that tells an unknown method from a broken request."""

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused; called while its error is handled."""
        if not isinstance(sys.exception(), httptools.HttpParserInvalidMethodError):
            super().send_400_response(msg)
            return
        body = b'{"error":{"message":"Method Not Allowed","type":"invalid_request_error",'
        body += b'"param":null,"code":"method_not_allowed"}}'
        head = (
            "HTTP/1.1 405 Method Not Allowed\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
