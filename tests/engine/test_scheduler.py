"""The scheduler under random loads, without a model: budgets, order, conservation, progress."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oxplow.cache.blocks import SlotId
from oxplow.cache.manager import CacheManager
from oxplow.cache.plan import CachePlan
from oxplow.cache.prefix import KeyChain, root_key
from oxplow.engine.options import MemoryOptions, SchedulerOptions
from oxplow.engine.pacing import Pacer
from oxplow.engine.request import (
    Choice,
    FinishReason,
    Request,
    RequestStatus,
    SamplingParams,
)
from oxplow.engine.scheduler import Scheduler
from oxplow.engine.steps import StepPlan

BLOCK = 4


class FakeMover:
    """Remembers which text each slot's state has seen, in place of tensors."""

    def __init__(self, cache: CacheManager, *, swaps: bool) -> None:
        self.cache, self.swaps = cache, swaps
        self.seen: dict[int, tuple[int, ...]] = {}

    def copy_slot(self, source: SlotId, target: SlotId) -> None:
        self.seen[target] = self.seen[source]

    def clear_slot(self, slot: SlotId) -> None:
        self.seen[slot] = ()

    def save(self, choice: Choice) -> object | None:
        if not self.swaps or choice.computed_tokens == 0:
            return None
        slot = self.cache.holdings[choice.owner].slot
        assert self.seen[slot] == tuple(choice.token_ids[: choice.computed_tokens])
        return self.seen[slot]

    def load(self, choice: Choice, saved: object) -> None:
        assert isinstance(saved, tuple)
        self.seen[self.cache.holdings[choice.owner].slot] = saved


class World:
    """A scheduler with a pretend model that produces token 1 for ever."""

    def __init__(
        self,
        *,
        blocks: int = 16,
        slots: int = 3,
        snapshots: int = 2,
        budget: int = 16,
        swaps: bool = False,
        output_share: float = 0.0,
        max_partial: int = 2,
        short_tokens: int = 8,
    ) -> None:
        plan = CachePlan(
            block_size=BLOCK,
            num_blocks=blocks,
            num_slots=slots,
            num_snapshots=snapshots,
            block_bytes=1,
            slot_bytes=1,
            max_model_len=blocks * BLOCK,
        )
        self.cache = CacheManager(plan)
        self.mover = FakeMover(self.cache, swaps=swaps)
        self.budget = budget
        options = SchedulerOptions(
            step_target_s=None,
            max_prefill_tokens=budget,
            max_partial=max_partial,
            short_tokens=short_tokens,
            deadline_token_s=1e-3,
        )
        memory = MemoryOptions(
            output_share=output_share, snapshot_tokens=2 * BLOCK, answer_snapshot_tokens=BLOCK
        )
        pacer = Pacer(target_s=None, block_size=BLOCK, max_tokens=budget)
        self.scheduler = Scheduler(self.cache, self.mover, pacer, options, memory)
        self.choices: list[Choice] = []
        self.now = 0.0
        self.names = 0

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0) -> Choice:
        self.names += 1
        self.now += 1e-6
        request = Request(
            request_id=f"{self.names:04d}",
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            priority=priority,
        )
        chain = KeyChain(root_key(revision="r", layout="l"), BLOCK)
        choice = Choice(request, 0, seed=0, max_len=len(prompt) + max_tokens, chain=chain)
        self.choices.append(choice)
        self.scheduler.add(choice, self.now)
        return choice

    def step(self) -> StepPlan:
        """Schedule, check the plan, and book it as the core would."""
        self.now += 1.0
        best = min([*self.scheduler.running, *self.scheduler.waiting], key=lambda c: c.sort_key)
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        assert best not in plan.preempted, "the best-ranked choice lost its memory"
        assert not set(plan.preempted) & set(plan.admitted), "in and out in one step"
        for row in plan.rows:
            choice = row.choice
            slot = self.cache.holdings[choice.owner].slot
            assert self.mover.seen[slot] == tuple(choice.token_ids[: row.start]), "wrong state"
            self.mover.seen[slot] = tuple(choice.token_ids[: row.stop])
            choice.computed_tokens = row.stop
            if not row.is_decode:
                choice.prefilled_tokens += row.num_tokens
            if row.reaches_end:
                choice.token_ids.append(1)
            choice.chain.extend(choice.token_ids)
            self.cache.publish(choice.owner, choice.chain, row.stop)
            kind = self.scheduler.rules.due_snapshot(choice)
            if kind is not None:
                copy = self.cache.snapshot(choice.owner, choice.chain, row.stop, kind)
                if copy is not None:
                    self.mover.copy_slot(*copy)
            if len(choice.token_ids) >= choice.max_len:
                self.end(choice, FinishReason.LENGTH)
        self.cache.check()
        return plan

    def end(self, choice: Choice, reason: FinishReason) -> None:
        self.scheduler.remove(choice)
        choice.move(reason.status)

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.prefill_tokens <= self.budget
        owners = [row.choice.owner for row in plan.rows]
        assert len(set(owners)) == len(owners)
        assert [row.is_decode for row in plan.rows] == sorted(
            (row.is_decode for row in plan.rows), reverse=True
        )
        for row in plan.rows:
            assert row.choice.status is RequestStatus.RUNNING
            assert row.start == row.choice.computed_tokens < row.stop
            assert row.stop <= len(row.choice.token_ids)
            held = self.cache.holdings[row.choice.owner].block_ids
            assert row.stop <= len(held) * BLOCK
        assert plan.rows or not self.scheduler.has_work, "a step without progress"

    def run(self, limit: int = 2000) -> int:
        """Step until all is done; return the number of steps."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go at random while steps run."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(swaps=False)

    @rule(
        length=st.integers(1, 40),
        answer=st.integers(1, 20),
        first=st.integers(0, 1),
        low=st.booleans(),
    )
    def add(self, length: int, answer: int, first: int, low: bool) -> None:
        self.world.add([first] * length, answer, priority=int(low))

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.world.scheduler.has_work:
                self.world.step()

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [c for c in self.world.choices if not c.status.is_terminal]
        self.world.end(data.draw(st.sampled_from(alive)), FinishReason.ABORTED)

    @invariant()
    def conserved(self) -> None:
        self.world.cache.check()

    def teardown(self) -> None:
        self.world.run()
        assert all(c.status.is_terminal for c in self.world.choices)
        for choice in self.world.choices:
            if choice.status is RequestStatus.FINISHED:
                assert len(choice.token_ids) == choice.max_len
        assert self.world.cache.blocks.num_available == 16
        assert self.world.cache.slots.num_available == 3


class SwappingMachine(SchedulerMachine):
    """The same with states that are swapped out and in."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(swaps=True)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=25)
TestSwappingScheduler = SwappingMachine.TestCase
TestSwappingScheduler.settings = settings(max_examples=60, stateful_step_count=25)


def test_decode_rows_go_on_beside_a_long_prompt() -> None:
    world = World(blocks=64, budget=8, snapshots=0)
    talker = world.add([0], 20)
    world.step()
    world.add([1] * 150, 1)
    answered = talker.num_answered
    for i in range(1, 11):
        plan = world.step()
        assert talker.num_answered == answered + i
        assert plan.decode_rows == 1
        assert plan.prefill_tokens == 8


def test_short_prompts_keep_their_share_beside_long_ones() -> None:
    world = World(blocks=128, slots=4, budget=16, max_partial=2, snapshots=0)
    world.add([0] * 200, 1)
    world.step()
    short = world.add([1] * 4, 1)
    world.step()
    assert short.status is RequestStatus.FINISHED


def test_a_stream_of_short_prompts_does_not_stop_a_long_one() -> None:
    world = World(blocks=128, slots=8, budget=16, snapshots=0)
    long = world.add([0] * 100, 1)
    for i in range(40):
        for _ in range(4):
            world.add([1] * 7, 1, priority=-1)
        before = long.computed_tokens
        world.step()
        if long.status is RequestStatus.FINISHED:
            return
        assert long.computed_tokens >= before + 4, f"step {i}"
    raise AssertionError("the long prompt starved")


def test_several_long_prompts_advance_together_and_leave_a_place_for_short_ones() -> None:
    world = World(blocks=256, slots=8, budget=32, max_partial=3, snapshots=0)
    longs = [world.add([0] * 100, 1) for _ in range(4)]
    world.step()
    running = [c for c in longs if c.status is RequestStatus.RUNNING]
    assert len(running) == 2
    assert all(c.computed_tokens > 0 for c in running)
    short = world.add([1] * 6, 1)
    world.step()
    assert short.status is RequestStatus.FINISHED


def test_many_small_prompts_share_one_step() -> None:
    world = World(blocks=64, slots=8, budget=32, max_partial=2, snapshots=0)
    choices = [world.add([i] * 4, 2) for i in range(8)]
    world.step()
    assert all(c.num_answered == 1 for c in choices)


def test_a_shorter_prompt_overtakes_one_that_came_little_earlier() -> None:
    world = World(blocks=256, slots=1, budget=16)
    long = world.add([0] * 100, 1)
    short = world.add([1] * 4, 1)
    plan = world.step()
    assert [row.choice for row in plan.rows] == [short]
    assert long.status is RequestStatus.WAITING


def test_priority_goes_before_age_and_may_preempt() -> None:
    world = World(blocks=16, slots=1)
    low = world.add([0] * 4, 30, priority=5)
    world.step()
    high = world.add([1] * 4, 2, priority=1)
    plan = world.step()
    assert plan.preempted == [low]
    assert [row.choice for row in plan.rows] == [high]
    world.run()
    assert low.num_answered == 30


def test_equal_priority_never_preempts_for_admission() -> None:
    world = World(blocks=16, slots=1)
    first = world.add([0] * 4, 10)
    world.step()
    world.add([1] * 4, 2)
    while first.status is not RequestStatus.FINISHED:
        assert not world.step().preempted


def test_growing_answers_preempt_the_latest_and_all_finish() -> None:
    world = World(blocks=12, slots=3, snapshots=2)
    choices = [world.add([i] * 8, 30) for i in range(3)]
    world.run()
    assert world.scheduler.num_preemptions > 0
    assert all(c.num_answered == 30 for c in choices)
    assert choices[0].num_preemptions == 0, "the first one is never the victim"
    for choice in choices:
        assert choice.prefilled_tokens <= 3 * (8 + 30)


def test_a_late_one_that_grows_gives_way_to_an_early_one() -> None:
    world = World(blocks=7, slots=2, snapshots=0)
    early, late = world.add([0] * 4, 20), world.add([1] * 7, 20)
    world.run()
    assert late.num_preemptions > 0
    assert early.num_preemptions == 0


def test_a_full_reserve_prevents_preemption() -> None:
    world = World(blocks=12, slots=3, output_share=1.0)
    choices = [world.add([i] * 8, 30) for i in range(3)]
    world.run()
    assert world.scheduler.num_preemptions == 0
    assert all(c.num_answered == 30 for c in choices)


@given(
    loads=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8),
    share=st.sampled_from([0.0, 0.25, 1.0]),
    swaps=st.booleans(),
    budget=st.integers(1, 40),
)
def test_whatever_fits_alone_finishes_in_company(
    loads: list[tuple[int, int]], share: float, swaps: bool, budget: int
) -> None:
    world = World(blocks=16, slots=3, budget=budget, swaps=swaps, output_share=share)
    for i, (length, answer) in enumerate(loads):
        if length + answer <= 64:
            world.add([i] * length, answer)
    total = sum(c.max_len for c in world.choices)
    world.run(limit=100 + 4 * total)
    assert all(c.status is RequestStatus.FINISHED for c in world.choices)


def test_a_cancelled_queue_leaves_nothing_behind() -> None:
    world = World(blocks=16, slots=2)
    choices = [world.add([i % 3] * 9, 4) for i in range(30)]
    world.step()
    for choice in choices:
        if not choice.status.is_terminal:
            world.end(choice, FinishReason.ABORTED)
            world.cache.check()
    assert world.cache.blocks.num_held == 0
    assert world.cache.slots.num_held == 0
    assert not world.scheduler.has_work
