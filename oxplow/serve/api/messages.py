"""`/v1/messages`: the form of its answers and the exact order of its events.

Owns that form. Knows no tokens; events come from the run.
Invariant: blocks are started, filled and stopped one after the other; `message_delta` tells the
stop reason once, `message_stop` ends the stream.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxplow.serve.answers import Ended
from oxplow.serve.api.endpoint import answer
from oxplow.serve.api.errors import ApiError, error_body
from oxplow.serve.api.run import Run, Told
from oxplow.serve.api.sse import named_frame
from oxplow.serve.formats.answer import CallArguments, CallBegan, Content, Reasoning

__all__ = ["messages"]

_STOP_REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


async def messages(request: Request) -> Response:
    """Answer a list of messages."""
    return await answer(request, "messages", MessageForm)


class MessageForm:
    """Writes one request's events as message events or as one message."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._id = f"msg_{run.request_id}"
        self._blocks: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._stop_reason: str | None = None
        self._stop_text: str | None = None

    def begin(self) -> Iterable[bytes]:
        """Tell the message's head."""
        message = {**self._message(), "content": [], "usage": self._usage(0)}
        yield named_frame({"type": "message_start", "message": message})

    def tell(self, told: Told) -> Iterable[bytes]:
        """Write events; a block ends when one of another kind begins."""
        for _, event in told:
            match event:
                case Content():
                    yield from self._speak("text", event.text)
                case Reasoning():
                    yield from self._speak("thinking", event.text)
                case CallBegan():
                    yield from self._close()
                    call_id = event.call_id.replace("call_", "toolu_", 1)
                    block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
                    yield from self._start(block)
                case CallArguments():
                    yield from self._speak("tool_use", event.text)
                case Ended():
                    yield from self._close()
                    self._stop_text = event.stop_text
                    stopped = event.stop_text is not None
                    reason = _STOP_REASONS.get(event.reason, "end_turn")
                    self._stop_reason = "stop_sequence" if stopped else reason

    def end(self) -> Iterable[bytes]:
        """Tell why the message ended and what it cost."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_text}
        usage = self._usage(self._run.usage.completion_tokens)
        yield named_frame({"type": "message_delta", "delta": delta, "usage": usage})
        yield named_frame({"type": "message_stop"})

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Tell an error in the middle of a stream."""
        yield named_frame(error_body(error, is_anthropic=True))

    def whole(self) -> object:
        """Return the message."""
        usage = self._usage(self._run.usage.completion_tokens)
        return {**self._message(), "content": self._blocks, "usage": usage}

    def _speak(self, kind: str, text: str) -> Iterable[bytes]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._start(_empty_block(kind))
        if text:
            self._pieces.append(text)
            name, key = _DELTAS[kind]
            yield named_frame(
                {
                    "type": "content_block_delta",
                    "index": len(self._blocks),
                    "delta": {"type": name, key: text},
                }
            )

    def _start(self, block: dict[str, Any]) -> Iterable[bytes]:
        self._open, self._pieces = block, []
        yield named_frame(
            {
                "type": "content_block_start",
                "index": len(self._blocks),
                "content_block": dict(block),
            }
        )

    def _close(self) -> Iterable[bytes]:
        block = self._open
        if block is None:
            return
        text = "".join(self._pieces)
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        yield named_frame({"type": "content_block_stop", "index": len(self._blocks)})
        self._blocks.append(block)
        self._open = None

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._run.prepared.model,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_text,
        }

    def _usage(self, output_tokens: int) -> dict[str, int]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": output_tokens,
        }


def _empty_block(kind: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": "toolu_" + secrets.token_hex(12), "name": "", "input": {}}


def _object(text: str) -> Any:
    """Return a call's arguments; those that were cut short are empty."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {}
