"""Clean controls in the engine: other places, orders, pieces, names, clocks and threads.

Owns the controls that change how the engine goes about its work, never what it answers. Knows the
cache, the scheduler and the batch builder, no probe.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from oxplow.cache import prefix
from oxplow.cache.blocks import BlockPool, SlotPool
from oxplow.cache.manager import Holding
from oxplow.cache.prefix import Snapshot, SnapshotPool
from oxplow.engine import encoder, scheduler
from oxplow.engine.batch import BatchBuilder, LogitRow
from oxplow.engine.chunks import ChunkRules
from oxplow.engine.core import EngineCore
from oxplow.engine.request import Choice, Picture
from oxplow.engine.sampling import Sampler
from oxplow.engine.scheduler import Scheduler
from oxplow.engine.state import StateStore
from oxplow.engine.steps import Scheduled, StepPlan
from tests.faults.record import Control
from tests.faults.swap import Run, attribute, value

_log = logging.getLogger(__name__)


def _from_the_other_end(original: Run) -> Run:
    def __init__(self: BlockPool | SlotPool, *args: object) -> None:  # noqa: N807
        original(self, *args)
        self._free.reverse()

    return __init__


def _decodes_turned(original: Run) -> Run:
    """Lay the decode rows of a step the other way round."""

    def schedule(self: Scheduler) -> StepPlan:
        plan = original(self)
        count = plan.decode_rows
        plan.rows[:count] = plan.rows[:count][::-1]
        return plan

    return schedule


def _shorter_pieces(original: Run) -> Run:
    """Cut a prefill piece of several blocks to one block less."""

    def stop(self: ChunkRules, choice: Choice, stop: int) -> int:
        end = original(self, choice, stop)
        size = self._block_size
        shorter = (end - 1) // size * size
        return shorter if shorter > choice.computed_tokens and end < choice.prompt_len else end

    return stop


def _states_further_apart(original: Run) -> Run:
    def next_spaced(self: ChunkRules, position: int) -> int:
        return original(self, original(self, position))

    return next_spaced


def _oldest_goes(original: Run) -> Run:
    def _value(self: SnapshotPool, snapshot: Snapshot) -> int:
        return snapshot.last_used

    return _value


def _made_anew(original: Run) -> Run:
    def _settings_of(
        self: Sampler, rows: Sequence[LogitRow], device: torch.device
    ) -> tuple[Tensor, ...]:
        self._settings = ((), ())
        return original(self, rows, device)

    return _settings_of


def _filled_anew(original: Run) -> Run:
    def build(self: BatchBuilder, plan: StepPlan, holdings: Mapping[str, Holding]) -> object:
        self._filled = [(None, 0)] * len(self._filled)
        return original(self, plan, holdings)

    return build


def _longer_name(original: Run) -> Run:
    def _name(picture: Picture) -> str:
        return f"picture/{original(picture)}"

    return _name


def _through_a_copy(original: Run) -> Run:
    def copy_slot(self: StateStore, source: int, target: int) -> None:
        original(self, source, target)
        original(self, source, target)

    return copy_slot


def _with_log(original: Run) -> Run:
    def step(self: EngineCore) -> list[object]:
        _log.debug("step %d", self.counters.steps)
        return original(self)

    return step


def _young_collected(original: Run) -> Run:
    def step(self: EngineCore) -> list[object]:
        gc.collect(0)
        return original(self)

    return step


def _rows_listed(original: Run) -> Run:
    """Ask for the token ids of a step in another way."""

    def _token_ids(rows: Sequence[Scheduled]) -> object:
        return original(list(rows)).copy()

    return _token_ids


@contextmanager
def _collector_frozen() -> Iterator[None]:
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _another_name() -> Iterator[None]:
    thread = threading.current_thread()
    old, thread.name = thread.name, "worker-of-another-name"
    try:
        yield
    finally:
        thread.name = old


@contextmanager
def _idle_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="idle", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _other_random_state() -> Iterator[None]:
    state = torch.get_rng_state()
    torch.manual_seed(20_261_130)
    torch.rand(100)
    try:
        yield
    finally:
        torch.set_rng_state(state)


CONTROLS = (
    Control(
        id="C40",
        title="blocks from the other end",
        plant=lambda: attribute(BlockPool, "__init__", make=_from_the_other_end),
    ),
    Control(
        id="C41",
        title="slots from the other end",
        plant=lambda: attribute(SlotPool, "__init__", make=_from_the_other_end),
    ),
    Control(
        id="C42",
        title="decode rows in the other order",
        plant=lambda: attribute(Scheduler, "schedule", make=_decodes_turned),
    ),
    Control(
        id="C43",
        title="shorter prefill pieces",
        plant=lambda: attribute(ChunkRules, "stop", make=_shorter_pieces),
    ),
    Control(
        id="C44",
        title="states kept further apart",
        plant=lambda: attribute(ChunkRules, "next_spaced", make=_states_further_apart),
    ),
    Control(
        id="C45",
        title="the oldest snapshot goes first",
        plant=lambda: attribute(SnapshotPool, "_value", make=_oldest_goes),
    ),
    Control(
        id="C46",
        title="sampling settings made anew in every step",
        plant=lambda: attribute(Sampler, "_settings_of", make=_made_anew),
    ),
    Control(
        id="C47",
        title="block tables filled anew in every step",
        plant=lambda: attribute(BatchBuilder, "build", make=_filled_anew),
    ),
    Control(
        id="C48",
        title="longer names for encoded pictures",
        plant=lambda: attribute(encoder, "_name", make=_longer_name),
    ),
    Control(
        id="C49",
        title="another version of prefix keys",
        plant=lambda: value(prefix, "_FORMAT", b"oxplow-prefix-of-a-control"),
    ),
    Control(
        id="C50",
        title="states copied twice",
        plant=lambda: attribute(StateStore, "copy_slot", make=_through_a_copy),
    ),
    Control(
        id="C51",
        title="every step is logged",
        plant=lambda: attribute(EngineCore, "step", make=_with_log),
    ),
    Control(
        id="C52",
        title="a flag that nobody reads",
        plant=lambda: _new_name(),
    ),
    Control(id="C53", title="a thread of another name", plant=_another_name),
    Control(id="C54", title="a thread that does nothing", plant=_idle_thread),
    Control(id="C55", title="another random state of torch", plant=_other_random_state),
    Control(
        id="C56",
        title="token ids copied once more",
        plant=lambda: attribute(_batch_module(), "_token_ids", make=_rows_listed),
    ),
    Control(
        id="C57",
        title="every step is logged",
        plant=lambda: attribute(EngineCore, "step", make=_with_log),
        symptom="ttft",
    ),
    Control(
        id="C58",
        title="young objects collected in every step",
        plant=lambda: attribute(EngineCore, "step", make=_young_collected),
        symptom="itl",
    ),
    Control(id="C59", title="old objects frozen", plant=_collector_frozen, symptom="itl"),
    Control(id="C60", title="a thread that does nothing", plant=_idle_thread, symptom="throughput"),
)


def _batch_module() -> object:
    from oxplow.engine import batch

    return batch


@contextmanager
def _new_name() -> Iterator[None]:
    scheduler.NEW_FLAG = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del scheduler.NEW_FLAG  # type: ignore[attr-defined]
