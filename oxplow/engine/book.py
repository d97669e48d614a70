"""Which requests are alive, and what is told of them.

Owns the open requests with their choices, and the events that wait to be fetched. Knows no cache
and no scheduler. Invariant: every choice gets exactly one ChoiceEnd and every request exactly one
RequestEnd, after which nothing more is told of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oxplow.engine.events import ChoiceEnd, Event, PromptDone, RequestEnd, TokenOut
from oxplow.engine.request import Choice, FinishReason, Request, RequestStatus
from oxplow.engine.sampling import Drawn, TokenLogprob
from oxplow.engine.stats import Counters
from oxplow.engine.steps import Scheduled
from oxplow.trace import EventRing, EventType, Lane

_ENDINGS = {
    RequestStatus.FINISHED: EventType.REQUEST_FINISHED,
    RequestStatus.ABORTED: EventType.REQUEST_ABORTED,
    RequestStatus.FAILED: EventType.REQUEST_FAILED,
}


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its prompt gave so far."""

    request: Request
    choices: Sequence[Choice]
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    is_prompt_done: bool = False
    messages: list[str] = field(default_factory=list)


class RequestBook:
    """The open requests by id."""

    def __init__(self, counters: Counters, ring: EventRing) -> None:
        self._counters, self._ring = counters, ring
        self._open: dict[str, _Open] = {}
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_news(self) -> bool:
        """Tell whether a request is open or an event waits."""
        return bool(self._open or self._events)

    def is_live(self, request_id: str) -> bool:
        """Tell whether a request of this id is open."""
        return request_id in self._open

    def choices(self, request_id: str) -> Sequence[Choice]:
        """Return an open request's choices, none for an unknown id."""
        known = self._open.get(request_id)
        return known.choices if known is not None else ()

    def open(self, request: Request, choices: Sequence[Choice]) -> None:
        """Begin a request."""
        self._open[request.request_id] = _Open(request, choices)
        self._counters.accepted += 1
        self._counters.prompt_tokens += len(request.prompt_ids)
        detail = {"prompt_tokens": len(request.prompt_ids), "choices": len(choices)}
        self._ring.instant(
            EventType.REQUEST_ACCEPTED, Lane.REQUEST, request=request.request_id, detail=detail
        )

    def drain(self) -> list[Event]:
        """Return the waiting events, oldest first, and forget them."""
        events, self._events = self._events, []
        return events

    def note_token(self, choice: Choice, token: int, logprob: TokenLogprob | None) -> None:
        """Tell a choice's newest token."""
        self._counters.answer_tokens += 1
        name = choice.request.request_id
        self._events.append(TokenOut(name, choice.index, token, choice.num_answered - 1, logprob))

    def note_prompt(self, row: Scheduled, drawn: Sequence[Drawn]) -> None:
        """Keep the prompt's log-probabilities; tell once that the prompt is computed."""
        choice = row.choice
        live = self._open[choice.request.request_id]
        if live.is_prompt_done:
            return
        if choice.wants_prompt_logprobs:
            first = row.stop - len(drawn) + 1
            for position, result in enumerate(drawn, first):
                if position < choice.prompt_len and result.logprob is not None:
                    live.prompt_logprobs[position] = result.logprob
        if row.stop < choice.prompt_len:
            return
        live.is_prompt_done = True
        wanted = range(choice.prompt_len) if choice.wants_prompt_logprobs else range(0)
        self._events.append(
            PromptDone(
                choice.request.request_id,
                choice.prompt_len,
                choice.cached_tokens or 0,
                choice.miss,
                tuple(live.prompt_logprobs.get(p) for p in wanted),
            )
        )

    def end(
        self, choice: Choice, reason: FinishReason, message: str, stop_token: int | None
    ) -> None:
        """Tell a choice's end; with the last one the request ends."""
        choice.move(reason.status)
        choice.finish_reason, choice.failure = reason, message
        name = choice.request.request_id
        self._events.append(
            ChoiceEnd(name, choice.index, reason, choice.num_answered, stop_token, message)
        )
        live = self._open[name]
        if message:
            live.messages.append(message)
        if all(c.status.is_terminal for c in live.choices):
            self._end_request(live)

    def _end_request(self, live: _Open) -> None:
        reached = {c.status for c in live.choices}
        order = (RequestStatus.FAILED, RequestStatus.ABORTED, RequestStatus.FINISHED)
        status = next(s for s in order if s in reached)
        name = live.request.request_id
        self._events.append(
            RequestEnd(
                name,
                status,
                len(live.request.prompt_ids),
                live.choices[0].cached_tokens or 0,
                sum(c.num_answered for c in live.choices),
                sum(c.num_preemptions for c in live.choices),
                "; ".join(live.messages),
            )
        )
        self._counters.ended[status] += 1
        self._ring.instant(_ENDINGS[status], Lane.REQUEST, request=name)
        del self._open[name]
