"""`/v1/responses`: the form of its answers and the exact order of its events.

Owns that form. Knows no tokens; events come from the run.
Invariant: sequence numbers rise by one; every item is added before its parts and done after them;
a stream ends with `response.completed`, `response.incomplete` or `response.failed`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxplow.serve.answers import Ended
from oxplow.serve.api.endpoint import answer
from oxplow.serve.api.errors import ApiError
from oxplow.serve.api.run import Run, Told
from oxplow.serve.api.sse import named_frame
from oxplow.serve.formats.answer import CallArguments, CallBegan, Content, Reasoning
from oxplow.serve.prepare.responses import seal_reasoning

__all__ = ["responses"]


async def responses(request: Request) -> Response:
    """Answer a list of items."""
    return await answer(request, "responses", ResponseForm)


@dataclass(slots=True)
class _Item:
    """One output item while it is being told: a message, a call or reasoning."""

    kind: str
    item_id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was told so far."""
        return "".join(self.pieces)


class ResponseForm:
    """Writes one request's events as response events or as one response."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._id, self._created = f"resp_{run.request_id}", int(time.time())
        self._extra = run.prepared.extra
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._status, self._error = "in_progress", None

    def begin(self) -> Iterable[bytes]:
        """Tell that the response exists."""
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def tell(self, told: Told) -> Iterable[bytes]:
        """Write events; an item ends when one of another kind begins."""
        for _, event in told:
            match event:
                case Content():
                    yield from self._speak("message", event.text)
                case Reasoning():
                    yield from self._speak("reasoning", event.text)
                case CallBegan():
                    yield from self._close()
                    item = _Item("function_call", _fresh("fc"), event.call_id, event.name)
                    yield from self._add(item)
                case CallArguments():
                    yield from self._speak("function_call", event.text)
                case Ended():
                    yield from self._close()
                    self._status = "incomplete" if event.reason == "length" else "completed"

    def end(self) -> Iterable[bytes]:
        """Tell the whole response."""
        yield self._event(f"response.{self._status}", response=self._response())

    def fail(self, error: ApiError) -> Iterable[bytes]:
        """Tell an error in the middle of a stream."""
        self._status = "failed"
        code = error.code or "server_error"
        response = {**self._response(), "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=response)

    def whole(self) -> object:
        """Return the response."""
        return self._response()

    def _speak(self, kind: str, text: str) -> Iterable[bytes]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
            yield from self._add(_Item(kind, _fresh(prefix)))
        item = self._open
        if item is not None and text:
            item.pieces.append(text)
            yield self._delta(item, text)

    def _add(self, item: _Item) -> Iterable[bytes]:
        self._open = item
        shown = self._shown(item, "in_progress", with_parts=False)
        yield self._event("response.output_item.added", output_index=self._place, item=shown)
        if item.kind != "function_call":
            part = {"part": _part(item.kind, "")}
            yield self._part_event("response.content_part.added", item, part)

    def _delta(self, item: _Item, text: str) -> bytes:
        match item.kind:
            case "message":
                values = {"delta": text, "logprobs": []}
                return self._part_event("response.output_text.delta", item, values)
            case "reasoning":
                return self._part_event("response.reasoning_text.delta", item, {"delta": text})
        return self._event(
            "response.function_call_arguments.delta",
            item_id=item.item_id,
            output_index=self._place,
            delta=text,
        )

    def _close(self) -> Iterable[bytes]:
        item = self._open
        if item is None:
            return
        if item.kind == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                item_id=item.item_id,
                output_index=self._place,
                name=item.name,
                arguments=item.text,
            )
        else:
            what = "output_text" if item.kind == "message" else "reasoning_text"
            values: dict[str, Any] = {"text": item.text}
            if item.kind == "message":
                values["logprobs"] = []
            yield self._part_event(f"response.{what}.done", item, values)
            part = {"part": _part(item.kind, item.text)}
            yield self._part_event("response.content_part.done", item, part)
        shown = self._shown(item, "completed")
        yield self._event("response.output_item.done", output_index=self._place, item=shown)
        self._output.append(shown)
        self._open = None

    @property
    def _place(self) -> int:
        return len(self._output)

    def _shown(self, item: _Item, status: str, *, with_parts: bool = True) -> dict[str, Any]:
        parts = [_part(item.kind, item.text)] if with_parts else []
        match item.kind:
            case "message":
                return {
                    "id": item.item_id,
                    "type": "message",
                    "status": status,
                    "role": "assistant",
                    "content": parts,
                }
            case "reasoning":
                shown: dict[str, Any] = {
                    "id": item.item_id,
                    "type": "reasoning",
                    "summary": [],
                    "content": parts,
                }
                if self._extra.get("seals_reasoning") and with_parts:
                    shown["encrypted_content"] = seal_reasoning(item.text)
                return shown
        call = {
            "id": item.item_id,
            "type": "function_call",
            "status": status,
            "call_id": item.call_id,
            "name": item.name,
            "arguments": item.text if with_parts else "",
        }
        namespace = self._extra.get("namespaces", {}).get(item.name)
        return {**call, "namespace": namespace} if namespace else call

    def _response(self) -> dict[str, Any]:
        extra, is_done = self._extra, self._status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._status == "incomplete"
            else None,
            "instructions": extra.get("instructions"),
            "max_output_tokens": extra.get("max_output_tokens"),
            "metadata": extra.get("metadata") or {},
            "model": self._run.prepared.model,
            "output": list(self._output),
            "parallel_tool_calls": extra.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": extra.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "temperature": extra.get("temperature", 1.0),
            "text": extra.get("text") or {"format": {"type": "text"}},
            "tool_choice": extra.get("tool_choice") or "auto",
            "tools": extra.get("tools") or [],
            "top_p": extra.get("top_p", 1.0),
            "truncation": extra.get("truncation") or "disabled",
            "usage": self._usage() if is_done else None,
            "user": extra.get("user"),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _part_event(self, kind: str, item: _Item, values: Mapping[str, Any]) -> bytes:
        place = {"item_id": item.item_id, "output_index": self._place, "content_index": 0}
        return self._numbered(kind, {**place, **values})

    def _event(self, kind: str, **values: Any) -> bytes:
        return self._numbered(kind, values)

    def _numbered(self, kind: str, values: Mapping[str, Any]) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_frame({"type": kind, "sequence_number": number, **values})


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _fresh(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
