"""From a checkpoint directory to an engine that the driver can turn.

Owns the order of the start (settings, kernels, memory, model) and the translation between wire
messages and the engine's records. Knows no socket and no HTTP.
Invariant: what is printed at start is what runs; the cache budget is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from oxplow.cache.plan import CacheBudget
from oxplow.cache.prefix import PictureSpan
from oxplow.config import Facts as MachineFacts
from oxplow.config import load_config, resolve
from oxplow.contracts import CONTRACTS
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, Event, PromptDone, TokenOut
from oxplow.engine.llm import open_engine
from oxplow.engine.options import EngineOptions
from oxplow.engine.request import FinishReason, Picture, Request
from oxplow.engine.sampling import TokenLogprob
from oxplow.errors import ConfigError
from oxplow.model.load import LoadOptions
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, OpTable, select
from oxplow.serve.engine_port import (
    Core,
    Delta,
    EngineInfo,
    EngineStats,
    TokenRow,
    WirePicture,
    Work,
    unpack_ids,
)
from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.machine import available_memory_bytes, devices_that_answer, physical_cores
from oxplow.serve.mask import MaskFactory
from oxplow.serve.model_files import ModelFiles, read_model_files

__all__ = ["ServedCore", "build_core"]

_DEFAULT_SHARE = 0.4  # of the free memory, where no budget is given
_MOST_BYTES = 4 << 30  # more is taken only when asked for
_DEFAULT_LEN = 1 << 17


def build_core(settings: EngineSettings) -> Core:
    """Load the model and plan its caches. Raises ConfigError or WeightError."""
    directory = Path(settings.directory)
    files = read_model_files(directory)
    runtime = load_config(None, settings.settings, {}).runtime
    length = _model_len(settings, files)
    facts = MachineFacts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        model_max_len_tokens=files.max_positions,
    )
    decided = resolve(runtime, facts)
    torch.set_num_threads(decided.threads)
    ops = select(
        builtin_kernels(),
        CONTRACTS,
        Facts(
            device=torch.device(decided.device),
            dtype=getattr(torch, decided.activation_dtype),
            invariant=decided.deterministic,
        ),
        runtime.preferred_kernels(),
    )
    budget = CacheBudget(
        total_bytes=settings.cache_bytes or _free_share(),
        num_slots=settings.num_slots,
        max_model_len=length,
    )
    load = LoadOptions(block_size=decided.block_size_tokens)
    options = EngineOptions(max_waiting=settings.max_waiting)
    core = open_engine(directory, ops, budget, load=load, options=options)
    head = (
        f"model: {directory.name}, at most {length} tokens a request",
        f"compute: {decided.device}, {decided.activation_dtype}, {decided.threads} thread(s)",
        f"kernels: {_kernel_line(ops)}",
    )
    return ServedCore(core, files, (*head, *core.plan.lines()))


class ServedCore:
    """An `EngineCore` behind the driver's protocol."""

    def __init__(self, core: EngineCore, files: ModelFiles, lines: Sequence[str]) -> None:
        self._core = core
        spec = core.model.spec
        vocab_size = spec.text.vocab_size
        self.info = EngineInfo(
            max_model_len=core.plan.max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=tuple(spec.eos_token_ids),
            has_vision=files.media is not None,
            lines=tuple(lines),
        )
        self._masks = MaskFactory(files.tokenizer_path, vocab_size, spec.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """Tell whether a step would do or tell anything."""
        return self._core.has_work

    @property
    def predicted_s(self) -> float:
        """Return how long the next step should take."""
        return self._core.predicted_step_s()

    def add(self, work: Work) -> None:
        """Take a request; raises RequestError or CapacityError."""
        mask = None if work.grammar is None else self._masks.make(work.grammar.text)
        self._core.add(
            Request(
                request_id=work.request_id,
                prompt_ids=unpack_ids(work.prompt),
                params=work.params,
                pictures=tuple(_picture(p) for p in work.pictures),
                priority=work.priority,
                salt=work.salt,
                token_mask=mask,
                reuse_prefix=work.reuse_prefix,
            )
        )

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        self._core.abort(request_id)

    def end_choice(self, request_id: str, index: int) -> None:
        """Finish one choice: the front saw a stop text."""
        self._core.stop(request_id, index)

    def step(self) -> Sequence[Delta]:
        """Run one step."""
        return _deltas(self._core.step())

    def stats(self) -> EngineStats:
        """Count."""
        s = self._core.stats()
        return EngineStats(
            running=s.running,
            waiting=s.waiting,
            cache_use=s.blocks_held / s.blocks_total if s.blocks_total else 0.0,
            steps=s.steps,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.answer_tokens,
            prefix_queries_tokens=s.prefix_queried_tokens,
            prefix_hits_tokens=s.prefix_hit_tokens,
            preemptions=s.preemptions,
            predicted_wait_s=self._core.predicted_wait_s(),
        )


def _deltas(events: Iterable[Event]) -> list[Delta]:
    """Translate; PromptDone speaks for every choice, so it travels with choice 0."""
    deltas: list[Delta] = []
    for event in events:
        match event:
            case PromptDone():
                rows = tuple(_row(r) for r in event.logprobs if r is not None)
                deltas.append(
                    Delta(
                        request_id=event.request_id,
                        index=0,
                        prompt_rows=rows if event.logprobs else None,
                        cached_tokens=event.cached_tokens,
                        miss=event.miss,
                    )
                )
            case TokenOut():
                deltas.append(
                    Delta(
                        request_id=event.request_id,
                        index=event.choice,
                        token_ids=(event.token_id,),
                        rows=None if event.logprob is None else (_row(event.logprob),),
                    )
                )
            case ChoiceEnd():
                deltas.append(
                    Delta(
                        request_id=event.request_id,
                        index=event.choice,
                        finish=event.reason.value,
                        failure=event.message if event.reason is FinishReason.FAILED else "",
                    )
                )
    return deltas


def _row(row: TokenLogprob) -> TokenRow:
    return TokenRow(row.token_id, row.logprob, tuple(row.top))


def _picture(picture: WirePicture) -> Picture:
    pixels = np.frombuffer(picture.pixels, dtype=np.float32).reshape(-1, picture.row_width)
    return Picture(
        span=PictureSpan(picture.start, picture.num_tokens, picture.content_hash),
        pixel_values=torch.from_numpy(pixels.copy()),
        grid_thw=torch.tensor([picture.grid]),
    )


def _model_len(settings: EngineSettings, files: ModelFiles) -> int:
    """Decide the longest request: as asked, else what the model allows within our default."""
    limit, asked = files.max_positions, settings.max_model_len
    if asked is None:
        return min(limit or _DEFAULT_LEN, _DEFAULT_LEN)
    if limit is not None and asked > limit:
        raise ConfigError(
            "the asked length exceeds the model's", got=asked, wanted=f"at most {limit}"
        )
    return asked


def _free_share() -> int:
    free = available_memory_bytes()
    return _MOST_BYTES if free is None else min(_MOST_BYTES, int(free * _DEFAULT_SHARE))


def _kernel_line(ops: OpTable) -> str:
    chosen = sorted({kernel.name for kernel in ops.kernels.values()})
    return f"{len(ops.kernels)} ops on {', '.join(chosen)}"
