"""The engine as a library: `LLM`, for scripts and notebooks.

Owns an event loop on a thread of its own and the engine, workers and readers of one server without
HTTP. Knows no socket.
Invariant: a request made here takes the same path as one over HTTP, so the two cannot differ; every
answer is a plain record.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from oxplow.config import LoadedConfig, load_config
from oxplow.errors import CapacityError, OxplowError, RequestError
from oxplow.serve.api.chat import ChatForm
from oxplow.serve.api.completions import CompletionForm
from oxplow.serve.api.errors import ApiError
from oxplow.serve.api.run import Run
from oxplow.serve.api.service import Service
from oxplow.serve.commands.serve import serve_options
from oxplow.serve.formats.answer import Content, Reasoning
from oxplow.serve.prepare.jobs import prepare
from oxplow.serve.server import open_service
from oxplow.serve.sessions import Sessions, check_name

__all__ = ["LLM", "Piece", "open_llm"]

_SETTLE_S = 5.0
_T = TypeVar("_T")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a streamed answer; `is_reasoning` tells thinking from text."""

    text: str
    is_reasoning: bool = False


class LLM:
    """A model, loaded once; use it from any thread, or `await` the methods that begin with `a`.

    `model` is a folder, the bundled nano model if None. `settings` are those of `oxplow config`,
    such as {"limits.cache_mib": 512}; `loaded` takes the place of both. Close it, or use it as a
    context manager. Raises ConfigError or WeightError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        settings: Mapping[str, object] | None = None,
        loaded: LoadedConfig | None = None,
    ) -> None:
        if loaded is None:
            given = {**(settings or {}), "serve.inprocess": True}
            if model is not None:
                given["serve.model"] = str(model)
            loaded = load_config(None, given, override_origin="LLM")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        self._numbers = itertools.count()
        self._service: Service | None = None
        options = replace(serve_options(loaded), is_inprocess=True)
        try:
            self._service = self._wait(open_service(options))
        finally:
            if self._service is None:
                self._settle()
                self._stop_loop()

    def chat(
        self, messages: str | Sequence[Message], *, session: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Answer a conversation, or one user message given as text.

        `fields` are those of `/v1/chat/completions`; so is the answer. `session` names the
        conversation for `save_session`. Raises RequestError.
        """
        return self._wait(self._whole("chat", _chat_body(messages, fields), session))

    async def achat(self, messages: str | Sequence[Message], **fields: Any) -> dict[str, Any]:
        """Do what `chat` does, without blocking the caller's event loop."""
        return await self._cross(self._whole("chat", _chat_body(messages, fields)))

    def stream(
        self, messages: str | Sequence[Message], *, session: str | None = None, **fields: Any
    ) -> Iterator[Piece]:
        """Answer a conversation piece by piece; leaving the loop early ends the request."""
        source = self._pieces(_chat_body(messages, fields), session)
        try:
            while (piece := self._wait(_next(source))) is not None:
                yield piece
        finally:
            self._wait(_close(source))

    def generate(self, prompts: str | Sequence[str], **fields: Any) -> list[str]:
        """Continue one or several texts and return the continuations in order.

        `fields` are those of `/v1/completions`. Raises RequestError.
        """
        body = {**fields, "prompt": [prompts] if isinstance(prompts, str) else list(prompts)}
        answer = self._wait(self._whole("completions", body))
        return [choice["text"] for choice in answer["choices"]]

    async def agenerate(self, prompts: str | Sequence[str], **fields: Any) -> list[str]:
        """Do what `generate` does, without blocking the caller's event loop."""
        body = {**fields, "prompt": [prompts] if isinstance(prompts, str) else list(prompts)}
        answer = await self._cross(self._whole("completions", body))
        return [choice["text"] for choice in answer["choices"]]

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a whole request body of `endpoint`, chat or completions."""
        return await self._cross(self._whole(endpoint, body))

    def save_session(self, name: str, *, as_name: str | None = None) -> int:
        """Save the cached state of a session's last turn and return its tokens.

        The file lies in `serve.sessions_dir`, under `as_name` if given. Raises RequestError,
        CapacityError or TransferError.
        """
        return self._wait(self._sessions.save(name, as_name)).tokens

    def load_session(self, name: str) -> int:
        """Load a session's file into the prefix cache and return its tokens.

        Raises RequestError, CapacityError, or TransferError where the file is damaged or another
        model's.
        """
        return self._wait(self._sessions.load(name)).tokens

    @property
    def _sessions(self) -> Sessions:
        sessions = self._open.sessions
        if sessions is None:
            raise RequestError("sessions are off", wanted="the setting serve.sessions_dir")
        return sessions

    @property
    def is_alive(self) -> bool:
        """Tell whether the engine takes requests; one that has stopped needs a new `LLM`."""
        return self._service is not None and self._service.engine.is_alive

    @property
    def plan(self) -> tuple[str, ...]:
        """Return what runs and how memory is divided, line by line."""
        return self._open.engine.info.lines

    def close(self) -> None:
        """End what runs and free the model; a second call does nothing."""
        service, self._service = self._service, None
        if service is None:
            return
        self._wait(service.engine.drain(0.0, service.until_answered))
        service.workers.close()
        self._stop_loop()

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """Continue one text and return the whole answer of `/v1/completions`."""
        return self._wait(self._whole("completions", {**fields, "prompt": prompt}))

    def __enter__(self) -> LLM:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    @property
    def _open(self) -> Service:
        if self._service is None:
            raise RequestError("this LLM is closed")
        return self._service

    def _settle(self) -> None:
        """Let what was cancelled unwind, for a few seconds at most."""

        async def others_end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=_SETTLE_S)

        self._begun(others_end()).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = self._begun(work)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt it would go on; one that is done stays as it is

    async def _cross(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._begun(work))

    def _begun(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work on the loop; on one that has ended it would wait for ever."""
        if not self._thread.is_alive():
            work.close()
            raise RequestError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _run(self, endpoint: str, body: Mapping[str, Any], session: str | None = None) -> Run:
        raw = json.dumps(body).encode()
        service = self._open
        most = service.engine.info.max_model_len - 1
        prepared = await service.workers.run(prepare, raw, endpoint, most, num_bytes=len(raw))
        if session is not None:
            check_name(session)
            await self._sessions.open(session)
        run = Run(service, prepared, f"llm-{next(self._numbers)}", session=session)
        try:
            await run.admit()
        except ApiError as error:
            raise _our_error(error) from error
        return run

    async def _whole(
        self, endpoint: str, body: Mapping[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        run = await self._run(endpoint, {**body, "stream": False}, session)
        vocabulary = self._open.text.vocabulary
        form = (ChatForm if endpoint == "chat" else CompletionForm)(run, vocabulary)
        try:
            async with aclosing(run.events()) as events:
                async for told in events:
                    for _ in form.tell(told):
                        continue
        except ApiError as error:
            raise _our_error(error) from error
        finally:
            run.close()
        whole: dict[str, Any] = form.whole()
        return whole

    async def _pieces(
        self, body: Mapping[str, Any], session: str | None = None
    ) -> AsyncIterator[Piece]:
        run = await self._run("chat", body, session)
        try:
            async with aclosing(run.events()) as events:
                async for told in events:
                    for _, event in told:
                        if isinstance(event, Content | Reasoning):
                            yield Piece(event.text, isinstance(event, Reasoning))
        except ApiError as error:
            raise _our_error(error) from error
        finally:
            run.close()


def open_llm(loaded: LoadedConfig) -> LLM:
    """Return a model opened as the settings of a command say."""
    return LLM(loaded=loaded)


def _chat_body(messages: str | Sequence[Message], fields: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {**fields, "messages": list(messages)}


def _our_error(error: ApiError) -> OxplowError:
    if error.status in (429, 503):
        return CapacityError(error.message)
    if error.status < 500:
        return RequestError(error.message, param=error.param, code=error.code)
    return OxplowError(error.message)


async def _next(source: AsyncIterator[Piece]) -> Piece | None:
    return await anext(source, None)


async def _close(source: Any) -> None:
    """Close a source; a step of it that was interrupted may still be unwinding."""
    for _ in range(100):
        try:
            await source.aclose()
        except RuntimeError:
            await asyncio.sleep(0.01)
        else:
            return
