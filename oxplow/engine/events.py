"""What the core tells the front: tokens as they come, one end for each choice and each request.

Owns the event records. Knows no text and no transport. Invariant: after a request's RequestEnd
nothing more is said of it; before it, every choice had exactly one ChoiceEnd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from oxplow.engine.request import FinishReason, RequestStatus
from oxplow.engine.sampling import TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptDone:
    """A request's prompt is computed.

    `cached_tokens` of it came from the prefix cache, `miss` says why not more. `logprobs` has one
    entry per prompt token where `prompt_logprobs` was asked for (None for the first), else it is
    empty.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    miss: str
    logprobs: tuple[TokenLogprob | None, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A choice's next token; `position` counts the answer's tokens from 0."""

    request_id: str
    choice: int
    token_id: int
    position: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice ended; an end or stop token that caused it was sent as a TokenOut before.

    `stop_token` is that token where there was one. `message` says what went wrong, for FAILED.
    """

    request_id: str
    choice: int
    reason: FinishReason
    answer_tokens: int
    stop_token: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request ended; the token counts are over all its choices, the prompt counted once."""

    request_id: str
    status: RequestStatus
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    num_preemptions: int
    message: str = ""


Event: TypeAlias = PromptDone | TokenOut | ChoiceEnd | RequestEnd
