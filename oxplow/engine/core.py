"""The engine: takes requests in, runs steps, and says what came of it.

Owns the life of every accepted request, from validation to its one terminal event. Knows no text,
no HTTP and no process; it is called from one thread.
Invariant: an accepted request ends in exactly one of finished, aborted, failed; a step runs one
forward pass for all rows; what a request held is free when its end is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from secrets import randbits

from oxplow.cache.manager import CacheManager
from oxplow.cache.plan import CachePlan
from oxplow.cache.prefix import PictureSpan
from oxplow.engine.admission import check_request, max_len_of
from oxplow.engine.book import RequestBook
from oxplow.engine.encoder import EncoderCache
from oxplow.engine.events import Event
from oxplow.engine.handover import HandOver
from oxplow.engine.manifest import Manifest
from oxplow.engine.options import EngineOptions
from oxplow.engine.pacing import Pacer
from oxplow.engine.request import (
    Choice,
    FinishReason,
    Picture,
    Request,
    RequestStatus,
    choice_seed,
)
from oxplow.engine.runner import ModelRunner
from oxplow.engine.sampling import Drawn, TokenLogprob
from oxplow.engine.scheduler import Scheduler
from oxplow.engine.stats import Counters, EngineStats
from oxplow.engine.steps import Scheduled, StepPlan
from oxplow.errors import CapacityError, RequestError, TransferError
from oxplow.model.network import HybridModel
from oxplow.ops.table import OpTable
from oxplow.trace import EventRing, EventType, Lane

_log = logging.getLogger(__name__)


class EngineCore:
    """One model, one cache, one scheduler."""

    def __init__(
        self,
        model: HybridModel,
        ops: OpTable,
        plan: CachePlan,
        options: EngineOptions | None = None,
        *,
        revision: str,
        ring: EventRing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate everything; `revision` names the weights by content, for prefix keys."""
        self.options = options or EngineOptions()
        self.plan, self.model, self.ring = plan, model, ring or EventRing(0)
        self._clock = clock
        self.cache = CacheManager(plan, self.ring)
        self.encoder = EncoderCache(
            model.begin_encoding,
            hidden=model.spec.text.hidden,
            max_tokens=self.options.encoder_tokens,
            ring=self.ring,
            clock=clock,
        )
        self.runner = ModelRunner(model, ops, plan, self.encoder.rows)
        memory = self.options.memory
        self.handover = HandOver(
            self.runner.state, self.cache, memory, revision=revision, ring=self.ring
        )
        schedule = self.options.scheduler
        self.pacer = Pacer(
            target_s=schedule.step_target_s,
            block_size=plan.block_size,
            max_tokens=schedule.max_prefill_tokens,
        )
        self.scheduler = Scheduler(
            self.cache,
            self.handover,
            self.pacer,
            schedule,
            memory,
            is_resident=self.encoder.is_resident,
        )
        self.counters = Counters()
        self.book = RequestBook(self.counters, self.ring)
        self._stalled_steps = 0

    @property
    def has_work(self) -> bool:
        """Tell whether a call of `step` would do or tell anything."""
        return self.book.has_news

    # Requests in.

    def add(self, request: Request) -> None:
        """Accept a request, or raise RequestError or CapacityError and change nothing."""
        if self.book.is_live(request.request_id):
            raise RequestError(
                "this request id is in use", got=request.request_id, code="duplicate_id"
            )
        check_request(request, self.model.spec.text.vocab_size, self.plan.max_model_len)
        self.encoder.refuse_impossible(request.pictures)
        self._check_queue(len(request.prompt_ids))
        seed = randbits(63) if request.params.seed is None else request.params.seed
        choices = [self._choice(request, i, seed) for i in range(request.params.n)]
        for choice in choices[1:]:
            choice.leader = choices[0]
        self._accept(request, choices)

    def adopt(self, manifest: Manifest, request_id: str | None = None) -> str | None:
        """Take a manifest in: a request goes on under its (or another) id, a prefix is kept.

        Returns the request's id, None for a prefix. Raises TransferError, RequestError or
        CapacityError and changes nothing.
        """
        self.handover.verify(manifest)
        part = manifest.request
        if part is None:
            self.handover.adopt_prefix(manifest)
            return None
        name = request_id or part.request_id
        if self.book.is_live(name):
            raise RequestError("this request id is in use", got=name, code="duplicate_id")
        if part.max_len > self.plan.max_model_len:
            raise CapacityError(
                "the adopted request may grow too long",
                got=part.max_len,
                wanted=self.plan.max_model_len,
            )
        if any(p.end > manifest.computed_tokens for p in manifest.pictures):
            raise TransferError("the adopted request still needs the pixels of a picture")
        self._check_queue(0)
        request = Request(
            request_id=name,
            prompt_ids=manifest.token_ids[: part.prompt_len],
            params=part.params.single(),
            pictures=tuple(Picture(span=p) for p in manifest.pictures),
            priority=part.priority,
            salt=manifest.salt,
        )
        chain = self.handover.chain(request.salt, manifest.pictures)
        choice = Choice(request, 0, seed=part.seed, max_len=part.max_len, chain=chain)
        choice.token_ids = list(manifest.token_ids)
        choice.computed_tokens = choice.cached_tokens = manifest.computed_tokens
        choice.saved = manifest
        self._accept(request, [choice])
        return name

    def abort(self, request_id: str) -> bool:
        """End a request now and free what it holds; False where it has ended already."""
        return self._end_all(request_id, FinishReason.ABORTED)

    def stop(self, request_id: str, choice: int) -> bool:
        """End one choice as finished: the front saw a stop text. False where it has ended."""
        live = self.book.choices(request_id)
        if choice >= len(live) or live[choice].status.is_terminal:
            return False
        known = live[choice]
        waits = known.status is RequestStatus.WAITING
        self._end(known, FinishReason.ABORTED if waits else FinishReason.STOP)
        return True

    # State out.

    def export(self, request_id: str, choice: int = 0) -> Manifest:
        """Copy a request's state, sealed; it goes on here until the caller aborts it."""
        live = self.book.choices(request_id)
        if choice >= len(live):
            raise TransferError("no such choice is running", got=f"{request_id}#{choice}")
        return self.handover.export(live[choice]).sealed()

    def export_prefix(
        self, token_ids: Sequence[int], *, salt: str = "", pictures: Sequence[PictureSpan] = ()
    ) -> Manifest:
        """Copy the longest cached prefix of a text, sealed, for `adopt` here or elsewhere."""
        return self.handover.export_prefix(token_ids, salt, pictures).sealed()

    # Steps.

    def step(self) -> list[Event]:
        """Run one step and return everything that happened since the last call."""
        if self.scheduler.has_work:
            self._expire()
            encoded_s = self._encode()
            self.pacer.charge(encoded_s)
            plan = self.scheduler.schedule()
            self._tell_plan(plan)
            if plan.rows:
                self._run(plan)
            self._watch_progress(plan, encoded_s > 0)
        return self.book.drain()

    def predicted_wait_s(self) -> float:
        """Return how long a request that came now would wait for the prompts before it."""
        return self.scheduler.pending_prefill_s()

    def predicted_step_s(self) -> float:
        """Return how long the next step should take."""
        decodes = sum(c.is_decoding for c in self.scheduler.running)
        waits = bool(self.scheduler.waiting) or decodes < len(self.scheduler.running)
        prefill = self.pacer.budget(decodes) if waits else 0
        planned = self.pacer.target_s if self.encoder.num_open else None
        return self.pacer.model.predict(decodes, prefill) + (planned or 0.0)

    def stats(self) -> EngineStats:
        """Return the gauges and counters of this moment."""
        return EngineStats.read(self.counters, self.cache, self.scheduler, self.handover)

    def _run(self, plan: StepPlan) -> None:
        began = self._clock()
        decodes, prefill = plan.decode_rows, plan.prefill_tokens
        span = self.ring.begin(
            EventType.ENGINE_STEP,
            Lane.STEP,
            step=self.counters.steps,
            detail={"decode_rows": decodes, "prefill_tokens": prefill},
        )
        results = self.runner.run(plan, self.cache.holdings)
        for row, drawn in zip(plan.rows, results, strict=True):
            if all(d.is_finite for d in drawn):
                self._advance(row, drawn)
            else:
                self._poisoned(row)
        self.ring.end(span)
        self.counters.steps += 1
        self.counters.prefill_tokens += prefill
        self.pacer.observe(decodes, prefill, self._clock() - began, plan.prefill_pairs)

    def _advance(self, row: Scheduled, drawn: list[Drawn]) -> None:
        """Book a good row: tokens in the caches, content findable, a token out."""
        choice = row.choice
        choice.computed_tokens = row.stop
        if not row.is_decode:
            choice.prefilled_tokens += row.num_tokens
        token = drawn[-1].token_id
        if token is not None:
            choice.token_ids.append(token)
        choice.chain.extend(choice.token_ids)
        self.cache.publish(choice.owner, choice.chain, row.stop)
        kind = self.scheduler.rules.due_snapshot(choice)
        if kind is not None:
            copy = self.cache.snapshot(choice.owner, choice.chain, row.stop, kind)
            if copy is not None:
                self.runner.state.copy_slot(*copy)
        self.book.note_prompt(row, drawn)
        if token is not None:
            logprob = drawn[-1].logprob
            self._emit_token(choice, token, logprob)
        elif drawn[-1].is_stuck:
            self._end(choice, FinishReason.FAILED, "the grammar allows no token here")
        elif row.reaches_end and choice.max_len == choice.prompt_len:
            self._end(choice, FinishReason.LENGTH)

    def _emit_token(self, choice: Choice, token: int, logprob: TokenLogprob | None) -> None:
        params = choice.request.params
        self.book.note_token(choice, token, logprob)
        if choice.mask is not None:
            choice.mask.advance(token)
        is_end = token in self.model.spec.eos_token_ids and not params.ignore_eos
        if is_end or token in params.stop_token_ids:
            self._end(choice, FinishReason.STOP, stop_token=token)
        elif choice.mask is not None and choice.mask.is_complete():
            self._end(choice, FinishReason.STOP)
        elif len(choice.token_ids) >= choice.max_len:
            self._end(choice, FinishReason.LENGTH)

    def _poisoned(self, row: Scheduled) -> None:
        """Fail one request whose logits are not finite, and wipe what it wrote."""
        choice = row.choice
        self.counters.poisoned += 1
        holding = self.cache.holdings[choice.owner]
        self.runner.state.wipe(self.cache.private_blocks(choice.owner), holding.slot)
        message = f"the model gave numbers that are not finite at token {row.stop}"
        _log.warning("request %s: %s", choice.owner, message)
        self._end(choice, FinishReason.FAILED, message)

    def _encode(self) -> float:
        """Work on pictures for their part of a step; return the seconds that it took."""
        wanted = list(self.scheduler.wanted_pictures())
        decodes = sum(c.is_decoding for c in self.scheduler.running)
        others = len(self.scheduler.running) + len(self.scheduler.waiting) - decodes - len(wanted)
        room = self.pacer.encoding_seconds(decodes, shared=others > 0)
        spent = self.encoder.encode_some((picture for _, picture in wanted), room)
        for choice, picture in wanted:
            failure = self.encoder.failures.get(picture.span.content_hash)
            if failure is not None and not choice.status.is_terminal:
                self._end(choice, FinishReason.FAILED, failure)
        self.encoder.failures.clear()
        return spent

    def _expire(self) -> None:
        limit = self.options.queue_timeout_s
        if limit is None:
            return
        now = self._clock()
        for choice in list(self.scheduler.waiting):
            if choice.status is RequestStatus.WAITING and now - choice.arrival > limit:
                self._end(choice, FinishReason.FAILED, f"waited longer than {limit} s in the queue")

    def _watch_progress(self, plan: StepPlan, encoded: bool) -> None:
        """Count steps that did nothing although there is work; give up on the head of the queue."""
        if plan.rows or encoded or not self.scheduler.has_work:
            self._stalled_steps = 0
            return
        self.counters.stalled_steps += 1
        self._stalled_steps += 1
        if self._stalled_steps < self.options.max_stalled_steps:
            return
        self._stalled_steps = 0
        head = min([*self.scheduler.running, *self.scheduler.waiting], key=lambda c: c.sort_key)
        self._end(head, FinishReason.FAILED, "the engine could not make room for this request")

    def _tell_plan(self, plan: StepPlan) -> None:
        step = self.counters.steps
        for kind, choices in (
            (EventType.REQUEST_PREEMPTED, plan.preempted),
            (EventType.REQUEST_SCHEDULED, plan.admitted),
        ):
            for choice in choices:
                detail = {"computed": choice.computed_tokens, "choice": choice.index}
                name = choice.request.request_id
                self.ring.instant(kind, Lane.REQUEST, request=name, step=step, detail=detail)

    def _choice(self, request: Request, index: int, seed: int) -> Choice:
        spans = [p.span for p in request.pictures]
        return Choice(
            request,
            index,
            seed=choice_seed(seed, index),
            max_len=max_len_of(request, self.plan.max_model_len),
            chain=self.handover.chain(request.salt, spans),
        )

    def _accept(self, request: Request, choices: list[Choice]) -> None:
        now = self._clock()
        self.book.open(request, choices)
        for choice in choices:
            self.scheduler.add(choice, now)

    def _check_queue(self, prompt_tokens: int) -> None:
        waiting = self.scheduler.waiting
        if len(waiting) >= self.options.max_waiting:
            raise CapacityError(
                "the queue is full",
                got=f"{len(waiting)} waiting",
                wanted=f"fewer than {self.options.max_waiting}",
                where="queue",
            )
        queued = sum(c.pending_tokens for c in waiting)
        if waiting and queued + prompt_tokens > self.options.max_waiting_tokens:
            raise CapacityError(
                "too many prompt tokens are queued",
                got=f"{queued} + {prompt_tokens}",
                wanted=f"at most {self.options.max_waiting_tokens}",
                where="queue",
            )

    def _end_all(self, request_id: str, reason: FinishReason) -> bool:
        live = self.book.choices(request_id)
        for choice in live:
            if not choice.status.is_terminal:
                self._end(choice, reason)
        return bool(live)

    def _end(
        self, choice: Choice, reason: FinishReason, message: str = "", stop_token: int | None = None
    ) -> None:
        """Free a choice, then tell its end."""
        self.scheduler.remove(choice)
        self.handover.drop(choice)
        self.runner.sampler.forget(choice.owner)
        self.book.end(choice, reason, message, stop_token)
