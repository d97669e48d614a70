"""A conversation's cached state, from the engine to a file and back.

Owns the two jobs of the engine's process: what runs between two steps, and what may take its time
on another thread. Knows no name of a session and no HTTP: the front says which file.
Invariant: a file appears whole or not at all; nothing in the caches changes before the whole file
was verified; disk and checksums never hold up a step.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError

from oxplow.cache.prefix import PictureSpan
from oxplow.engine.core import EngineCore
from oxplow.engine.manifest import Manifest, load_manifest
from oxplow.errors import CapacityError, TransferError
from oxplow.serve.engine_port import LoadSession, SaveSession, SessionDone, unpack_ids

__all__ = ["LoadJob", "SaveJob", "session_job"]

_HEADER_BYTES = 64 << 20  # of a file, beside its arrays


def session_job(core: EngineCore, command: SaveSession | LoadSession) -> SaveJob | LoadJob:
    """Begin a job between two steps; raises TransferError where there is nothing to save."""
    return SaveJob(core, command) if isinstance(command, SaveSession) else LoadJob(core, command)


class SaveJob:
    """Copies the state when it is made; `work` writes the file."""

    def __init__(self, core: EngineCore, command: SaveSession) -> None:
        prompt, answer = unpack_ids(command.prompt), unpack_ids(command.answer)
        spans = [PictureSpan(s.start, s.num_tokens, s.content_hash) for s in command.pictures]
        # The next turn repeats the prompt; whether it repeats the answer token by token is up to
        # the chat template, which may drop the thinking. Both starts are kept.
        self._manifest = core.handover.export_prefix(
            prompt + answer, command.salt, spans, also=(len(prompt),)
        )
        self._command, self._path = command, Path(command.path)

    def work(self) -> None:
        """Write the file under a passing name, then put it in place; raises TransferError."""
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            self._manifest.save(part)
            _flush(part)
            part.chmod(0o600)  # it holds what somebody said
            part.replace(self._path)
            _flush(self._path.parent)
        except (OSError, SafetensorError) as error:
            raise TransferError(
                "the session file cannot be written", got=error, where=self._path.name
            ) from error
        finally:
            part.unlink(missing_ok=True)

    def finish(self) -> SessionDone:
        """Tell what was saved."""
        return _done(self._command.job_id, self._manifest)


class LoadJob:
    """`work` reads and verifies the file; `finish` puts it into the caches."""

    def __init__(self, core: EngineCore, command: LoadSession) -> None:
        self._core, self._command = core, command
        self._path = Path(command.path)
        self._manifest: Manifest | None = None

    def work(self) -> None:
        """Read and verify; raises TransferError or CapacityError."""
        limit = self._core.plan.total_bytes + _HEADER_BYTES
        try:
            size = self._path.stat().st_size
        except OSError as error:
            raise TransferError(
                "the session file cannot be read", got=error.strerror, where=self._path.name
            ) from error
        if size > limit:
            raise CapacityError(
                "the session is larger than the caches", got=size, wanted=f"at most {limit} bytes"
            )
        manifest = load_manifest(self._path)
        if manifest.request is not None:
            raise TransferError("the file holds a running request", where=self._path.name)
        self._core.handover.verify(manifest)
        self._manifest = manifest

    def finish(self) -> SessionDone:
        """Make the prefix findable; raises TransferError or CapacityError and changes nothing."""
        if self._manifest is None:
            raise AssertionError("a session is adopted before it was read")
        self._core.handover.adopt_prefix(self._manifest)
        return _done(self._command.job_id, self._manifest)


def _done(job_id: str, manifest: Manifest) -> SessionDone:
    return SessionDone(job_id=job_id, tokens=manifest.computed_tokens, num_bytes=manifest.num_bytes)


def _flush(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
