"""The engine as an examinee: a checkpoint under given settings, asked through the served path.

Owns the settings of one side of an evaluation and the opening of its engine. Knows no question.
Invariant: a chat takes the same way as over HTTP (template, pictures, engine, answer reader), only
greedily and with thinking off where the template can; what an "unset" became is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from oxplow.cache.plan import blocks_for, exact_plan
from oxplow.config import Facts as MachineFacts
from oxplow.config import RuntimeConfig, resolve
from oxplow.engine.core import EngineCore
from oxplow.engine.llm import model_revision
from oxplow.engine.options import EngineOptions, SchedulerOptions
from oxplow.engine.request import SamplingParams
from oxplow.errors import ConfigError, RequestError
from oxplow.feedback.exam import Answer, Chat, DraftRun, TextWindow, ToolCall
from oxplow.model.load import LoadOptions, load_model
from oxplow.serve.answers import AnswerReader, ChoiceEvent, Ended
from oxplow.serve.bench import WEIGHT_FORMATS, machine_record
from oxplow.serve.engine_build import ServedCore
from oxplow.serve.engine_port import Core, Work, pack_ids
from oxplow.serve.formats.answer import CallArguments, CallBegan, Content
from oxplow.serve.kernel_choice import chosen_kernels
from oxplow.serve.machine import devices_that_answer, physical_cores
from oxplow.serve.model_files import read_model_files
from oxplow.serve.prepare.chat import ChatPreparer
from oxplow.serve.prepare.prepared import Prepared, PrepareSettings
from oxplow.serve.text import load_text
from oxplow.serve.text_reading import TextReader

__all__ = ["EngineExaminee", "EvalSettings", "open_examinee"]

_ATTENTION = ("sparse", "dense")
_SLOTS, _SNAPSHOTS = 16, 32
_PREFIX_TOKENS = 256  # a shared prefix of at least so many is computed first, alone
_THINKING_TOKENS = 512  # more room where thinking cannot be switched off
_GREEDY = SamplingParams(temperature=0.0, max_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """One side of an evaluation.

    `weights` is the format of plain matrices in memory (None: fp32 where activations are float32,
    which computes the same numbers as the stored format and is faster there; else stored).
    `attention` dense attends to every earlier token instead of those the indexer selects.
    `assignments` are other settings, as after `--set`.
    """

    weights: str | None = None
    attention: str = "sparse"
    assignments: Mapping[str, str] | None = None

    @classmethod
    def parse(cls, text: str) -> EvalSettings:
        """Read `KEY=VALUE,KEY=VALUE`; keys are weights, attention, or any setting's dotted name.

        Raises ConfigError for another form or value; dotted names are checked where they are used.
        """
        given: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = part.partition("=")
            if not equals or not value.strip():
                wanted = "KEY=VALUE, several with commas between"
                raise ConfigError("these settings do not read", got=part, wanted=wanted)
            given[key.strip()] = value.strip()
        weights, attention = given.pop("weights", None), given.pop("attention", "sparse")
        if weights is not None and weights not in WEIGHT_FORMATS:
            raise ConfigError(
                "unknown weight format", got=weights, wanted=", ".join(WEIGHT_FORMATS)
            )
        if attention not in _ATTENTION:
            raise ConfigError("unknown attention", got=attention, wanted=", ".join(_ATTENTION))
        for key in given:
            if "." not in key:
                wanted = "weights, attention, or a dotted name of `oxplow config --show`"
                raise ConfigError("unknown setting", got=key, wanted=wanted)
        return cls(weights=weights, attention=attention, assignments=given)

    def weights_for(self, activation_dtype: str) -> str:
        """Decide the weight format."""
        return self.weights or ("fp32" if activation_dtype == "float32" else "stored")


class EngineExaminee:
    """A model behind its engine, one chat after another or many at once."""

    def __init__(self, directory: Path, core: Core, reader: TextReader) -> None:
        files, text = read_model_files(directory), load_text(directory)
        self.max_tokens = core.info.max_model_len
        self.sees_pictures = core.info.has_vision
        self.drafts = reader.drafts
        self._core, self._reader = core, reader
        self._vocabulary = text.vocabulary
        self._thinks = not text.has_switch("enable_thinking")
        # No defaults of the checkpoint: a top_p or penalty of its own would not be greedy.
        settings = PrepareSettings(directory=directory, names=("exam",))
        self._preparer = ChatPreparer(text, files, {}, settings)
        self._asked = 0

    def count_tokens(self, text: str) -> int:
        """Return the tokens of plain text."""
        return len(self._vocabulary.encode_plain(text))

    def ask(self, chats: Sequence[Chat]) -> list[Answer]:
        """Answer all chats together, greedily. A chat that is refused or fails says so in `end`."""
        prepared: list[Prepared | None] = []
        answers: list[Answer] = []
        for chat in chats:
            try:
                prepared.append(self._preparer.prepare(self._body(chat)))
                answers.append(Answer())
            except RequestError as error:
                prepared.append(None)
                answers.append(Answer(text=str(error), end="refused"))
        self._share_prefix([one.works[0] for one in prepared if one is not None])
        waiting: dict[str, tuple[int, AnswerReader, list[ChoiceEvent]]] = {}
        for number, one in enumerate(prepared):
            if one is None:
                continue
            name = self._next_name()
            try:
                self._core.add(msgspec.structs.replace(one.works[0], request_id=name))
            except RequestError as error:
                answers[number] = Answer(text=str(error), end="refused")
                continue
            end_choice = partial(self._core.end_choice, name)
            reader = AnswerReader(one.shape, self._vocabulary, 1, end_choice)
            waiting[name] = (number, reader, [])
        while waiting:
            for delta in self._core.step():
                if delta.request_id not in waiting:
                    continue
                number, reader, events = waiting[delta.request_id]
                events += [event for _, event in reader.read([delta])]
                if reader.is_finished:
                    answers[number] = _answer(events, reader, prepared[number])
                    del waiting[delta.request_id]
        return answers

    def read(self, kind: str, text: str, count: int, num_tokens: int) -> Iterator[TextWindow]:
        """Read windows of held-out text by teacher forcing."""
        return self._reader.read(kind, text, count, num_tokens)

    def write(
        self, kind: str, text: str, count: int, prompt_tokens: int, new_tokens: int
    ) -> Iterator[DraftRun]:
        """Continue stretches of held-out text greedily, guessing ahead."""
        return self._reader.write(kind, text, count, prompt_tokens, new_tokens)

    def _body(self, chat: Chat) -> dict[str, Any]:
        body = {**chat, "temperature": 0.0}
        if self._thinks:
            return body | {"max_tokens": chat["max_tokens"] + _THINKING_TOKENS}
        return body | {"enable_thinking": False}

    def _share_prefix(self, works: Sequence[Work]) -> None:
        """Compute what all prompts begin with once; each then starts from the cached state."""
        prompts = [memoryview(w.prompt).cast("i") for w in works if not w.pictures]
        if len(prompts) < 2 or len(prompts) < len(works):
            return
        first = prompts[0]
        length = min(_common(first, other) for other in prompts[1:])
        if length < _PREFIX_TOKENS:
            return
        ids = pack_ids(first[:length].tolist())
        self._core.add(Work(request_id=self._next_name(), prompt=ids, params=_GREEDY))
        while self._core.has_work:
            self._core.step()

    def _next_name(self) -> str:
        self._asked += 1
        return f"exam-{self._asked}"


def open_examinee(
    directory: Path, settings: EvalSettings, runtime: RuntimeConfig, longest: int
) -> tuple[EngineExaminee, dict[str, Any]]:
    """Open a checkpoint under `settings`, with room for requests of `longest` tokens.

    Returns the examinee and what it is: model, revision, settings as decided, machine. Sets the
    process's compute threads. Raises ConfigError or WeightError.
    """
    files = read_model_files(directory)
    machine = MachineFacts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        model_max_len_tokens=files.max_positions,
    )
    decided = resolve(runtime, machine)
    torch.set_num_threads(decided.threads)
    ops = chosen_kernels(decided, runtime)
    weights = settings.weights_for(decided.activation_dtype)
    load = LoadOptions(
        block_size=decided.block_size_tokens,
        weight_dtype=WEIGHT_FORMATS[weights],
        attend_all=settings.attention == "dense",
    )
    model = load_model(directory, ops, load)
    length = min(longest, decided.max_model_len_tokens)
    blocks = 2 * blocks_for(length, model.block_size) + 16 * _SLOTS
    plan = exact_plan(
        model.components(),
        model.block_size,
        num_blocks=blocks,
        num_slots=_SLOTS,
        num_snapshots=_SNAPSHOTS,
        max_model_len=length,
    )
    # No target for a step: nobody waits for single tokens here.
    options = EngineOptions(scheduler=SchedulerOptions(step_target_s=None))
    revision = model_revision(directory)
    core = EngineCore(model, ops, plan, options, revision=revision)
    about = {
        "model": directory.name,
        "revision": revision,
        "settings": {
            "weights": weights,
            "attention": settings.attention,
            **(settings.assignments or {}),
        },
        "max_tokens": length,
        **machine_record(ops, decided.threads),
    }
    reader = TextReader(model, ops, load_text(directory).vocabulary)
    return EngineExaminee(directory, ServedCore(core, files, ()), reader), about


def _answer(
    events: Sequence[ChoiceEvent], reader: AnswerReader, prepared: Prepared | None
) -> Answer:
    """Join what a client would have been told."""
    calls: list[tuple[str, list[str]]] = []
    text, end = "", ""
    for event in events:
        match event:
            case Content():
                text += event.text
            case CallBegan():
                calls.append((event.name, []))
            case CallArguments():
                calls[event.number][1].append(event.text)
            case Ended():
                end = event.reason
    return Answer(
        text=text,
        calls=tuple(ToolCall(name, "".join(parts)) for name, parts in calls),
        end=end,
        prompt_tokens=0 if prepared is None else len(prepared.works[0].prompt) // 4,
        cached_tokens=reader.usage.cached_tokens,
    )


def _common(left: memoryview, right: memoryview) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(left), len(right))
    for at in range(length):
        if left[at] != right[at]:
            return at
    return length
