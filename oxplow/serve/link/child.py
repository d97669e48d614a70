"""The engine's own process.

Owns the sockets to the front, the thread that reads commands and the beat. Knows no HTTP.
Invariant: it leaves when the front has died; interrupts are the front's business.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from importlib import import_module

import msgspec
import zmq

from oxplow.errors import OxplowError
from oxplow.serve.engine_port import Core, EngineEvent, decode_command, encode
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.link.driver import Driver

__all__ = ["main"]

_BEAT_S = 1.0


class _Mouth:
    """Sends events; the driver's thread and the beat share it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._lock = socket, threading.Lock()

    def say(self, event: EngineEvent) -> None:
        """Send one event."""
        with self._lock:
            self._socket.send(encode(event))


def main(folder: str, settings_json: str) -> int:
    """Build the engine, turn it until it is drained, and return the exit code."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    parent = os.getppid()
    threading.Thread(
        target=_follow, args=(parent, folder), name="follow-front", daemon=True
    ).start()
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    context = zmq.Context()
    try:
        core = _build(settings)
    except OxplowError as error:
        sys.stderr.write(f"oxplow: {error}\n")
        return 2
    mouth = _Mouth(_connect(context, zmq.PUSH, f"ipc://{folder}/events"))
    driver = Driver(core, mouth.say)
    ears = _connect(context, zmq.PULL, f"ipc://{folder}/commands")
    threading.Thread(target=_listen, args=(ears, driver), name="commands", daemon=True).start()
    threading.Thread(target=_beat, args=(driver, mouth), name="beat", daemon=True).start()
    driver.run()
    return 0


def _build(settings: EngineSettings) -> Core:
    module, _, name = settings.factory.partition(":")
    core: Core = getattr(import_module(module), name)(settings)
    return core


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    return socket


def _listen(ears: zmq.Socket[bytes], driver: Driver) -> None:
    while True:
        driver.put(decode_command(ears.recv()))


def _beat(driver: Driver, mouth: _Mouth) -> None:
    while not driver.is_done:
        mouth.say(driver.beat())
        time.sleep(_BEAT_S)


def _follow(parent: int, folder: str) -> None:
    """Leave when the front has died, and take its folder along."""
    while os.getppid() == parent:
        time.sleep(_BEAT_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait on sockets would hold the interpreter back
