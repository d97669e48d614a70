"""`/v1/chat/completions`: the form of its answers and chunks.

Owns that form. Knows no tokens; events come from the run.
Invariant: in a stream each choice has its role in the first chunk and exactly one finish reason in
its last; the chunk with the usage comes after all of them and only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxplow.serve.answers import Ended, Scored
from oxplow.serve.api.endpoint import answer
from oxplow.serve.api.errors import ApiError, error_body
from oxplow.serve.api.logprobs import chat_entries
from oxplow.serve.api.run import Run, Told
from oxplow.serve.api.sse import DONE, frame
from oxplow.serve.formats.answer import CallArguments, CallBegan, Content, Reasoning
from oxplow.serve.text import Vocabulary

__all__ = ["chat_completions", "usage_of"]


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    vocabulary: Vocabulary = request.app.state.service.text.vocabulary
    return await answer(request, "chat", lambda run: ChatForm(run, vocabulary))


def usage_of(run: Run) -> dict[str, Any]:
    """Return the usage object of a run."""
    usage = run.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass(slots=True)
class _Told:
    """What one choice has said, for the whole answer, and log-probabilities on their way."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    stop_text: str | None = None


class ChatForm:
    """Writes one request's events as chat chunks or as one completion."""

    def __init__(self, run: Run, vocabulary: Vocabulary) -> None:
        self._run, self._vocabulary = run, vocabulary
        self._id, self._created = f"chatcmpl-{run.request_id}", int(time.time())
        self._choices = [_Told() for _ in range(run.num_choices)]
        shape = run.prepared.shape
        self._includes_usage, self._num_top = shape.includes_usage, shape.num_top

    def begin(self) -> Iterable[bytes]:
        """Tell each choice's role."""
        for index in range(len(self._choices)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def tell(self, told: Told) -> Iterable[bytes]:
        """Write events as chunks."""
        for index, event in told:
            choice = self._choices[index]
            match event:
                case Content():
                    choice.content.append(event.text)
                    yield self._chunk(index, {"content": event.text}, entries=self._taken(choice))
                case Reasoning():
                    choice.reasoning.append(event.text)
                    yield self._chunk(index, {"reasoning_content": event.text})
                case CallBegan():
                    call = self._begin_call(choice, event)
                    yield self._chunk(index, {"tool_calls": [{"index": event.number, **call}]})
                case CallArguments():
                    choice.calls[event.number]["function"]["arguments"] += event.text
                    piece = {"index": event.number, "function": {"arguments": event.text}}
                    yield self._chunk(index, {"tool_calls": [piece]})
                case Scored():
                    entries = chat_entries(event.rows, self._vocabulary)
                    choice.pending += entries
                    choice.entries += entries
                case Ended():
                    choice.finish, choice.stop_text = event.reason, event.stop_text
                    entries = self._taken(choice)
                    yield self._chunk(index, {}, finish=event.reason, entries=entries)

    def end(self) -> Iterable[bytes]:
        """Tell the usage if asked for, then the end."""
        if self._includes_usage:
            yield frame({**self._envelope(), "choices": [], "usage": usage_of(self._run)})
        yield DONE

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Tell an error in the middle of a stream."""
        yield frame(error_body(error))
        yield DONE

    def whole(self) -> dict[str, Any]:
        """Return the completion."""
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._run.prepared.model,
            "choices": [self._choice(i, c) for i, c in enumerate(self._choices)],
            "usage": usage_of(self._run),
        }

    def _choice(self, index: int, choice: _Told) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not choice.calls else None,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = choice.calls
        whole: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None if self._num_top is None else {"content": choice.entries},
            "finish_reason": choice.finish,
        }
        if choice.stop_text is not None:
            whole["stop_reason"] = choice.stop_text
        return whole

    @staticmethod
    def _begin_call(choice: _Told, event: CallBegan) -> dict[str, Any]:
        function = {"name": event.name, "arguments": ""}
        choice.calls.append({"id": event.call_id, "type": "function", "function": function})
        return {"id": event.call_id, "type": "function", "function": dict(function)}

    @staticmethod
    def _taken(choice: _Told) -> list[dict[str, Any]]:
        entries, choice.pending = choice.pending, []
        return entries

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._run.prepared.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        entries: list[dict[str, Any]] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": entries} if entries else None,
            "finish_reason": finish,
        }
        return frame({**self._envelope(), "choices": [choice]})
