"""Named conversations: what of them is in the caches, and the files that outlive a server.

Owns the names, the folder of session files, and the memory of each named conversation's last turn.
Knows no HTTP and no tensor; the engine writes and reads the files.
Invariant: a file is named by the operator's folder and a checked name, never by a path from a
request; a session that cannot be loaded costs its owner a computation and nobody else anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from oxplow.errors import CapacityError, ConfigError, OxplowError, RequestError, TransferError
from oxplow.serve.engine_port import (
    LoadSession,
    SaveSession,
    SessionDone,
    WireSpan,
    Work,
    pack_ids,
)
from oxplow.serve.link.client import EngineClient

__all__ = ["SessionFile", "Sessions", "check_name", "read_session_file"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDING = ".safetensors"
_MOST_NAMES = 256
_MOST_HEADER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFile:
    """What a session file says of itself; `starts` are the positions that a turn can go on from."""

    name: str
    tokens: int
    starts: tuple[int, ...]
    num_bytes: int
    saved_at: int
    revision: str
    layout: str


@dataclass(slots=True)
class _Turn:
    """The last turn of a named conversation."""

    prompt: bytes
    answer: list[int]
    pictures: tuple[WireSpan, ...]
    salt: str
    is_saved: bool = False


def check_name(name: str) -> str:
    """Return a session's name; raises RequestError for what is none."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            "a session's name is not one",
            got=repr(name[:80]),
            wanted="1 to 64 letters, digits, dots, underscores and dashes, first a letter or digit",
            param="session",
            code="invalid_value",
        )
    return name


def read_session_file(path: Path) -> SessionFile:
    """Read the header of a session file; raises TransferError for any other file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = file.read(size) if size <= _MOST_HEADER_BYTES else b""
            state = path.stat()
        metadata = json.loads(head)["__metadata__"]
        told = json.loads(metadata["manifest"])
        tokens = int(told["computed_tokens"])
        return SessionFile(
            name=path.name.removesuffix(_ENDING),
            tokens=tokens,
            starts=(*(int(p["tokens"]) for p in told["points"]), tokens),
            num_bytes=state.st_size,
            saved_at=int(state.st_mtime),
            revision=str(told["revision"]),
            layout=str(told["layout"]),
        )
    except OSError as error:
        raise TransferError(
            "the session file cannot be read", got=error.strerror, where=path.name
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError("this is no session file", where=path.name) from error


class Sessions:
    """The named conversations of one server; everything runs on the event loop's thread."""

    def __init__(
        self, directory: Path, engine: EngineClient, count: Callable[[str], None] = lambda _: None
    ) -> None:
        """Take the folder, made where it is not there; raises ConfigError where it cannot be.

        `count` is told saved, loaded or refused for each file.
        """
        self._directory, self._engine, self._count = directory, engine, count
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._looked_up: OrderedDict[str, int] = OrderedDict()  # name to the engine's start
        self._disk = asyncio.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in directory.glob(f".*{_ENDING}.*.part"):
                left.unlink()
        except OSError as error:
            raise ConfigError(
                "the folder of sessions cannot be used", got=error.strerror, where=directory
            ) from error

    def note(self, name: str, work: Work, answer: Sequence[int]) -> None:
        """Remember a turn of a conversation that has ended."""
        spans = [
            WireSpan(start=p.start, num_tokens=p.num_tokens, content_hash=p.content_hash)
            for p in work.pictures
        ]
        self._turns[name] = _Turn(work.prompt, list(answer), tuple(spans), work.salt)
        _bound(self._turns, name)

    async def open(self, name: str) -> None:
        """Load a session's file before its first turn in this engine, if there is one."""
        if self._looked_up.get(name) == self._engine.num_starts or not self._path(name).exists():
            return
        async with self._disk:
            start = self._engine.num_starts
            if self._looked_up.get(name) == start:
                return
            self._looked_up[name] = start
            _bound(self._looked_up, name)
            try:
                done = await self._load(name)
            except OxplowError as error:
                log.warning("session %s is computed anew: %s", name, error)
            else:
                log.info("session %s: %s tokens loaded", name, done.tokens)

    async def load(self, name: str) -> SessionDone:
        """Load a session's file now. Raises RequestError, CapacityError or TransferError."""
        async with self._disk:
            if not self._path(check_name(name)).exists():
                raise _unknown(name, "no file of that name is in the folder of sessions")
            done = await self._load(name)
            self._looked_up[name] = self._engine.num_starts
            _bound(self._looked_up, name)
            return done

    async def save(self, name: str, as_name: str | None = None) -> SessionDone:
        """Save a session's last turn, under another name if one is given.

        Raises RequestError, CapacityError or TransferError.
        """
        target = check_name(name if as_name is None else as_name)
        async with self._disk:
            turn = self._turns.get(check_name(name))
            if turn is None:
                raise _unknown(name, "no request of that name has ended here since the start")
            command = SaveSession(
                job_id=token_hex(8),
                path=str(self._path(target)),
                prompt=turn.prompt,
                answer=pack_ids(turn.answer),
                pictures=turn.pictures,
                salt=turn.salt,
            )
            done = self._checked(await self._engine.session(command), "saved")
            turn.is_saved = True
            return done

    async def save_changed(self, within_s: float) -> None:
        """Save what has changed since it was saved, newest first, as far as the time reaches."""
        deadline = time.monotonic() + within_s
        changed = [name for name, turn in reversed(self._turns.items()) if not turn.is_saved]
        for number, name in enumerate(changed):
            left_s = deadline - time.monotonic()
            try:
                done = await asyncio.wait_for(self.save(name), max(0.0, left_s))
            except TimeoutError:
                log.warning("time is up; %s sessions were not saved", len(changed) - number)
                return
            except OxplowError as error:
                log.warning("session %s was not saved: %s", name, error)
            else:
                log.info("session %s: %s tokens saved", name, done.tokens)

    def files(self) -> list[SessionFile]:
        """List the session files by name; what is none is left out."""
        found: list[SessionFile] = []
        for path in sorted(self._directory.glob(f"*{_ENDING}")):
            if _NAME.fullmatch(path.name.removesuffix(_ENDING)):
                try:
                    found.append(read_session_file(path))
                except TransferError as error:
                    log.warning("left out of the list: %s", error)
        return found

    def file(self, name: str) -> SessionFile | None:
        """Describe a session's file, None where there is none; raises TransferError."""
        path = self._path(check_name(name))
        return read_session_file(path) if path.exists() else None

    def held(self) -> dict[str, int]:
        """Return the conversations of this server by name, with the tokens of their last turn."""
        return {n: len(t.prompt) // 4 + len(t.answer) for n, t in self._turns.items()}

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}{_ENDING}"

    async def _load(self, name: str) -> SessionDone:
        command = LoadSession(job_id=token_hex(8), path=str(self._path(name)))
        return self._checked(await self._engine.session(command), "loaded")

    def _checked(self, done: SessionDone, what: str) -> SessionDone:
        self._count("refused" if done.failure else what)
        if not done.failure:
            return done
        if done.kind in ("capacity", "lost"):
            raise CapacityError(done.failure)
        raise TransferError(done.failure)


def _bound(names: OrderedDict[str, _Turn] | OrderedDict[str, int], newest: str) -> None:
    """Forget the names that were used least lately, beyond the number that is kept."""
    names.move_to_end(newest)
    while len(names) > _MOST_NAMES:
        names.popitem(last=False)


def _unknown(name: str, why: str) -> RequestError:
    return RequestError(f"unknown session: {why}", got=name, param="session", code="not_found")
