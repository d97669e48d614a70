"""`/v1/completions`: the form of its answers and chunks.

Owns that form. Knows no tokens; events come from the run.
Invariant: choices count prompt by prompt; an echoed prompt comes once, before the choice's text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oxplow.serve.answers import Ended, Scored
from oxplow.serve.api.chat import usage_of
from oxplow.serve.api.endpoint import answer
from oxplow.serve.api.errors import ApiError, error_body
from oxplow.serve.api.logprobs import FlatLogprobs
from oxplow.serve.api.run import Run, Told
from oxplow.serve.api.sse import DONE, frame
from oxplow.serve.engine_port import unpack_ids
from oxplow.serve.formats.answer import Content
from oxplow.serve.text import Vocabulary

__all__ = ["completions"]


async def completions(request: Request) -> Response:
    """Continue a text."""
    vocabulary: Vocabulary = request.app.state.service.text.vocabulary
    return await answer(request, "completions", lambda run: CompletionForm(run, vocabulary))


class CompletionForm:
    """Writes one request's events as text completion chunks or as one completion."""

    def __init__(self, run: Run, vocabulary: Vocabulary) -> None:
        self._run, self._vocabulary = run, vocabulary
        self._id, self._created = f"cmpl-{run.request_id}", int(time.time())
        shape = run.prepared.shape
        self._echoes, self._num_top = shape.echoes, shape.num_top
        self._includes_usage = shape.includes_usage
        self._per_prompt = run.num_choices // len(run.prepared.works)
        self._texts: list[list[str]] = [[] for _ in range(run.num_choices)]
        self._scores = [FlatLogprobs() for _ in range(run.num_choices)]
        self._ends: list[Ended | None] = [None] * run.num_choices
        self._has_echoed = [not self._echoes] * run.num_choices

    def begin(self) -> Iterable[bytes]:
        """Open with nothing."""
        return ()

    def tell(self, told: Told) -> Iterable[bytes]:
        """Write events as chunks."""
        is_stream = self._run.prepared.shape.is_stream
        for index, event in told:
            echo = self._echo(index)
            match event:
                case Content():
                    self._texts[index].append(event.text)
                    if is_stream:
                        yield self._chunk(index, echo + event.text)
                case Scored():
                    self._scores[index].add(event.rows, self._vocabulary)
                    if is_stream and echo:
                        yield self._chunk(index, echo)
                case Ended():
                    self._ends[index] = event
                    if is_stream:
                        yield self._chunk(index, echo, event)

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
        choices = [
            self._choice(i, "".join(text), self._ends[i]) for i, text in enumerate(self._texts)
        ]
        return {**self._envelope(), "choices": choices, "usage": usage_of(self._run)}

    def _echo(self, index: int) -> str:
        """Return the prompt's text the first time that a choice speaks."""
        if self._has_echoed[index]:
            return ""
        self._has_echoed[index] = True
        number = index // self._per_prompt
        text = self._echoes[number]
        self._texts[index].insert(0, text)
        rows = self._run.readers[number].prompt_rows
        if self._num_top is not None and rows is not None:
            first = unpack_ids(self._run.prepared.works[number].prompt[:4])
            self._scores[index].add_first(self._vocabulary.decode(first, skip_special=False))
            self._scores[index].add(rows, self._vocabulary)
        return text

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._run.prepared.model,
        }

    def _choice(self, index: int, text: str, end: Ended | None) -> dict[str, Any]:
        scores = self._scores[index].taken() if self._num_top is not None else None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": scores,
            "finish_reason": None if end is None else end.reason,
        }
        if end is not None and end.stop_text is not None:
            choice["stop_reason"] = end.stop_text
        return choice

    def _chunk(self, index: int, text: str, end: Ended | None = None) -> bytes:
        return frame({**self._envelope(), "choices": [self._choice(index, text, end)]})
