"""An engine whose answers the tests write: it says what the last user message spells out.

Owns the script's form: the text of the last user turn, in which control strings become tokens, then
an end token; after a tool's result, what the tool said. `@slow:S@` waits S seconds before each
token, `@prefill:S@` takes S seconds for the prompt, `@fail@` fails the choice where it stands,
`@die@` ends the process. Must not know the front.
Invariant: it follows the driver's protocol as the real engine does.
"""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oxplow.engine.request import TokenMask
from oxplow.errors import CapacityError, RequestError
from oxplow.serve.engine_port import Delta, EngineInfo, EngineStats, TokenRow, Work, unpack_ids
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.mask import MaskFactory
from oxplow.serve.text import Vocabulary, load_text
from tests.serve.model_dir import EOS, ID, VOCAB_SIZE

_BRACE = 92  # closes a JSON object
_ORDER = re.compile(r"@(slow|prefill):([0-9.]+)@")


@dataclass(slots=True)
class _Choice:
    work: Work
    index: int
    script: list[int]
    delay_s: float = 0.0
    prefill_s: float = 0.0
    given: list[int] = field(default_factory=list)
    mask: TokenMask | None = None
    end: str | None = None


class ScriptedCore:
    """Plays scripts token by token."""

    def __init__(self, settings: EngineSettings) -> None:
        self._text = load_text(Path(settings.directory))
        self._max_waiting = settings.max_waiting
        self._open: dict[tuple[str, int], _Choice] = {}
        self._news: list[Delta] = []
        self._counts = [0, 0, 0]
        self._seen: set[bytes] = set()
        path = Path(settings.directory) / "tokenizer.json"
        self._masks = MaskFactory(path, VOCAB_SIZE, EOS)
        self.info = EngineInfo(
            max_model_len=settings.max_model_len or 8192,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=tuple(EOS),
            has_vision=True,
            lines=("engine: scripted",),
        )
        self.works: list[Work] = []
        self.predicted_s = 0.01

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._news)

    def add(self, work: Work) -> None:
        ids = unpack_ids(work.prompt)
        wanted = work.params.max_tokens or 0
        limit = self.info.max_model_len
        if not ids:
            raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
        if len(ids) >= limit or len(ids) + wanted > limit:
            raise RequestError(
                f"this model's maximum context length is {limit} tokens",
                got=f"{len(ids)} in the prompt and {wanted} for the answer",
                code="context_length_exceeded",
            )
        if len(self._open) >= self._max_waiting:
            raise CapacityError("the queue is full")
        self.works.append(work)
        self._counts[0] += len(ids)
        mask = None if work.grammar is None else self._masks.of(work.grammar)
        for index in range(work.params.n):
            choice = _read(self._text.vocabulary, work, index, ids)
            choice.mask = None if mask is None else mask.copy()
            self._open[work.request_id, index] = choice
        cached = len(ids) // 2 if work.prompt in self._seen else 0
        self._seen.add(work.prompt)
        rows = None
        if work.params.prompt_logprobs is not None:
            rows = tuple(TokenRow(i, -1.0, ((i, -1.0),)) for i in ids[1:])
        self._news.append(
            Delta(
                request_id=work.request_id,
                index=0,
                cached_tokens=cached,
                miss="" if cached else "new",
                prompt_rows=rows,
            )
        )

    def abort(self, request_id: str) -> None:
        for key in [k for k in self._open if k[0] == request_id]:
            self._finish(self._open[key], "aborted")

    def end_choice(self, request_id: str, index: int) -> None:
        choice = self._open.get((request_id, index))
        if choice is not None:
            self._finish(choice, "stop")

    def step(self) -> Sequence[Delta]:
        self._counts[2] += 1
        for choice in list(self._open.values()):
            if choice.prefill_s:
                time.sleep(choice.prefill_s)
                choice.prefill_s = 0.0
            if choice.delay_s:
                time.sleep(choice.delay_s)
            self._advance(choice)
        news, self._news = self._news, []
        return news

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._open),
            steps=self._counts[2],
            prompt_tokens=self._counts[0],
            generated_tokens=self._counts[1],
        )

    def _advance(self, choice: _Choice) -> None:
        params = choice.work.params
        if params.max_tokens is not None and len(choice.given) >= params.max_tokens:
            self._finish(choice, "length")
            return
        if choice.end == "fail" and not choice.script:
            self._finish(choice, "failed", "the script says so")
            return
        if choice.end == "die" and not choice.script:
            os._exit(3)
        token = self._next(choice)
        choice.given.append(token)
        self._counts[1] += 1
        row = (TokenRow(token, -0.5, ((token, -0.5), (65, -1.5))[: params.logprobs or 0]),)
        self._news.append(
            Delta(
                request_id=choice.work.request_id,
                index=choice.index,
                token_ids=(token,),
                rows=None if params.logprobs is None else row,
            )
        )
        if token in EOS or (choice.mask is not None and choice.mask.is_complete()):
            self._finish(choice, "stop")

    def _next(self, choice: _Choice) -> int:
        """Return the script's next token; under a grammar an allowed one where it differs."""
        token = choice.script.pop(0) if choice.script else EOS[0]
        if choice.work.params.logit_bias.get(token, 0.0) < -1e8:
            token = EOS[0]
        if choice.mask is None:
            return token
        words = choice.mask.allowed_words()
        if words is None:
            choice.mask.advance(token)
            return token
        allowed = [i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1]
        if token not in allowed:
            choice.script.insert(0, token)
            token = min(allowed, key=lambda i: (i not in EOS, i < 256, i != _BRACE, i))
        choice.mask.advance(token)
        return token

    def _finish(self, choice: _Choice, reason: str, failure: str = "") -> None:
        del self._open[choice.work.request_id, choice.index]
        self._news.append(
            Delta(
                request_id=choice.work.request_id,
                index=choice.index,
                finish=reason,
                failure=failure,
            )
        )


def build(settings: EngineSettings) -> ScriptedCore:
    """Build the engine; the factory that tests name."""
    return ScriptedCore(settings)


def _read(vocabulary: Vocabulary, work: Work, index: int, ids: list[int]) -> _Choice:
    """Take the script out of the prompt: the last user turn, or the whole of a raw prompt."""
    start = max((i for i, t in enumerate(ids) if t == ID["<|user|>"]), default=-1)
    body = [i for i in ids[start + 1 :] if i < 256]
    stop = [n for n, t in enumerate(ids[start + 1 :]) if t == ID["<|assistant|>"]]
    if start >= 0 and stop:
        body = [i for i in ids[start + 1 : start + 1 + stop[0]] if i < 256]
    text = vocabulary.decode(body)
    seen = [n for n, t in enumerate(ids) if t == ID["<|observation|>"] and n > start >= 0]
    if seen and "@again@" not in text:  # a tool has answered: say so and end
        result = vocabulary.decode([i for i in ids[seen[-1] :] if i < 256])
        text = f"</think>The tool said: {result[:200]}"
    orders = dict(_ORDER.findall(text))
    text = _ORDER.sub("", text)
    end = next((e for e in ("fail", "die") if f"@{e}@" in text), None)
    text = text.replace("@fail@", "").replace("@die@", "").replace("@i@", str(index))
    script = vocabulary.encode_template(text) + ([] if end else [EOS[0]])
    return _Choice(
        work,
        index,
        script,
        delay_s=float(orders.get("slow", 0)),
        prefill_s=float(orders.get("prefill", 0)),
        end=end,
    )
