"""Audits of what outlives a step: kept states, block counts, look-ups, progress and hand-over.

Owns the second opinions on the cache and on state that leaves a request. Knows the engine's public
parts and hooks them on one instance; it never changes what they do. Invariant: an audit names the
function whose answer broke the rule, and passes on any engine that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from oxplow.cache.manager import MissReason
from oxplow.engine.core import EngineCore
from oxplow.engine.manifest import Manifest
from oxplow.engine.request import Choice
from oxplow.errors import ContractError, OxplowError
from oxplow.feedback.finding import Locus
from oxplow.serve.workbench import BLOCK, Workbench, ask, run

__all__ = [
    "Wrong",
    "block_counts",
    "handover",
    "hook",
    "is_close",
    "kept_states",
    "lookups",
    "progress",
]

_CLOSE = 1e-3  # relative: states of two runs of one path differ in last bits at most
_HIT_SHARE = 0.8

Wrong: TypeAlias = tuple[Locus, str]
"""Where a rule was broken, and how."""


def hook(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Let `make(method)` stand for a method of one object."""
    setattr(owner, name, make(getattr(owner, name)))


def is_close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal up to a small share of the largest element."""
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= _CLOSE * scale).all())


# Kept states.


def kept_states(bench: Workbench, blocks: int = 5) -> list[Wrong]:
    """The state kept for a prompt's prefix, against a recomputation that reuses nothing."""
    text = bench.prompt(blocks * BLOCK + 3)
    points: dict[int, Manifest] = {}
    plain = bench.core(budget=BLOCK)

    def keep(events: object) -> None:
        try:
            manifest = plain.export("plain")
        except OxplowError:  # it has ended
            return
        points.setdefault(manifest.computed_tokens, manifest)

    run(plain, [ask("plain", text, 2, reuse=False)], after_step=keep)
    core = bench.core(budget=BLOCK)
    run(core, [ask("first", text, 2)])
    wrong: list[Wrong] = []
    for length in (len(text), (blocks - 2) * BLOCK + 2):
        try:
            kept = core.export_prefix(text[:length])
        except OxplowError:
            continue  # nothing is kept: the look-up's audit judges that
        wrong += _wrong_state(core, kept, points)
    return wrong


def _wrong_state(core: EngineCore, kept: Manifest, points: Mapping[int, Manifest]) -> list[Wrong]:
    tokens = kept.computed_tokens
    truth = points.get(tokens)
    if truth is None:
        raise ContractError("the plain run has no state there", got=tokens, wanted=sorted(points))
    slots = [e.key for e in kept.components if e.per == "slot"]
    blocks = [e.key for e in kept.components if e.per != "slot"]
    bad = [k for k in slots if not is_close(kept.tensors[k], truth.tensors[k])]
    if not bad:
        worse = [k for k in blocks if not is_close(kept.tensors[k], truth.tensors[k])]
        locus = Locus(component="cache.prefix", op="publish", parameter="block")
        return [(locus, f"cached blocks differ: {worse[0]}")] if worse else []
    for other, point in points.items():
        if other != tokens and all(is_close(kept.tensors[k], point.tensors[k]) for k in slots):
            locus = Locus(component="cache.prefix", op="snapshot", parameter="position")
            return [(locus, f"the state kept for {tokens} tokens is that of {other}")]
    locus = Locus(component="cache.prefix", op="snapshot", parameter="state")
    empty = all(not kept.tensors[k].any() for k in slots)
    what = "was never written" if empty else "is no state of this text"
    return [(locus, f"the state kept for {tokens} tokens {what}: {bad[0]}")]


# Blocks.


def block_counts(bench: Workbench) -> list[Wrong]:
    """Requests that share a prefix and end one after another, against a book of references."""
    core = bench.core(blocks=24, slots=3)
    pool = core.cache.blocks
    book: dict[int, int] = {}
    wrong: list[Wrong] = []

    def watch(name: str, note: Callable[[tuple[Any, ...], Any], None]) -> None:
        def hooked(method: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any) -> Any:
                args = tuple(list(a) if isinstance(a, Iterable) else a for a in args)
                result = method(*args)
                note(args, result)
                for block in range(pool.num_blocks):
                    have, want = pool.references(block), book.get(block, 0)  # type: ignore[arg-type]
                    if have != want:
                        locus = Locus(component="cache.blocks", op=name, parameter="references")
                        wrong.append((locus, f"block {block} has {want} holders, {have} counted"))
                        book[block] = have
                return result

            return watched

        hook(pool, name, hooked)

    def count(blocks: Iterable[int], by: int) -> None:
        for block in blocks:
            book[block] = book.get(block, 0) + by

    watch("take", lambda args, taken: count(taken, 1))
    watch("share", lambda args, _: count(args[0], 1))
    watch("release", lambda args, _: count(args[0], -1))
    head = bench.prompt(3 * BLOCK)
    steps = 0

    def later(events: object) -> None:
        nonlocal steps
        steps += 1
        if steps in (3, 5):
            core.add(ask(f"late{steps}", head + bench.prompt(5 * BLOCK, steps), 6))

    run(core, [ask("first", head + bench.prompt(20, 1), 6)], after_step=later)
    return wrong


# Look-ups.


def lookups(bench: Workbench) -> list[Wrong]:
    """A prompt served twice: the second time most of it must be found."""
    core = bench.core()
    text = bench.prompt(6 * BLOCK + 5)
    run(core, [ask("first", text, 2)])
    again = run(core, [ask("again", text, 2)])["again"]
    reachable = (len(text) - 1) // BLOCK * BLOCK
    if again.cached_tokens >= _HIT_SHARE * reachable:
        return []
    lost = "snapshot" if again.miss == MissReason.NO_SNAPSHOT.value else again.miss
    locus = Locus(component="cache.prefix", op="lookup", parameter=lost)
    told = f"{again.cached_tokens} of {reachable} tokens were found again; the reason: {again.miss}"
    return [(locus, told)]


# Progress.


def progress(bench: Workbench) -> list[Wrong]:
    """Prompts of lengths around a block, in a pool that holds them: each piece goes forward."""
    core = bench.core(budget=BLOCK + 8, slots=3)
    wrong: list[Wrong] = []

    def hooked(stop: Callable[[Choice, int], int]) -> Callable[[Choice, int], int]:
        def watched(choice: Choice, wanted: int) -> int:
            end = stop(choice, wanted)
            if wanted > choice.computed_tokens >= end and not choice.request.pictures:
                locus = Locus(component="engine.scheduler", op="stop", parameter="chunk")
                told = f"a piece of {wanted - choice.computed_tokens} tokens at"
                wrong.append((locus, f"{told} {choice.computed_tokens} is cut to nothing"))
            return end

        return watched

    hook(core.scheduler.rules, "stop", hooked)
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5, 3 * BLOCK)
    told = run(core, [ask(f"r{n}", bench.prompt(n, n), 3) for n in lengths])
    late = [name for name, answered in told.items() if len(answered.token_ids) != 3]
    if late and not wrong:
        locus = Locus(component="engine.scheduler", op="schedule", parameter="progress")
        wrong.append((locus, f"{', '.join(late)} got no whole answer: {told[late[0]].message}"))
    return wrong


# Hand-over.


def handover(bench: Workbench) -> list[Wrong]:
    """A request exported in the middle and adopted by another core goes on as it would have."""
    text, tokens = bench.prompt(2 * BLOCK + 7), 8
    source = bench.core()
    taken: list[Manifest] = []

    def keep(events: object) -> None:
        if not taken and source.book.is_live("one"):
            manifest = source.export("one")
            if len(manifest.token_ids) >= len(text) + tokens // 2:
                taken.append(manifest)

    whole = run(source, [ask("one", text, tokens)], after_step=keep)["one"].token_ids
    if not taken:
        locus = Locus(component="engine.core", op="step", parameter="progress")
        return [(locus, f"the request ended after {len(whole)} of {tokens} tokens")]
    target = bench.core()
    target.adopt(taken[0])
    rest = run(target, [])["one"].token_ids
    done = len(taken[0].token_ids) - len(text)
    if whole[done:] == rest:
        return []
    locus = Locus(component="engine.handover", op="adopt", parameter="token_ids")
    return [(locus, f"the adopted request answers {rest}, the undisturbed one {whole[done:]}")]
