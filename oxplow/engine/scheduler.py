"""Who computes what in the next step.

Owns the queue, the running set, admission, the division of the prefill budget and preemption.
Knows no tensor and no clock; state is moved through a `StateMover`.
Invariant: a step holds every running decode row it has blocks for and at most its budget of
prefill tokens; admitted prompts always find their blocks; the best-ranked running choice is never
preempted for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from oxplow.cache.blocks import SlotId
from oxplow.cache.manager import CacheManager, Hit
from oxplow.engine.budget import PrefillBudget
from oxplow.engine.chunks import ChunkRules
from oxplow.engine.options import MemoryOptions, SchedulerOptions
from oxplow.engine.pacing import Pacer
from oxplow.engine.request import Choice, Picture, RequestStatus
from oxplow.engine.steps import Scheduled, StepPlan


class StateMover(Protocol):
    """Moves state at the scheduler's word, before anything else may touch the memory."""

    def copy_slot(self, source: SlotId, target: SlotId) -> None:
        """Copy all slot components."""
        ...

    def clear_slot(self, slot: SlotId) -> None:
        """Empty a slot for a request that starts anew."""
        ...

    def save(self, choice: Choice) -> object | None:
        """Copy a running choice's state to the host; None where it should be recomputed."""
        ...

    def load(self, choice: Choice, saved: object) -> None:
        """Put saved state into the choice's new blocks and slot."""
        ...


class Scheduler:
    """One queue, one running set, one plan a step."""

    def __init__(
        self,
        cache: CacheManager,
        mover: StateMover,
        pacer: Pacer,
        options: SchedulerOptions,
        memory: MemoryOptions,
        is_resident: Callable[[Picture], bool] = lambda picture: picture.rows is not None,
    ) -> None:
        self.cache, self.pacer = cache, pacer
        self.options, self.memory = options, memory
        self._mover = mover
        self.rules = ChunkRules(
            cache.plan.block_size,
            memory,
            keeps_states=cache.reuses_prefixes,
            is_resident=is_resident,
        )
        self.waiting: list[Choice] = []
        self.running: list[Choice] = []
        self.num_preemptions = 0
        self._last_victim: Choice | None = None
        self._shallowest = 0  # context of the prefill that reads least, in this step

    @property
    def has_work(self) -> bool:
        """Tell whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, choice: Choice, now: float) -> None:
        """Queue a choice; its deadline grows with what it will have to compute."""
        hit = self._lookup(choice)
        choice.expected_tokens = choice.pending_tokens - hit.tokens
        choice.arrival = now
        choice.deadline = now + self.options.deadline_token_s * choice.expected_tokens
        self.waiting.append(choice)

    def remove(self, choice: Choice) -> None:
        """Forget a choice wherever it stands and free what it holds."""
        if choice in self.running:
            self.running.remove(choice)
            self.cache.release(choice.owner)
        elif choice in self.waiting:
            self.waiting.remove(choice)
        choice.saved = None
        if self._last_victim is choice:
            self._last_victim = None

    def pending_prefill_s(self) -> float:
        """Return how long the prompts that wait or run will take, beside nothing else."""
        left = [*self.waiting, *(c for c in self.running if not c.is_decoding)]
        seconds = self.pacer.model.token_seconds
        return sum(
            c.pending_tokens * seconds((c.computed_tokens + len(c.token_ids)) / 2) for c in left
        )

    def schedule(self) -> StepPlan:
        """Choose the rows of the next step, admitting and preempting as needed."""
        plan = StepPlan()
        for choice in sorted((c for c in self.running if c.is_decoding), key=_rank):
            if choice.status is not RequestStatus.RUNNING:
                continue  # lost its memory to a better one a moment ago
            if self._make_room(choice, choice.computed_tokens + 1, plan):
                plan.rows.append(_row(choice, choice.computed_tokens + 1))
        self._schedule_prefill(plan)
        plan.rows.sort(key=lambda row: not row.is_decode)
        return plan

    def wanted_pictures(self) -> Iterable[tuple[Choice, Picture]]:
        """Yield each running prefill with the picture that it needs next, best-ranked first."""
        for choice in sorted((c for c in self.running if not c.is_decoding), key=_rank):
            for picture in choice.request.pictures:
                if picture.span.end > choice.computed_tokens:
                    yield choice, picture
                    break

    # Prefill.

    def _schedule_prefill(self, plan: StepPlan) -> None:
        partial = [c for c in self.running if not c.is_decoding]
        candidates = sorted([*partial, *self.waiting], key=_rank)
        if not candidates:
            return
        self._shallowest = min(_context(c) for c in candidates)
        total = self.pacer.budget(plan.decode_rows, self._shallowest)
        holders = self._floor_holders(candidates)
        floor = min(self.cache.plan.block_size, max(1, total // max(1, len(holders))))
        budget = PrefillBudget(
            total,
            share=self.options.short_share,
            shorts=[self._is_short(c) for c in candidates],
            floors=[floor * (c.owner in holders) for c in candidates],
        )
        is_queue_open = True
        for choice in candidates:
            short = self._is_short(choice)
            own = floor * (choice.owner in holders)
            budget.begin_turn(own, is_short=short)
            if choice in plan.preempted:
                continue  # lost its memory in this very step
            if choice.status is RequestStatus.WAITING or choice.status is RequestStatus.PREEMPTED:
                if not is_queue_open or not self._may_start(choice, budget, own, plan):
                    continue
                is_queue_open = self._admit(choice, plan)
                if not is_queue_open:
                    continue
            if choice.is_decoding:  # came back with all its state
                if self._make_room(choice, choice.computed_tokens + 1, plan):
                    plan.rows.append(_row(choice, choice.computed_tokens + 1))
                continue
            weight = self._weight(choice)
            given = budget.grant(choice.pending_tokens, own, is_short=short, weight=weight)
            budget.spend(self._extend(choice, given, plan), is_short=short, weight=weight)

    def _extend(self, choice: Choice, given: int, plan: StepPlan) -> int:
        """Schedule up to `given` prompt tokens of a running choice; return how many."""
        stop = self.rules.stop(choice, choice.computed_tokens + given)
        if stop <= choice.computed_tokens:
            return 0  # a picture is not encoded yet
        if not self._make_room(choice, stop, plan):
            return 0
        plan.rows.append(_row(choice, stop))
        return stop - choice.computed_tokens

    def _floor_holders(self, candidates: list[Choice]) -> set[str]:
        """Name the prefills that get a block or more: those in progress, then the next ones."""
        holders = [c for c in candidates if c.status is RequestStatus.RUNNING]
        for choice in candidates:
            if choice not in holders and self._has_place(choice, holders):
                holders.append(choice)
        return {c.owner for c in holders}

    def _has_place(self, choice: Choice, unfinished: list[Choice]) -> bool:
        """Tell whether one more unfinished prefill is allowed beside `unfinished`.

        Neither short nor long prompts may take the last place from the other kind.
        """
        most = self.options.max_partial
        alike = sum(self._is_short(c) == self._is_short(choice) for c in unfinished)
        return len(unfinished) < most and alike < max(1, most - 1)

    def _may_start(self, choice: Choice, budget: PrefillBudget, floor: int, plan: StepPlan) -> bool:
        """Tell whether a waiting choice may begin: it finishes in this step, or has a place."""
        short, weight = self._is_short(choice), self._weight(choice)
        given = budget.grant(choice.expected_tokens, floor, is_short=short, weight=weight)
        if given <= 0 or _waits_for_leader(choice):
            return False
        stops = {row.choice.owner: row.stop for row in plan.rows}
        block = self.cache.plan.block_size
        unfinished = [
            c
            for c in self.running
            if len(c.token_ids) - stops.get(c.owner, c.computed_tokens) > block
        ]
        return given >= choice.expected_tokens or self._has_place(choice, unfinished)

    def _weight(self, choice: Choice) -> float:
        """Return what a token of this prompt costs, in tokens of the one with least context."""
        return self.pacer.weight(_context(choice), self._shallowest)

    def _is_short(self, choice: Choice) -> bool:
        return choice.expected_tokens <= self.options.short_tokens

    # Memory.

    def reserve_tokens(self, choice: Choice) -> int:
        """Return for how many tokens an admission promises blocks."""
        known = len(choice.token_ids)
        answer = int((choice.max_len - 1 - known) * self.memory.output_share)
        return known + max(0, min(answer, self.memory.max_reserve_tokens))

    def _admit(self, choice: Choice, plan: StepPlan) -> bool:
        """Give a waiting choice its memory; False where there is none yet."""
        hit = self._lookup(choice)
        while not self.cache.fits(hit, self.reserve_tokens(choice)):
            victim = self._victim(choice, below=choice.request.priority)
            if victim is None or not self._could_yield(choice, hit):
                return False
            self._preempt(victim, plan)
            hit = self._lookup(choice)
        holding = self.cache.admit(choice.owner, hit, self.reserve_tokens(choice))
        self.waiting.remove(choice)
        self.running.append(choice)
        choice.move(RequestStatus.RUNNING)
        plan.admitted.append(choice)
        if choice.saved is not None:
            if not self.cache.grow(choice.owner, choice.computed_tokens):
                raise AssertionError(f"{choice.owner}: no room for what was reserved")
            self._mover.load(choice, choice.saved)
            choice.saved = None
            return True
        if choice.cached_tokens is None:
            choice.cached_tokens, choice.miss = hit.tokens, hit.miss.value
            self.cache.count(hit, choice.prompt_len)
        if hit.snapshot is not None:
            self._mover.copy_slot(hit.snapshot.slot, holding.slot)
        else:
            self._mover.clear_slot(holding.slot)
        choice.computed_tokens = hit.tokens
        choice.expected_tokens = choice.pending_tokens
        choice.branch_position = hit.matched_tokens if hit.matched_tokens > hit.tokens else 0
        return True

    def _lookup(self, choice: Choice) -> Hit:
        allowed = choice.request.reuse_prefix and not choice.wants_prompt_logprobs
        allowed = allowed and choice.saved is None
        choice.chain.extend(choice.token_ids)
        return self.cache.lookup(choice.chain, len(choice.token_ids), allowed=allowed)

    def _make_room(self, choice: Choice, num_tokens: int, plan: StepPlan) -> bool:
        """Grow a running choice, preempting worse ones; False where it was itself the worst."""
        while not self.cache.grow(choice.owner, num_tokens):
            victim = self._victim(choice)
            if victim is None:
                self._preempt(choice, plan)
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, choice: Choice, below: int | None = None) -> Choice | None:
        """Return the running choice to preempt for `choice`: worse-ranked, latest, shortest.

        `below` asks for a strictly less urgent priority. One that was preempted last, and one that
        gained nothing since, are spared while others are there.
        """
        worse = [c for c in self.running if c is not choice and _rank(c) > _rank(choice)]
        if below is not None:
            worse = [c for c in worse if c.request.priority > below]
        fresh = [
            c
            for c in worse
            if c is not self._last_victim and len(c.token_ids) > c.last_preempted_len
        ]
        if below is not None:
            worse = fresh  # never take turns over a mere wish
        pool = fresh or worse
        return max(
            pool, key=lambda c: (c.request.priority, c.arrival, -c.computed_tokens), default=None
        )

    def _could_yield(self, choice: Choice, hit: Hit) -> bool:
        """Tell whether all less urgent choices together hold enough for `choice`."""
        freed = 0
        for other in self.running:
            if other.request.priority > choice.request.priority:
                holding = self.cache.holdings[other.owner]
                single = sum(self.cache.blocks.references(b) == 1 for b in holding.block_ids)
                freed += single + holding.promised
        return freed >= self.cache.missing_blocks(hit, self.reserve_tokens(choice))

    def _preempt(self, choice: Choice, plan: StepPlan) -> None:
        plan.rows[:] = [row for row in plan.rows if row.choice is not choice]
        choice.saved = self._mover.save(choice)
        self.cache.release(choice.owner)
        self.running.remove(choice)
        self.waiting.append(choice)
        choice.move(RequestStatus.PREEMPTED)
        if choice.saved is None:
            choice.computed_tokens = 0
        choice.expected_tokens = choice.pending_tokens
        choice.num_preemptions += 1
        choice.last_preempted_len = len(choice.token_ids)
        self.num_preemptions += 1
        self._last_victim = choice
        plan.preempted.append(choice)


def _rank(choice: Choice) -> tuple[int, float, str, int]:
    return choice.sort_key


def _context(choice: Choice) -> int:
    """Return how many tokens a prefill has behind it, or will have when it starts."""
    if choice.status is RequestStatus.RUNNING:
        return choice.computed_tokens
    return len(choice.token_ids) - choice.expected_tokens


def _row(choice: Choice, stop: int) -> Scheduled:
    return Scheduled(choice, choice.computed_tokens, stop)


def _waits_for_leader(choice: Choice) -> bool:
    leader = choice.leader
    return (
        leader is not None
        and not leader.status.is_terminal
        and leader.computed_tokens < leader.prompt_len
        and leader.num_answered == 0
    )
