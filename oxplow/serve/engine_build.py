"""From a checkpoint directory to an engine that the driver can turn.

Owns the order of the start (settings, kernels, memory, model) and the translation between wire
messages and the engine's records. Knows no socket and no HTTP.
Invariant: what is printed at start is what runs; the cache budget is decided here and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from oxplow.cache.plan import CacheBudget, blocks_for, plan_cache
from oxplow.cache.prefix import PictureSpan
from oxplow.cache.spec import Component, Per, bytes_per
from oxplow.config import Facts as MachineFacts
from oxplow.config import ResolvedConfig, load_config, resolve
from oxplow.engine.core import EngineCore
from oxplow.engine.events import ChoiceEnd, Event, PromptDone, TokenOut
from oxplow.engine.llm import model_revision
from oxplow.engine.request import FinishReason, Picture, Request, RequestStatus
from oxplow.engine.runner import trunk_components
from oxplow.engine.sampling import TokenLogprob
from oxplow.errors import ConfigError
from oxplow.model.load import LoadOptions, load_model
from oxplow.ops.table import OpTable
from oxplow.serve.engine_port import (
    Core,
    Delta,
    EngineInfo,
    EngineStats,
    LoadSession,
    SaveSession,
    SessionJob,
    TokenRow,
    WirePicture,
    Work,
    unpack_ids,
)
from oxplow.serve.engine_settings import EngineSettings, engine_options
from oxplow.serve.kernel_choice import chosen_kernels
from oxplow.serve.loading import told_progress
from oxplow.serve.machine import available_memory_bytes, devices_that_answer, physical_cores
from oxplow.serve.mask import MaskFactory
from oxplow.serve.model_files import ModelFiles, read_model_files
from oxplow.serve.session_jobs import session_job
from oxplow.serve.shadow import shadowed
from oxplow.trace import EventRing

__all__ = ["ServedCore", "build_core"]

_HOST_SHARE, _DEVICE_SHARE = 0.5, 0.85  # of the free memory, where no budget is given
_WIDEN_SHARE = 0.25  # of the memory that caches may take, for weights widened to float32
_MODEST_BYTES = 1 << 30  # on the host more is taken only for the longest request, or when asked
_DEFAULT_LEN = 1 << 17


def build_core(settings: EngineSettings) -> Core:
    """Load the model and plan its caches. Raises ConfigError or WeightError."""
    directory = Path(settings.directory)
    files = read_model_files(directory)
    runtime = load_config(None, settings.settings, {}).runtime
    decided = resolve(runtime, _machine(files))
    # The front and the workers need a core too; a number that was asked for is kept.
    threads = runtime.compute.threads or max(1, decided.threads - 1)
    torch.set_num_threads(threads)
    ops, judge = shadowed(chosen_kernels(decided, runtime), runtime.trace.shadow_every)
    widened = _weight_dtype(directory, decided)
    load = LoadOptions(block_size=decided.block_size_tokens, weight_dtype=widened)
    with told_progress(directory.name) as progress:
        model = load_model(directory, ops, load, progress)
    components = trunk_components(model)
    budget = _budget(settings, files, components, decided)
    core = EngineCore(
        model,
        ops,
        plan_cache(components, model.block_size, budget),
        engine_options(runtime, settings.max_waiting),
        revision=model_revision(directory),
        ring=EventRing(runtime.trace.capacity_events),
    )
    head = (
        f"model: {directory.name}, at most {core.plan.max_model_len} tokens a request",
        f"compute: {decided.device}, {decided.activation_dtype}, {threads} thread(s)",
        f"weights: {'as stored' if widened is None else 'widened to float32'}",
        f"kernels: {_kernel_line(ops)}"
        + (f", one call in {runtime.trace.shadow_every} judged" if judge else ""),
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
        self._queued: dict[str, float] = {}  # since when a request waits
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
        mask = None if work.grammar is None else self._masks.of(work.grammar)
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
        self._queued[work.request_id] = time.monotonic()

    def abort(self, request_id: str) -> None:
        """Stop a request."""
        self._core.abort(request_id)

    def end_choice(self, request_id: str, index: int) -> None:
        """Finish one choice: the front saw a stop text."""
        self._core.stop(request_id, index)

    def step(self) -> Sequence[Delta]:
        """Run one step."""
        deltas = _deltas(self._core.step())
        return [*self._left_queue(), *deltas] if self._queued else deltas

    def session_job(self, command: SaveSession | LoadSession) -> SessionJob:
        """Begin to save or load a session."""
        return session_job(self._core, command)

    def _left_queue(self) -> list[Delta]:
        """Tell how long those waited that this step took in."""
        left: list[Delta] = []
        for request_id, since in list(self._queued.items()):
            choices = self._core.book.choices(request_id)
            if choices and choices[0].status is RequestStatus.WAITING:
                continue
            del self._queued[request_id]
            waited = time.monotonic() - since
            left.append(Delta(request_id=request_id, index=0, queued_s=waited))
        return left

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


def _machine(files: ModelFiles) -> MachineFacts:
    return MachineFacts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        model_max_len_tokens=files.max_positions,
    )


def _weight_dtype(directory: Path, decided: ResolvedConfig) -> torch.dtype | None:
    """Return float32 where a CPU computes in it and has room: narrow weights are widened each call.

    FP8 tensors stay one byte either way. None keeps every tensor as it is stored.
    """
    if decided.device != "cpu" or decided.activation_dtype != "float32":
        return None
    stored = sum(shard.stat().st_size for shard in directory.glob("*.safetensors"))
    return torch.float32 if 2 * stored < _WIDEN_SHARE * _free_bytes("cpu") else None


def _budget(
    settings: EngineSettings,
    files: ModelFiles,
    components: Sequence[Component],
    decided: ResolvedConfig,
) -> CacheBudget:
    """Decide bytes and the longest request; what was not asked for is made to fit.

    Raises ConfigError where the asked length exceeds the model's.
    """
    limit, asked = files.max_positions, settings.max_model_len
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            "the asked length exceeds the model's", got=asked, wanted=f"at most {limit}"
        )
    block_bytes = bytes_per(components, Per.BLOCK)
    slots = settings.num_slots * bytes_per(components, Per.SLOT)
    size = decided.block_size_tokens
    longest = asked or min(limit or _DEFAULT_LEN, _DEFAULT_LEN)
    needed = slots + blocks_for(longest, size) * block_bytes
    free = _free_bytes(decided.device)
    total = settings.cache_bytes
    if total is None:
        wish = free if decided.device != "cpu" else max(_MODEST_BYTES, 2 * needed)
        total = min(wish, free)
    if asked is None and needed > total > slots:
        longest = max(2, (total - slots) // block_bytes * size)
    return CacheBudget(
        total_bytes=total, num_slots=settings.num_slots, max_model_len=min(longest, _most(limit))
    )


def _most(limit: int | None) -> int:
    return limit if limit is not None else 1 << 30


def _free_bytes(device: str) -> int:
    """Return what caches may take: a share of what is free where they lie, now that weights are."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free * _DEVICE_SHARE)
    free_host = available_memory_bytes()
    return _MODEST_BYTES if free_host is None else int(free_host * _HOST_SHARE)


def _kernel_line(ops: OpTable) -> str:
    chosen = sorted({kernel.name for kernel in ops.kernels.values()})
    return f"{len(ops.kernels)} ops on {', '.join(chosen)}"
