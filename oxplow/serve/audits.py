"""Audits: parts of the engine that hold a rule, watched at work by an independent second opinion.

Owns the table of audits and those of a step: its tensors against the plain builder, pictures
against a fresh encoding, sampling settings against the rows' own; `cache_audits` owns the rest.
Knows the engine's public parts and hooks them on one instance; it never changes what they do.
Invariant: an audit names the function whose answer broke the rule, and passes on any engine that
keeps it, however it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxplow.cache.manager import Holding
from oxplow.engine.batch import Batch, LogitRow
from oxplow.engine.core import EngineCore
from oxplow.engine.request import Picture, SamplingParams
from oxplow.engine.steps import StepPlan
from oxplow.errors import OxplowError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.model.step import SequenceRows, build_step
from oxplow.serve.cache_audits import (
    Wrong,
    block_counts,
    handover,
    hook,
    is_close,
    kept_states,
    lookups,
    progress,
)
from oxplow.serve.workbench import BLOCK, Workbench, ask, run

__all__ = ["AUDITS", "audit"]


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

    hook(core.runner.batches, "build", hooked)
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
    if kept.shape != wanted.shape or not is_close(kept, wanted):
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

    hook(core.runner.sampler, "draw", hooked)
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


AUDITS: Mapping[str, Callable[[Workbench], list[Wrong]]] = {
    "step-tensors": _step_tensors,
    "pictures": _pictures,
    "sampling": _sampling,
    "kept-states": kept_states,
    "block-counts": block_counts,
    "lookups": lookups,
    "handover": handover,
    "progress": progress,
}
"""Every audit by name."""
