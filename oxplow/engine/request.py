"""What a client asked for, and what became of it.

Owns the request, its sampling parameters, the running state of each choice and the one table of
legal status changes. Knows no tensor, no queue and no cache.
Invariant: a choice ends in exactly one of finished, aborted, failed; `token_ids` holds prompt and
answer, and the first `computed_tokens` of them are in the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import isfinite
from types import MappingProxyType
from typing import Protocol

from oxplow.cache.prefix import KeyChain, PictureSpan
from oxplow.errors import RequestError

MAX_LOGPROBS = 20
"""Largest number of alternatives reported per position."""

_SEED_MASK = (1 << 63) - 1


class RequestStatus(Enum):
    """Where a choice stands."""

    WAITING = "waiting"  # holds no memory on the device
    RUNNING = "running"  # holds a slot and blocks
    PREEMPTED = "preempted"  # gave its memory up, will come back
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Tell whether nothing more will happen."""
        return not _LEGAL[self]


_LEGAL: Mapping[RequestStatus, frozenset[RequestStatus]] = MappingProxyType(
    {
        RequestStatus.WAITING: frozenset(
            {RequestStatus.RUNNING, RequestStatus.ABORTED, RequestStatus.FAILED}
        ),
        RequestStatus.RUNNING: frozenset(
            {
                RequestStatus.PREEMPTED,
                RequestStatus.FINISHED,
                RequestStatus.ABORTED,
                RequestStatus.FAILED,
            }
        ),
        RequestStatus.PREEMPTED: frozenset(
            {
                RequestStatus.RUNNING,
                RequestStatus.FINISHED,
                RequestStatus.ABORTED,
                RequestStatus.FAILED,
            }
        ),
        RequestStatus.FINISHED: frozenset(),
        RequestStatus.ABORTED: frozenset(),
        RequestStatus.FAILED: frozenset(),
    }
)


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"  # an end token, a stop token, a complete grammar, or the front's stop text
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def status(self) -> RequestStatus:
        """The terminal status that goes with this reason."""
        if self is FinishReason.ABORTED:
            return RequestStatus.ABORTED
        return RequestStatus.FAILED if self is FinishReason.FAILED else RequestStatus.FINISHED


class TokenMask(Protocol):
    """What a grammar allows next; one object per choice, advanced token by token."""

    def allowed_words(self) -> Sequence[int] | None:
        """Return int32 words, bit i % 32 of word i // 32 set where token i is allowed.

        None: every token is allowed here.
        """
        ...

    def advance(self, token_id: int) -> None:
        """Take an emitted token in."""
        ...

    def is_complete(self) -> bool:
        """Tell whether the text is whole and nothing may follow but an end token."""
        ...

    def copy(self) -> TokenMask:
        """Return an independent mask at the same position."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens; the defaults sample plainly at temperature 1.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 are off. Penalties: `repetition`
    over prompt and answer (1 is off), `presence` and `frequency` over the answer (0 is off).
    `logit_bias` adds to single tokens. `max_tokens` None means the rest of the context.
    `min_tokens` bans end and stop tokens until then. `logprobs` and `prompt_logprobs` None are
    off, k asks for the k best beside the chosen one, taken from the model's own distribution
    before penalties and temperature. `seed` None: drawn at random. Raises RequestError that names
    the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "over 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check(
            "repetition_penalty",
            self.repetition_penalty,
            0 < self.repetition_penalty < float("inf"),
            "over 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "-2 to 2")
        for value in self.logit_bias.values():
            _check("logit_bias", value, isfinite(value), "finite numbers")
        _check("n", self.n, 1 <= self.n <= 128, "1 to 128")
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, self.max_tokens >= 0, "0 or more")
            low = self.min_tokens <= self.max_tokens
            _check("min_tokens", self.min_tokens, low, f"at most max_tokens {self.max_tokens}")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 <= value <= MAX_LOGPROBS, "0 to 20")

    def single(self) -> SamplingParams:
        """Return the same parameters for one choice, with no prompt log-probabilities due."""
        return replace(self, n=1, prompt_logprobs=None)

    @property
    def has_penalties(self) -> bool:
        """Tell whether past tokens change the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture's place in the prompt and its content: rows from an encoder, or pixels to encode.

    `span` names the image tokens and the content hash. `rows` [num_tokens, hidden] come ready from
    elsewhere; otherwise `pixel_values` [patches, width] and `grid_thw` (1 row of 3) are encoded
    here.
    """

    span: PictureSpan
    rows: object | None = None
    pixel_values: object | None = None
    grid_thw: object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted or offered piece of work.

    A lower `priority` number goes first. Prefixes are shared only under an equal `salt`.
    `token_mask` constrains every choice (each gets its own copy). `reuse_prefix` False computes
    everything anew.
    """

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    pictures: tuple[Picture, ...] = ()
    priority: int = 0
    salt: str = ""
    token_mask: TokenMask | None = None
    reuse_prefix: bool = True


class Choice:
    """The running state of one continuation of a request's prompt."""

    __slots__ = (
        "arrival",
        "branch_position",
        "cached_tokens",
        "chain",
        "computed_tokens",
        "deadline",
        "expected_tokens",
        "failure",
        "finish_reason",
        "index",
        "last_preempted_len",
        "leader",
        "mask",
        "max_len",
        "miss",
        "num_preemptions",
        "prefilled_tokens",
        "prompt_len",
        "request",
        "saved",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(
        self, request: Request, index: int, *, seed: int, max_len: int, chain: KeyChain
    ) -> None:
        """Start waiting with the prompt; `max_len` bounds prompt and answer together, in tokens."""
        self.request, self.index, self.seed, self.max_len = request, index, seed, max_len
        self.chain = chain
        self.token_ids = list(request.prompt_ids)
        self.prompt_len = len(self.token_ids)
        self.computed_tokens = 0
        self.status = RequestStatus.WAITING
        self.mask = request.token_mask.copy() if request.token_mask is not None else None
        self.leader: Choice | None = None  # whose prompt this one waits for, to share it
        self.arrival = self.deadline = 0.0
        self.expected_tokens = self.prompt_len  # to compute, as far as known when it last queued
        self.saved: object | None = None  # state kept on the host while preempted or adopted
        self.finish_reason: FinishReason | None = None
        self.failure = ""
        self.cached_tokens: int | None = None  # None until the first admission
        self.miss = ""
        self.branch_position = 0  # where a cached path without a state was left; 0: nowhere
        self.num_preemptions = self.prefilled_tokens = 0
        self.last_preempted_len = -1

    @property
    def owner(self) -> str:
        """The name under which the cache knows this choice."""
        return f"{self.request.request_id}#{self.index}"

    @property
    def pending_tokens(self) -> int:
        """Known tokens that are not in the caches yet."""
        return len(self.token_ids) - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Tell whether the next step is one token on top of existing state."""
        return self.computed_tokens > 0 and self.pending_tokens == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tell whether log-probabilities of the prompt are due; one choice reports them."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    @property
    def answer(self) -> list[int]:
        """The tokens produced so far."""
        return self.token_ids[self.prompt_len :]

    @property
    def num_answered(self) -> int:
        """How many tokens were produced so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def sort_key(self) -> tuple[int, float, str, int]:
        """Order of service: priority, deadline, then name so that ties are stable."""
        return (self.request.priority, self.deadline, self.request.request_id, self.index)

    def move(self, status: RequestStatus) -> None:
        """Change status; raises AssertionError for a change that the table does not allow."""
        if status not in _LEGAL[self.status]:
            raise AssertionError(f"{self.owner}: {self.status.value} cannot become {status.value}")
        self.status = status


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`: the request's own for the first, others far away.

    One round of splitmix64, so that neighbouring seeds and indices give unrelated draws.
    """
    if index == 0:
        return seed & _SEED_MASK
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & _SEED_MASK


def legal_moves() -> Mapping[RequestStatus, frozenset[RequestStatus]]:
    """Return the table of status changes."""
    return _LEGAL


def _check(name: str, got: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise RequestError(
            f"{name} is out of range", got=got, wanted=wanted, param=name, code="invalid_value"
        )
