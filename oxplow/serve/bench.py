"""Decode and prefill speed of a checkpoint on our engine, side by side with a peer.

Owns the subjects (ours, transformers) and the record of a run. Knows the engine and, inside one
function, the peer.
Invariant: nothing is timed before both sides gave the same greedy tokens on one prompt; both sides
work on the same fresh prompts in interleaved rounds of one process; every record names machine,
versions and dtype.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from oxplow import __version__
from oxplow.cache.plan import exact_plan
from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Cost
from oxplow.engine.core import EngineCore
from oxplow.engine.events import TokenOut
from oxplow.engine.request import Request, SamplingParams
from oxplow.errors import ConfigError
from oxplow.feedback.cost import counting_table
from oxplow.feedback.measure import Comparison, compare, read_bandwidth
from oxplow.model.load import LoadOptions, load_model
from oxplow.ops.table import OpTable

__all__ = [
    "WEIGHT_FORMATS",
    "BenchPlan",
    "OurEngine",
    "Subject",
    "TransformersPeer",
    "machine_record",
    "run_bench",
    "step_floor",
]

WEIGHT_FORMATS = {"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of plain weights in memory by the word that flags and settings take."""

_GATE_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to time: `prompt_tokens` of context, then `new_tokens` decoded (0: time the prefill)."""

    prompt_tokens: int
    new_tokens: int
    pairs: int
    seed: int = 0


class Subject(Protocol):
    """One engine under test."""

    name: str

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[float, float, list[int]]:
        """Return (prefill seconds, decode seconds, greedy tokens), from empty caches."""
        ...


class OurEngine:
    """Our engine with the prefix cache off, one request at a time."""

    name = "oxplow"

    def __init__(
        self, directory: Path, ops: OpTable, weight_dtype: torch.dtype | None, max_tokens: int
    ) -> None:
        load = LoadOptions(weight_dtype=weight_dtype, with_vision=False, with_draft=False)
        model = load_model(directory, ops, load)
        blocks = -(-max_tokens // model.block_size) + 1
        plan = exact_plan(
            model.components(), model.block_size, num_blocks=blocks, num_slots=2, num_snapshots=0
        )
        self._core = EngineCore(model, ops, plan, revision="bench")
        self._served = 0
        self.vocab_size = model.spec.text.vocab_size

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[float, float, list[int]]:
        """Time until the first token, then until the last."""
        self._served += 1
        params = SamplingParams(temperature=0.0, max_tokens=max(1, new_tokens), ignore_eos=True)
        started = time.perf_counter()
        self._core.add(
            Request(
                request_id=f"bench-{self._served}",
                prompt_ids=prompt,
                params=params,
                reuse_prefix=False,
            )
        )
        tokens: list[int] = []
        first = started
        while self._core.has_work:
            for event in self._core.step():
                if isinstance(event, TokenOut):
                    tokens.append(event.token_id)
                    first = time.perf_counter() if len(tokens) == 1 else first
        return first - started, time.perf_counter() - first, tokens


class TransformersPeer:
    """The same checkpoint in transformers, with its own cache, in float32 on the CPU."""

    name = "transformers"

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._model = _load_peer(directory, device)
        self._device = device

    @torch.inference_mode()
    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[float, float, list[int]]:
        """Prefill with a cache, then decode token by token."""
        started = time.perf_counter()
        ids = torch.tensor([list(prompt)], device=self._device)
        out = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
        token = int(out.logits[0, -1].argmax())
        first = time.perf_counter()
        tokens, cache = [token], _cache_of(out)
        for _ in range(new_tokens - 1):
            ids = torch.tensor([[token]], device=self._device)
            out = self._model(input_ids=ids, use_cache=True, **cache)
            token, cache = int(out.logits[0, -1].argmax()), _cache_of(out)
            tokens.append(token)
        return first - started, time.perf_counter() - first, tokens


def run_bench(plan: BenchPlan, ours: OurEngine, peer: Subject | None) -> dict[str, Any]:
    """Gate, then time; return the figures of the record.

    Raises ConfigError when the two sides do not give the same tokens: a red gate is never timed.
    """
    rng = random.Random(plan.seed)
    if peer is not None:
        _gate(ours, peer, _prompt(rng, 48, ours.vocab_size))
    prompts: dict[int, list[int]] = {}
    is_prefill = plan.new_tokens == 0
    counted = plan.prompt_tokens if is_prefill else plan.new_tokens - 1

    def work(subject: Subject) -> Any:
        def once(seed: int) -> float:
            prompt = prompts.setdefault(
                seed, _prompt(random.Random(seed), plan.prompt_tokens, ours.vocab_size)
            )
            prefill, decode, _ = subject.run(prompt, plan.new_tokens)
            return prefill if is_prefill else decode

        return once

    mine = (ours.name, work(ours))
    told = compare(
        mine, (peer.name, work(peer)) if peer else mine, pairs=plan.pairs, seed=plan.seed
    )
    return _figures(told, ours.name, peer.name if peer else None, counted)


def step_floor(
    directory: Path, ops: OpTable, weight_dtype: torch.dtype | None, context: int
) -> Cost:
    """Count the least bytes and FLOPs of one decode step at `context` tokens."""
    counting, tally = counting_table(ops, CONTRACTS)
    engine = OurEngine(directory, counting, weight_dtype, context + 8)
    prompt = _prompt(random.Random(0), context, engine.vocab_size)
    totals = []
    for new_tokens in (1, 2):
        tally.reset()
        engine.run(prompt, new_tokens)
        totals.append(tally.total)
    prefill, both = totals
    return Cost(bytes=both.bytes - prefill.bytes, flops=both.flops - prefill.flops)


def machine_record(ops: OpTable, threads: int) -> dict[str, Any]:
    """Return what a figure needs beside it: machine, versions, dtype, threads."""
    return {
        "device": str(ops.facts.device),
        "machine": platform.processor() or platform.machine(),
        "compute_dtype": str(ops.facts.dtype).removeprefix("torch."),
        "threads": threads,
        "torch": torch.__version__,
        "oxplow": __version__,
        "python": platform.python_version(),
        "bandwidth_bytes_s": read_bandwidth(ops.facts.device),
    }


def _figures(told: Comparison, ours: str, peer: str | None, tokens: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "ours_tok_s": tokens / told.median(ours),
        "control": [told.control.low, told.control.high],
        "sound": told.is_sound,
    }
    if peer is not None:
        figures |= {
            "peer": peer,
            "peer_tok_s": tokens / told.median(peer),
            "ratio": told.ratio.ratio,
            "ratio_interval": [told.ratio.low, told.ratio.high],
        }
    return figures


def _gate(ours: Subject, peer: Subject, prompt: Sequence[int]) -> None:
    mine, theirs = (s.run(prompt, _GATE_TOKENS)[2] for s in (ours, peer))
    if mine != theirs:
        at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        raise ConfigError(
            "the two sides disagree, so nothing is timed",
            got=mine[at],
            wanted=theirs[at],
            where=f"token {at}",
        )


def _prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(min(256, vocab_size)) for _ in range(length)]


def _load_peer(directory: Path, device: torch.device) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise ConfigError(
            "the peer transformers is not installed", wanted="pip install 'oxplow[test]'"
        ) from error
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    kind = (
        AutoModelForImageTextToText
        if getattr(config, "vision_config", None)
        else AutoModelForCausalLM
    )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: Any = kind.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def _cache_of(out: Any) -> dict[str, Any]:
    """Name the cache as this release of transformers takes it back."""
    cache = getattr(out, "cache", None)
    return {"cache": cache} if cache is not None else {"past_key_values": out.past_key_values}
