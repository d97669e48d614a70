"""Audits: parts of the engine that hold a rule, watched at work by an independent second opinion.

Owns one audit for each part: step tensors against the plain builder, sampling settings against the
rows' own, kept states against a recomputation, block counts against a shadow book, look-ups against
what was just served. Knows the engine's public parts and hooks them on one instance; it never
changes what they do. Invariant: an audit names the function whose answer broke the rule, and passes
on any engine that keeps it, however it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.cache.manager import Holding, MissReason
from oxplow.engine.batch import Batch, LogitRow
from oxplow.engine.core import EngineCore
from oxplow.engine.manifest import Manifest
from oxplow.engine.request import Picture, SamplingParams
from oxplow.engine.steps import StepPlan
from oxplow.errors import ContractError, OxplowError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.model.step import SequenceRows, build_step
from oxplow.serve.workbench import BLOCK, Workbench, ask, run

__all__ = ["AUDITS", "audit"]

_CLOSE = 1e-3  # relative: states of two runs of one path differ in last bits at most
_HIT_SHARE = 0.8

Wrong = tuple[Locus, str]
"""Where a rule was broken, and how."""


def audit(name: str, bench: Workbench, repro: str) -> Finding:
    """Run one audit of AUDITS and tell what it saw."""
    began = time.perf_counter()
    excitation = {"seed": bench.seed, "block": BLOCK, "audit": name}
    try:
        wrong = AUDITS[name](bench)
    except _NotHereError as reason:
        return Finding(
            probe=f"audit:{name}", verdict=Verdict.INVALID, summary=str(reason), repro=repro,
            excitation=excitation,
        )  # fmt: skip
    except OxplowError as error:
        told = f"the engine refused the work: {error}"
        wrong = [(Locus(component="engine.core", op="step", parameter="error"), told)]
    spent = time.perf_counter() - began
    effect = Effect(name="broken rules", value=float(len(wrong)), unit="rules", bound=0.0)
    if not wrong:
        return Finding(
            probe=f"audit:{name}", verdict=Verdict.PASS, summary="every rule was kept",
            effect=effect, excitation=excitation, repro=repro, cost_s=spent,
        )  # fmt: skip
    loci = tuple(dict.fromkeys(locus for locus, _ in wrong))
    return Finding(
        probe=f"audit:{name}", verdict=Verdict.FAIL, summary=wrong[0][1], locus=loci[0],
        effect=effect, excitation=excitation, repro=repro, cost_s=spent, suspects=loci[1:3],
    )  # fmt: skip


class _NotHereError(Exception):
    """The audit has nothing to look at on this model."""


def _hook(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Let `make(method)` stand for a method of one object."""
    setattr(owner, name, make(getattr(owner, name)))


# Step tensors.


def _step_tensors(bench: Workbench) -> list[Wrong]:
    """Text requests of unlike lengths in one core, against `build_step` on the same rows."""
    core = bench.core(budget=48)
    wrong = _watch_batches(core, {})
    lengths = (5, 70, 33, 18)
    run(core, [ask(f"r{i}", bench.prompt(n, i), 6) for i, n in enumerate(lengths)])
    return wrong


def _pictures(bench: Workbench) -> list[Wrong]:
    """Pictures of one size, side by side and in two requests, against a fresh encoding of each."""
    if not bench.takes_pictures:
        raise _NotHereError("this model takes no pictures")
    core = bench.core(budget=64)
    first = bench.picture(3, 1)
    second = bench.picture(first.span.end, 2)
    third = bench.picture(5, 3)
    fresh: dict[str, Tensor] = {}
    for picture in (first, second, third):
        work = bench.model.begin_encoding(
            torch.as_tensor(picture.pixel_values), torch.as_tensor(picture.grid_thw)
        )
        while work.rows is None:
            work.advance()
        fresh[picture.span.content_hash] = work.rows
    for name, picture in (("early", first), ("earlier", second)):  # kept: no piece waits for them
        run(core, [ask(name, bench.prompt(24, 5), 1, pictures=(picture,))])
    wrong = _watch_batches(core, fresh)
    run(
        core,
        [
            ask("two", bench.prompt(24, 1), 3, pictures=(first, second)),
            ask("one", bench.prompt(20, 2), 3, pictures=(third,)),
        ],
    )
    return wrong


def _watch_batches(core: EngineCore, fresh: Mapping[str, Tensor]) -> list[Wrong]:
    wrong: list[Wrong] = []

    def hooked(build: Callable[[StepPlan, Mapping[str, Holding]], Batch]) -> Callable[..., Batch]:
        def watched(plan: StepPlan, holdings: Mapping[str, Holding]) -> Batch:
            batch = build(plan, holdings)
            wrong.extend(_wrong_fields(plan, holdings, batch))
            wrong.extend(_wrong_embeds(core, plan, batch, fresh))
            return batch

        return watched

    _hook(core.runner.batches, "build", hooked)
    return wrong


def _wrong_fields(plan: StepPlan, holdings: Mapping[str, Holding], batch: Batch) -> Iterable[Wrong]:
    rows = [
        SequenceRows(
            token_ids=row.choice.token_ids[row.start : row.stop],
            computed_tokens=row.start,
            slot=int(holdings[row.choice.owner].slot),
            block_ids=[int(b) for b in holdings[row.choice.owner].block_ids],
        )
        for row in plan.rows
    ]
    wanted = build_step(rows, block_size=BLOCK, device=torch.device("cpu"))
    got = batch.step
    pairs: list[tuple[str, Tensor, Tensor]] = [
        ("token_ids", got.token_ids, wanted.token_ids),
        ("slot_mapping", got.slot_mapping, wanted.slot_mapping),
    ]
    for name in ("cu_seqlens", "computed_tokens", "state_slots", "has_state", "block_table"):
        ours, theirs = getattr(got.all_rows, name), getattr(wanted.all_rows, name)
        if name == "block_table":  # only as many columns as this step reaches
            theirs = theirs[:, : ours.shape[1]]
        pairs.append((name, ours, theirs))
    for name, ours, theirs in pairs:
        if ours.shape != theirs.shape or not torch.equal(ours.long(), theirs.long()):
            locus = Locus(component="engine.batch", op="build", parameter=name)
            yield locus, f"the step's {name} is not what its rows ask for"


def _wrong_embeds(
    core: EngineCore, plan: StepPlan, batch: Batch, fresh: Mapping[str, Tensor]
) -> Iterable[Wrong]:
    held: dict[int, Tensor] = {}
    if batch.step.embeds is not None:
        places = batch.step.embeds.rows.tolist()
        held = dict(zip(places, batch.step.embeds.values, strict=True))
    at = 0
    for row in plan.rows:
        for picture in row.choice.request.pictures:
            yield from _wrong_rows(core, picture, fresh)
            kept = core.encoder.rows(picture) if core.encoder.is_resident(picture) else None
            for position in range(
                max(row.start, picture.span.start), min(row.stop, picture.span.end)
            ):
                place, n = at + position - row.start, position - picture.span.start
                if kept is None or place not in held or not torch.equal(held[place], kept[n]):
                    locus = Locus(component="engine.batch", op="_embeds", parameter="embeds")
                    yield locus, f"position {position} does not get its picture's row {n}"
                    return
        at += row.num_tokens


def _wrong_rows(core: EngineCore, picture: Picture, fresh: Mapping[str, Tensor]) -> Iterable[Wrong]:
    wanted = fresh.get(picture.span.content_hash)
    if wanted is None or not core.encoder.is_resident(picture):
        return
    kept = core.encoder.rows(picture)
    if kept.shape != wanted.shape or not _is_close(kept, wanted):
        locus = Locus(component="engine.encoder", op="rows", parameter="content_hash")
        yield locus, f"what is kept for {picture.span.content_hash} is not its encoding"


# Sampling.


def _sampling(bench: Workbench) -> list[Wrong]:
    """Requests of unlike settings whose order changes, against each row's own settings."""
    seen: list[dict[str, list[float]]] = []
    wrong: list[Wrong] = []

    def spy(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(logits: Tensor, *settings: Tensor) -> Tensor:
            names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
            told = dict(zip(names, (s.tolist() for s in settings), strict=True))
            seen.append(told)
            return sample(logits, *settings)

        return watched

    core = bench.core(ops={"sample": spy})

    def hooked(draw: Callable[..., Any]) -> Callable[..., Any]:
        def watched(logits: Tensor, rows: Sequence[LogitRow]) -> Any:
            seen.clear()
            result = draw(logits, rows)
            wrong.extend(_wrong_settings([r for r in rows if r.draws], seen))
            return result

        return watched

    _hook(core.runner.sampler, "draw", hooked)
    settings = [(0.0, 0, 1), (1.5, 5, 2), (0.7, 0, 3), (1.0, 40, 4)]
    steps = 0

    def later(events: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:  # one that is served first joins the others
            params = SamplingParams(temperature=0.3, top_k=7, seed=9, max_tokens=6, ignore_eos=True)
            core.add(ask("urgent", bench.prompt(9, 8), params=params, priority=-1))

    requests = [
        ask(
            f"r{i}",
            bench.prompt(6 + 3 * i, i),
            params=SamplingParams(
                temperature=t, top_k=k, seed=s, max_tokens=8 + 2 * i, ignore_eos=True
            ),
        )
        for i, (t, k, s) in enumerate(settings)
    ]
    run(core, requests, after_step=later)
    return wrong


def _wrong_settings(
    rows: Sequence[LogitRow], seen: Sequence[Mapping[str, list[float]]]
) -> Iterable[Wrong]:
    if not rows:
        return
    told = seen[-1] if seen else {}
    wanted: dict[str, list[float]] = {
        "temperature": [r.choice.request.params.temperature for r in rows],
        "top_k": [r.choice.request.params.top_k for r in rows],
        "seed": [r.choice.seed for r in rows],
        "position": [r.position for r in rows],
    }
    for name, values in wanted.items():
        got = told.get(name, [])
        same = len(got) == len(values) and all(
            abs(a - b) <= 1e-6 * abs(b) for a, b in zip(got, values, strict=True)
        )
        if not same:
            locus = Locus(component="engine.sampling", op="draw", parameter=name)
            yield locus, f"rows were drawn with the {name} of others: {got}, wanted {values}"


# Kept states.


def _kept_states(bench: Workbench) -> list[Wrong]:
    """The state kept for a prompt's prefix, against a recomputation that reuses nothing."""
    text = bench.prompt(5 * BLOCK + 3)
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
    for length in (len(text), 3 * BLOCK + 2):
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
    bad = [k for k in slots if not _is_close(kept.tensors[k], truth.tensors[k])]
    if not bad:
        worse = [k for k in blocks if not _is_close(kept.tensors[k], truth.tensors[k])]
        locus = Locus(component="cache.prefix", op="publish", parameter="block")
        return [(locus, f"cached blocks differ: {worse[0]}")] if worse else []
    for other, point in points.items():
        if other != tokens and all(_is_close(kept.tensors[k], point.tensors[k]) for k in slots):
            locus = Locus(component="cache.prefix", op="snapshot", parameter="position")
            return [(locus, f"the state kept for {tokens} tokens is that of {other}")]
    locus = Locus(component="cache.prefix", op="snapshot", parameter="state")
    empty = all(not kept.tensors[k].any() for k in slots)
    what = "was never written" if empty else "is no state of this text"
    return [(locus, f"the state kept for {tokens} tokens {what}: {bad[0]}")]


# Blocks.


def _block_counts(bench: Workbench) -> list[Wrong]:
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

        _hook(pool, name, hooked)

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


def _lookups(bench: Workbench) -> list[Wrong]:
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


# Hand-over.


def _handover(bench: Workbench) -> list[Wrong]:
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
    target = bench.core()
    target.adopt(taken[0])
    rest = run(target, [])["one"].token_ids
    done = len(taken[0].token_ids) - len(text)
    if whole[done:] == rest:
        return []
    locus = Locus(component="engine.handover", op="adopt", parameter="token_ids")
    return [(locus, f"the adopted request answers {rest}, the undisturbed one {whole[done:]}")]


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= _CLOSE * scale).all())


AUDITS: Mapping[str, Callable[[Workbench], list[Wrong]]] = {
    "step-tensors": _step_tensors,
    "pictures": _pictures,
    "sampling": _sampling,
    "kept-states": _kept_states,
    "block-counts": _block_counts,
    "lookups": _lookups,
    "handover": _handover,
}
"""Every audit by name."""
