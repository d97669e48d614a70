"""A server in a thread of the test process.

Owns its event loop and its end. Must not know any endpoint.
Invariant: when the block ends, the thread, the engine and the workers have ended.
"""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from oxplow.serve.api.service import Limits, Service
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.server import ServeOptions, http_server, open_service

SCRIPTED = "tests.serve.scripted_core:build"
SCRIPTED_MAIN = (
    "import msgspec\n"
    "import oxplow.serve.engine_settings as settings\n"
    "make = settings.engine_settings\n"
    "settings.engine_settings = lambda *given: msgspec.structs.replace(\n"
    f"    make(*given), factory={SCRIPTED!r})\n"
    "from oxplow.serve.cli import main\n"
    "main()\n"
)
"""The program with a scripted engine, for `python -c`."""


@dataclass(frozen=True)
class Running:
    """A server: its address, a client of it, and its parts."""

    url: str
    client: httpx.Client
    service: Service

    def chat(self, script: str, **fields: object) -> httpx.Response:
        """Post one user message, which a scripted engine answers by itself."""
        body = {"messages": [{"role": "user", "content": script}], **fields}
        return self.client.post("/v1/chat/completions", json=body)


def options(
    folder: Path,
    *,
    limits: Limits | None = None,
    factory: str = SCRIPTED,
    is_inprocess: bool = True,
    max_model_len: int | None = None,
    max_waiting: int = 1024,
    template_file: Path | None = None,
) -> ServeOptions:
    """Return options of a small server."""
    engine = EngineSettings(
        directory=str(folder),
        factory=factory,
        cache_bytes=96 << 20,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        settings={"compute.threads": 1},
    )
    return ServeOptions(
        engine=engine,
        names=("tiny", "org/other"),
        is_inprocess=is_inprocess,
        template_file=template_file,
        limits=limits or Limits(),
    )


@contextmanager
def running(chosen: ServeOptions) -> Iterator[Running]:
    """Run a server as long as the block lasts."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started, leave = threading.Event(), []
    found: list[Service] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        service = await open_service(chosen)
        server = http_server(service)
        found.append(service)
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        leave.append(lambda: loop.call_soon_threadsafe(gone.set))
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        started.set()
        await gone.wait()
        service.is_leaving = True
        await service.engine.drain(0.0, service.until_answered)
        service.workers.close()
        server.should_exit = True
        await task

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - the test must see it
            failures.append(error)
            started.set()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    started.wait(60)
    if failures:
        thread.join()
        raise failures[0]
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(url, client, found[0])
    finally:
        leave[0]()
        thread.join(60)
    if failures:
        raise failures[0]


def events(response: httpx.Response) -> list[str]:
    """Return the data of each event of a finished stream, comments left out."""
    lines = response.text.splitlines()
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def hear_interrupts() -> None:
    """Let a child hear Ctrl-C although a shell started the tests in the background.

    Such a shell has interrupts ignored, and children inherit that. For `preexec_fn`.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
