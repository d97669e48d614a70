"""Performance faults: every answer is right, and late.

Owns class P of the planted faults. Knows the step, the cache's look-up and the expert kernels, no
probe. Invariant: tokens are those of the clean engine.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from oxplow.cache.prefix import Snapshot, SnapshotPool
from oxplow.engine.batch import LogitRow
from oxplow.engine.core import EngineCore
from oxplow.engine.sampling import Drawn, Sampler
from tests.faults.record import Fault, FaultClass, expected
from tests.faults.swap import Run, attribute, kernels_of

_OBJECTS = 200_000
_COLLECT_EVERY = 8
_ROW_GROUP = 32
_WAIT_S = 1.5e-3
_PREFILL_SLOWER, _DECODE_SLOWER = 2.6, 2.0
_DECODE_ROWS = 8


@contextmanager
def _collections_while_serving() -> Iterator[None]:
    """Keep many objects alive, and collect them all on the engine's thread now and then."""
    alive = [{"n": i, "of": [i]} for i in range(_OBJECTS)]

    def collecting(original: Run) -> Run:
        def step(self: EngineCore) -> list[object]:
            if self.counters.steps % _COLLECT_EVERY == 1:
                gc.collect()
            return original(self)

        return step

    with attribute(EngineCore, "step", make=collecting):
        yield
    alive.clear()


def _waits_for_each_row(original: Run) -> Run:
    """Read every row back by itself: a stop of the device for each, where one would do."""

    def draw(self: Sampler, logits: Tensor, rows: Sequence[LogitRow]) -> list[Drawn]:
        for row in logits:
            row.amax().item()
            time.sleep(_WAIT_S)  # what a device takes to drain its queue
        return original(self, logits, rows)

    return draw


def _never_found(original: Run) -> Run:
    def find(self: SnapshotPool, key: bytes) -> Snapshot | None:
        return None

    return find


def _padded_to_a_group(run: Run) -> Run:
    """Fill the batch up to whole groups; the rows that were added load experts of their own."""

    def experts(
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        **named: object,
    ) -> Tensor:
        rows = x.shape[0]
        extra = -rows % _ROW_GROUP
        if rows == 0 or extra == 0:
            return run(x, expert_ids, expert_weights, gate_up, down, **named)
        k = expert_ids.shape[1]
        others = torch.arange(extra * k).view(extra, k) % gate_up.shape[0]
        ids = torch.cat([expert_ids, others.to(expert_ids.dtype)])
        weights = pad(expert_weights, (0, 0, 0, extra))
        return run(pad(x, (0, 0, 0, extra)), ids, weights, gate_up, down, **named)[:rows]

    return experts


def _spin(began: float, factor: float) -> None:
    until = began + factor * (time.thread_time() - began)
    while time.thread_time() < until:
        pass


def _slower_prefill(run: Run) -> Run:
    """Take longer by a factor, as a kernel does that a change made worse."""

    def kernel(*args: object, **named: object) -> object:
        began = time.thread_time()
        result = run(*args, **named)
        _spin(began, _PREFILL_SLOWER)
        return result

    return kernel


def _slower_for_few_rows(run: Run) -> Run:
    def linear(x: Tensor, *args: object) -> object:
        began = time.thread_time()
        result = run(x, *args)
        if x.shape[0] <= _DECODE_ROWS:
            _spin(began, _DECODE_SLOWER)
        return result

    return linear


FAULTS = (
    Fault(
        id="F27",
        title="the engine's thread collects the oldest generation while it serves",
        kind=FaultClass.PERFORMANCE,
        reports=("sgl-project/sglang#9241", "sgl-project/sglang#28067"),
        expected=expected("runtime engine.core", "gc collect step", "generation"),
        symptom="itl",
        excitation="many live objects; a pause every few steps",
        plant=_collections_while_serving,
    ),
    Fault(
        id="F28",
        title="each row of logits is waited for by itself",
        kind=FaultClass.PERFORMANCE,
        reports=("vllm-project/vllm#40561", "vllm-project/vllm#41434"),
        expected=expected("engine.sampling", "draw", "rows wait item sleep"),
        symptom="itl",
        excitation="decode; grows with the rows of a step",
        plant=lambda: attribute(Sampler, "draw", make=_waits_for_each_row),
    ),
    Fault(
        id="F29",
        title="prefixes are never found, because states are not, and nothing says so",
        kind=FaultClass.PERFORMANCE,
        reports=("vllm-project/vllm#51198",),
        expected=expected("cache.prefix", "find lookup", "snapshot"),
        symptom="ttft",
        excitation="prompts that were seen before",
        plant=lambda: attribute(SnapshotPool, "find", make=_never_found),
    ),
    Fault(
        id="F30",
        title="rows that fill up a group load experts of their own",
        kind=FaultClass.PERFORMANCE,
        reports=("sgl-project/sglang#25852",),
        expected=expected("ops", "experts experts_fp8", "T rows batch"),
        symptom="throughput",
        excitation="batches just above a whole group, and small ones",
        plant=lambda: kernels_of("experts", make=_padded_to_a_group),
    ),
    Fault(
        id="F32",
        title="prefill got slower: about 30% more time to the first token",
        kind=FaultClass.PERFORMANCE,
        reports=("the method published with GLM-5.3-Flash: +30% time to first token",),
        expected=expected("ops", "kda_prefill", "time"),
        symptom="ttft",
        excitation="prompts of some hundred tokens",
        plant=lambda: kernels_of("kda_prefill", make=_slower_prefill),
    ),
    Fault(
        id="F33",
        title="decode got slower: about 20% less output",
        kind=FaultClass.PERFORMANCE,
        reports=("the method published with GLM-5.3-Flash: -20% output throughput",),
        expected=expected("ops", "linear", "time"),
        symptom="throughput",
        excitation="products of at most 8 rows: decode",
        plant=lambda: kernels_of("linear", make=_slower_for_few_rows),
    ),
)
