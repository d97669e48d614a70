"""What the front and the engine say to each other.

Owns the messages, their encoding, and the protocol of an engine that the driver turns. Knows no
socket, no HTTP and no tensor.
Invariant: every `Work` is answered by exactly one of `Accepted` and `Refused`, and every choice of
an accepted one by exactly one `Delta` with a `finish`, whatever happens to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from oxplow.engine.request import SamplingParams

__all__ = [
    "Abort",
    "Accepted",
    "Beat",
    "Command",
    "Core",
    "Delta",
    "Drain",
    "EndChoice",
    "EngineEvent",
    "EngineInfo",
    "EngineStats",
    "GrammarSpec",
    "LoadSession",
    "Refused",
    "SaveSession",
    "SessionDone",
    "SessionJob",
    "Started",
    "Step",
    "TokenRow",
    "WirePicture",
    "WireSpan",
    "Work",
    "decode_command",
    "decode_event",
    "encode",
    "pack_ids",
    "unpack_ids",
]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a grammar in llguidance's form; `Work` carries the text, the engine builds the mask.

    `after` None: it holds from the first token to the last. Else it holds after each token of that
    id until it is complete, and with `once` that token is forbidden after the first time.
    """

    text: str
    after: int | None = None
    once: bool = False


class WirePicture(msgspec.Struct, frozen=True, kw_only=True):
    """Place a picture or one temporal patch of a clip: where it stands and its patch rows.

    `pixels` are float32 rows of `row_width` values; `grid` counts temporal patches, rows, columns.
    """

    start: int
    num_tokens: int
    content_hash: str
    pixels: bytes
    row_width: int
    grid: tuple[int, int, int]


class Work(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """Ask for answers to one prompt. `prompt` holds int32 token ids, little endian."""

    request_id: str
    prompt: bytes
    params: SamplingParams
    pictures: tuple[WirePicture, ...] = ()
    priority: int = 0
    salt: str = ""
    grammar: GrammarSpec | None = None
    reuse_prefix: bool = True


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop every choice of a request: its client has left."""

    request_id: str


class EndChoice(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Stop one choice as if the model had stopped: the front saw a stop text."""

    request_id: str
    index: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Ask the engine to leave; `abort_running` cuts what runs instead of waiting for it."""

    abort_running: bool = False


class WireSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Say where a picture stood in a conversation, without its pixels."""

    start: int
    num_tokens: int
    content_hash: str


class SaveSession(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Ask for a file with the cached state of a conversation: its last prompt and the answer."""

    job_id: str
    path: str
    prompt: bytes
    answer: bytes
    pictures: tuple[WireSpan, ...] = ()
    salt: str = ""


class LoadSession(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Ask for a file of `SaveSession` to be taken into the prefix cache."""

    job_id: str
    path: str


Command = Work | Abort | EndChoice | Drain | SaveSession | LoadSession


class TokenRow(msgspec.Struct, frozen=True, array_like=True):
    """Hold a token's natural-log probability and the best alternatives as (id, value)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Tell what one choice gained in a step.

    `finish` is stop, length, aborted or failed; `failure` says why it failed. `cached_tokens` is
    told once, when the prompt is computed; `prompt_rows` has one entry for each prompt token but
    the first. `queued_s` is told once, when the request leaves the queue.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    rows: tuple[TokenRow, ...] | None = None
    prompt_rows: tuple[TokenRow, ...] | None = None
    finish: str | None = None
    failure: str = ""
    cached_tokens: int | None = None
    miss: str = ""
    queued_s: float | None = None


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """Say that a request is queued or runs."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Say that a request was not taken. `kind` is request, capacity or fault."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Carry what one step gave to all choices."""

    deltas: tuple[Delta, ...]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Count what the engine does. Counters only rise while one engine process lives."""

    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    predicted_wait_s: float = 0.0


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Tell once a second that the engine lives.

    `busy_s` is how long the step in progress has taken, 0 between steps; `predicted_s` how long it
    was expected to take.
    """

    stats: EngineStats
    busy_s: float = 0.0
    predicted_s: float = 0.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a started engine: what the API must know, and `lines` to print at start."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_vision: bool = False
    lines: tuple[str, ...] = ()


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Say that the engine takes work."""

    info: EngineInfo


class SessionDone(msgspec.Struct, frozen=True, kw_only=True, tag="session"):
    """End a `SaveSession` or `LoadSession`: tokens and bytes of the state, or why it failed.

    `kind` is "" where it was done, else capacity or transfer.
    """

    job_id: str
    tokens: int = 0
    num_bytes: int = 0
    kind: str = ""
    failure: str = ""


EngineEvent = Accepted | Refused | Step | Beat | Started | SessionDone


class SessionJob(Protocol):
    """A session on its way to or from a file; made and finished on the driver's thread."""

    def work(self) -> None:
        """Do what takes its time, on any thread; raises TransferError or CapacityError."""
        ...

    def finish(self) -> SessionDone:
        """Do the rest between two steps; raises TransferError or CapacityError."""
        ...


class Core(Protocol):
    """An engine as the driver turns it; every method runs on the driver's thread."""

    @property
    def info(self) -> EngineInfo:
        """Describe the engine."""
        ...

    @property
    def has_work(self) -> bool:
        """Tell whether a step would do anything."""
        ...

    @property
    def predicted_s(self) -> float:
        """Return how long the next step should take."""
        ...

    def add(self, work: Work) -> None:
        """Take a request; raises RequestError or CapacityError."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request; unknown ones are no error. The next step tells its end."""
        ...

    def end_choice(self, request_id: str, index: int) -> None:
        """Finish one choice with reason stop; the next step tells its end."""
        ...

    def step(self) -> Sequence[Delta]:
        """Run one step."""
        ...

    def session_job(self, command: SaveSession | LoadSession) -> SessionJob:
        """Begin to save or load a session; raises TransferError or CapacityError."""
        ...

    def stats(self) -> EngineStats:
        """Count."""
        ...


_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS = msgspec.msgpack.Decoder(Command)
_EVENTS = msgspec.msgpack.Decoder(EngineEvent)


def encode(message: Command | EngineEvent) -> bytes:
    """Return a message's bytes."""
    return _ENCODER.encode(message)


def decode_command(data: bytes) -> Command:
    """Read what `encode` made of a command; raises msgspec.ValidationError for anything else."""
    return _COMMANDS.decode(data)


def decode_event(data: bytes) -> EngineEvent:
    """Read what `encode` made of an event; raises msgspec.ValidationError for anything else."""
    return _EVENTS.decode(data)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32, little endian."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids that `pack_ids` took."""
    return [int(i) for i in np.frombuffer(data, dtype="<i4").tolist()]
