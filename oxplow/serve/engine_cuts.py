"""Cuts of a whole engine: the same requests served in ways that must not matter.

Owns the ways (chunk sizes, company, order, reuse, preemption, hand-over, strange neighbours) and
their comparison. Knows the engine as a library. Invariant: every way runs on fresh cores with
deterministic kernels, so tokens and their log-probabilities must be equal bit for bit; a way that
did not happen (no preemption, no hit) is invalid, not a pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from oxplow.engine.core import EngineCore
from oxplow.engine.manifest import Manifest
from oxplow.engine.request import Request, SamplingParams
from oxplow.errors import ContractError, OxplowError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.serve.workbench import BLOCK, Answered, Workbench, ask, run

__all__ = ["WAYS", "DeterministicBench", "way_finding"]

_LENGTHS = (5, 3 * BLOCK, 41, 2 * BLOCK + 1)
_TOKENS = 5

Answers = dict[str, Answered]


@dataclass(frozen=True, kw_only=True)
class DeterministicBench(Workbench):
    """A bench on kernels whose bits depend neither on the batch nor on the split."""

    invariant: bool = True

    @cached_property
    def plain(self) -> Answers:
        """Each request alone in a core of its own, in one piece, nothing reused."""
        answers: Answers = {}
        for request in requests_of(self):
            core = self.core(budget=256)
            answers |= run(core, [replace(request, reuse_prefix=False)])
        return answers


class _DidNotHappenError(Exception):
    """The way was not taken, so its answers say nothing."""


def requests_of(bench: Workbench) -> list[Request]:
    """Return the requests that every way serves: unlike lengths, two of them sampled."""
    made = []
    for i, length in enumerate(_LENGTHS):
        params = SamplingParams(
            temperature=0.0 if i % 2 else 0.8,
            seed=i,
            max_tokens=_TOKENS,
            ignore_eos=True,
            logprobs=0,
        )
        made.append(ask(f"r{i}", bench.prompt(length, i), params=params))
    return made


def way_finding(name: str, bench: DeterministicBench, repro: str) -> Finding:
    """Serve in one way of WAYS and compare with each request alone."""
    began = time.perf_counter()
    base = Finding(
        probe=f"way:{name}",
        verdict=Verdict.PASS,
        summary="tokens and log-probabilities are equal bit for bit",
        excitation={"way": name, "prompts": _LENGTHS, "block": BLOCK, "seed": bench.seed},
        repro=repro,
    )
    way = WAYS[name]
    locus = Locus(component=way.component, op=way.op, parameter=name)
    try:
        got = way.serve(bench)
    except _DidNotHappenError as reason:
        return replace(base, verdict=Verdict.INVALID, summary=str(reason))
    except OxplowError as error:
        return replace(
            base, verdict=Verdict.FAIL, locus=locus, summary=f"{type(error).__name__}: {error}"
        )
    wrong = [told for n, mine in got.items() if (told := _difference(n, mine, bench.plain[n]))]
    effect = Effect(name="requests that differ", value=float(len(wrong)), unit="requests",
                    bound=0.0, n=len(got))  # fmt: skip
    base = replace(base, effect=effect, cost_s=time.perf_counter() - began)
    if not wrong:
        return base
    return replace(base, verdict=Verdict.FAIL, locus=locus, summary=wrong[0])


def _difference(name: str, mine: Answered, plain: Answered) -> str:
    if mine.message:
        return f"{name} failed: {mine.message}"
    for place, (a, b) in enumerate(zip(mine.token_ids, plain.token_ids, strict=False)):
        if a != b:
            return f"{name}: token {place} is {a}, alone it is {b}"
    for place, (x, y) in enumerate(zip(mine.logprobs, plain.logprobs, strict=False)):
        if x != y:  # bits: both are float32 values of the same kernels
            return f"{name}: log-probability {place} is {x!r}, alone it is {y!r}"
    if len(mine.token_ids) != len(plain.token_ids):
        return f"{name}: {len(mine.token_ids)} tokens, alone {len(plain.token_ids)}"
    return ""


# The ways.


def _chunks(budget: int) -> Callable[[DeterministicBench], Answers]:
    def serve(bench: DeterministicBench) -> Answers:
        answers: Answers = {}
        for request in requests_of(bench):
            answers |= run(bench.core(budget=budget), [replace(request, reuse_prefix=False)])
        return answers

    return serve


def _company(bench: DeterministicBench) -> Answers:
    return run(bench.core(budget=48), requests_of(bench))


def _other_order(bench: DeterministicBench) -> Answers:
    return run(bench.core(budget=48), requests_of(bench)[::-1])


def _strange_neighbour(bench: DeterministicBench) -> Answers:
    """A neighbour of extreme settings comes, is aborted and leaves its slot and blocks behind."""
    core = bench.core(slots=5)
    odd = SamplingParams(
        temperature=2.0, top_k=1, repetition_penalty=1.9, seed=99, max_tokens=30, ignore_eos=True
    )
    core.add(ask("strange", [0] * 50, params=odd))
    steps = 0

    def leave(events: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            core.abort("strange")

    got = run(core, requests_of(bench), after_step=leave)
    return {name: told for name, told in got.items() if name != "strange"}


def _cached(bench: DeterministicBench) -> Answers:
    core = bench.core()
    run(core, [replace(r, request_id=f"first-{r.request_id}") for r in requests_of(bench)])
    got = run(core, requests_of(bench))
    if not any(told.cached_tokens for told in got.values()):
        raise _DidNotHappenError("no request found a cached prefix")
    return got


def _branches(bench: DeterministicBench) -> Answers:
    """Longer texts that share a prompt's start are served first, so that it is found inside."""
    core = bench.core(blocks=256, snapshots=24)
    first = [
        replace(r, request_id=f"long-{r.request_id}", prompt_ids=[*r.prompt_ids, *range(40)])
        for r in requests_of(bench)
    ]
    run(core, first)
    got = run(core, requests_of(bench))
    if not any(told.cached_tokens for told in got.values()):
        raise _DidNotHappenError("no request found a shared start")
    return got


def _preempted(bench: DeterministicBench) -> Answers:
    """An urgent request takes the only places while others decode; they resume later."""
    core = bench.core(slots=2, blocks=12, snapshots=1)
    urgent = [ask(f"urgent{i}", bench.prompt(60, 50 + i), 4, priority=-1) for i in range(2)]
    steps = 0

    def press(events: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            for request in urgent:
                core.add(request)

    got = run(core, requests_of(bench), after_step=press)
    if not core.stats().preemptions:
        raise _DidNotHappenError("nobody was preempted")
    return {name: told for name, told in got.items() if not name.startswith("urgent")}


def _restarted(bench: DeterministicBench) -> Answers:
    """Every request is exported in mid-answer and goes on in another core."""
    answers: Answers = {}
    for request in requests_of(bench):
        source = bench.core(budget=48)
        taken: list[tuple[Manifest, int]] = []
        part = _until(source, request, taken)
        manifest, done = taken[0]
        target = bench.core(blocks=96, slots=3)
        target.adopt(_copied(manifest))
        rest = run(target, [])[request.request_id]
        rest.token_ids = part.token_ids[:done] + rest.token_ids
        rest.logprobs = part.logprobs[:done] + rest.logprobs
        answers[request.request_id] = rest
    return answers


def _until(core: EngineCore, request: Request, taken: list[tuple[Manifest, int]]) -> Answered:
    """Serve to the end and take one manifest on the way, with the tokens that were out by then."""
    count = 0

    def take(events: object) -> None:
        nonlocal count
        if taken or not core.book.is_live(request.request_id):
            return
        manifest = core.export(request.request_id)
        count = len(manifest.token_ids) - len(request.prompt_ids)
        if count >= _TOKENS // 2:
            taken.append((manifest, count))

    told = run(core, [request], after_step=take)[request.request_id]
    if not taken:
        raise ContractError("no manifest was taken in mid-answer", got=request.request_id)
    return told


def _copied(manifest: Manifest) -> Manifest:
    """Return a manifest as another process would see it: equal content, other memory."""
    tensors = {name: value.clone() for name, value in manifest.tensors.items()}
    return replace(manifest, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to serve, and what is to blame where answers differ."""

    serve: Callable[[DeterministicBench], Answers]
    component: str
    op: str


WAYS: Mapping[str, Way] = {
    "chunks of 16": Way(serve=_chunks(16), component="engine.scheduler", op="chunks"),
    "chunks of 48": Way(serve=_chunks(48), component="engine.scheduler", op="chunks"),
    "in company": Way(serve=_company, component="engine.batch", op="build"),
    "other order": Way(serve=_other_order, component="engine.batch", op="build"),
    "strange neighbour": Way(serve=_strange_neighbour, component="engine.sampling", op="draw"),
    "cached": Way(serve=_cached, component="cache.prefix", op="lookup"),
    "branches": Way(serve=_branches, component="cache.prefix", op="snapshot"),
    "preempted": Way(serve=_preempted, component="engine.scheduler", op="preempt"),
    "restarted": Way(serve=_restarted, component="engine.handover", op="adopt"),
}
"""Every way by name."""
