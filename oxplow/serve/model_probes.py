"""Probes of a whole model: one forward pass judged op by op, and two ways of cutting one text.

Owns the runs: a text in pieces, with other pool places, on observed kernels. Knows the model as a
function, no engine. Invariant: every run starts from pools of its own; cuts are compared bit for
bit on kernels that promise it (`--deterministic`), and within the law on the serving kernels.

The law for a whole model: one relative error of u * sqrt(width) put on the embedding by a seeded
nudge shows how the model amplifies one op's rounding; each of the n ops of a token adds one such
error, independent of the others, so a cut may move the logits by 4 * sqrt(n) times that much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.laws import UNIT_ROUNDOFF
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.live import (
    Call,
    CallLog,
    LiveJudge,
    divergence_finding,
    first_divergence,
    judged_finding,
    observed_table,
)
from oxplow.model.caches import CacheTensors
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.model.step import SequenceRows, build_step
from oxplow.ops.table import OpTable
from oxplow.serve.kernel_choice import plain_kernels

__all__ = ["ModelUnderTest", "cut_findings", "judge_forward", "repeat_finding"]

Run: TypeAlias = Callable[..., Any]
_BLOCK = 16
_FACTOR = 4.0  # standard deviations, as in the law of one op
_POISON = float("nan")


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """A checkpoint on one choice of kernels; every call of `logits` has pools of its own."""

    directory: Path
    device: torch.device
    invariant: bool = False
    seed: int = 0

    @cached_property
    def table(self) -> OpTable:
        """The kernels under test; raises KernelUnavailable."""
        return plain_kernels(self.device, invariant=self.invariant)

    @cached_property
    def model(self) -> HybridModel:
        """The model on those kernels."""
        return self._load(self.table)

    def observed(self, wrap: Callable[[str, Run], Run]) -> HybridModel:
        """Return the model on the same kernels, each of them wrapped."""
        return self._load(observed_table(self.table, wrap))

    def _load(self, table: OpTable) -> HybridModel:
        options = LoadOptions(block_size=_BLOCK, with_vision=False, with_draft=False)
        return load_model(self.directory, table, options)

    def text(self, length: int) -> list[int]:
        """Return random ordinary tokens from the seed."""
        most = self.model.spec.text.vocab_size - 64  # special tokens stand at the end
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, most, (length,), generator=generator).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way of computing one text: the ends of its pieces, and where its state lies."""

    name: str
    ends: tuple[int, ...]
    first_block: int = 0
    slot: int = 0
    poison: bool = False


def logits_of(
    model: HybridModel,
    text: Sequence[int],
    cut: Cut,
    device: torch.device,
    entering: Callable[[int], None] = lambda layer: None,
) -> Tensor:
    """Return logits [T, V] of every position, computed piece by piece.

    `poison` fills every pool with NaN first: what a run may read, it must have written.
    """
    blocks = math.ceil(len(text) / _BLOCK)
    caches = CacheTensors(
        model.components(), num_blocks=cut.first_block + blocks, num_slots=cut.slot + 1,
        device=device,
    )  # fmt: skip
    if cut.poison:
        for component in model.components():
            caches[component.layer][component.name].fill_(_POISON)
    ids = [cut.first_block + (blocks - 1 - i) for i in range(blocks)]  # not in order on purpose

    def observe(what: str, layer: int, value: Tensor) -> None:
        if what == "streams":
            entering(layer)

    parts: list[Tensor] = []
    for start, stop in zip((0, *cut.ends), cut.ends, strict=False):
        rows = SequenceRows(
            token_ids=text[start:stop],
            computed_tokens=start,
            slot=cut.slot,
            block_ids=ids,
            all_logits=True,
        )
        step = build_step([rows], block_size=_BLOCK, device=device)
        parts.append(model.forward(step, caches, observe).logits)
    return torch.cat(parts)


def cuts_of(length: int) -> tuple[Cut, ...]:
    """Return the ways to cut a text of `length` tokens that must not matter."""
    rng = torch.Generator().manual_seed(length)
    odd = sorted({int(i) for i in torch.randint(1, length, (4,), generator=rng)} | {length})
    return (
        Cut(name="two pieces", ends=(length // 2, length)),
        Cut(name="block by block", ends=(*range(_BLOCK, length, _BLOCK), length)),
        Cut(name="odd pieces", ends=tuple(odd)),
        Cut(name="token by token", ends=tuple(range(1, length + 1))),
        Cut(name="prefill then decode", ends=(length // 2, *range(length // 2 + 1, length + 1))),
        Cut(name="other places", ends=(length,), first_block=3, slot=2),
        Cut(name="poisoned pools", ends=(length // 3, length), first_block=2, slot=1, poison=True),
    )


def judge_forward(target: ModelUnderTest, length: int, repro: str) -> Finding:
    """Prefill `length` tokens, then decode two, every op call judged by its contract."""
    began = time.perf_counter()
    judge = LiveJudge(CONTRACTS)
    model = target.observed(judge.wrap)

    def entering(layer: int) -> None:
        judge.layer = layer

    text = target.text(length + 2)
    cut = Cut(name="", ends=(length // 2, length, length + 1, length + 2))
    logits_of(model, text, cut, target.device, entering)
    base = Finding(
        probe="live-contracts",
        verdict=Verdict.INVALID,
        summary="",
        excitation={"tokens": length + 2, "seed": target.seed},
        cost_s=time.perf_counter() - began,
        repro=repro,
    )
    return judged_finding(judge, base)


def repeat_finding(target: ModelUnderTest, length: int, repro: str) -> Finding:
    """Run one text twice and compare every op call: the same inputs must give the same bits."""
    began = time.perf_counter()

    def logged() -> list[Call]:
        log = CallLog(CONTRACTS)
        model = target.observed(log.wrap)

        def entering(layer: int) -> None:
            log.layer = layer

        text = target.text(length)
        logits_of(model, text, Cut(name="", ends=(length - 2, length - 1, length)), target.device,
                  entering)  # fmt: skip
        return log.calls

    one, other = logged(), logged()
    base = Finding(
        probe="first-divergence",
        verdict=Verdict.INVALID,
        summary="",
        excitation={"tokens": length, "seed": target.seed, "runs": 2},
        cost_s=time.perf_counter() - began,
        repro=repro,
    )
    return divergence_finding(first_divergence(one, other), len(one), base)


def cut_findings(target: ModelUnderTest, length: int, repro: str) -> list[Finding]:
    """Compare every cut of one text with the text in one piece.

    On kernels that promise equal bits, bits are demanded. Else the bound is the whole-model law.
    """
    began = time.perf_counter()
    model = target.model
    text = target.text(length)
    whole = logits_of(model, text, Cut(name="whole", ends=(length,)), target.device)
    bound = 0.0 if target.invariant else _allowed(target, model, text, whole)
    findings = []
    for cut in cuts_of(length):
        got = logits_of(model, text, cut, target.device)
        error = (got - whole).abs().amax(1)
        findings.append(_judged(target, cut, error, bound, repro, time.perf_counter() - began))
        began = time.perf_counter()
    return findings


def _judged(
    target: ModelUnderTest, cut: Cut, error: Tensor, bound: float, repro: str, cost_s: float
) -> Finding:
    bad = ~(error <= bound)  # a NaN is bad
    worst = float(error.nan_to_num(nan=math.inf).max())
    shown = min(worst, float(torch.finfo(torch.float64).max))
    series = tuple((float(i), float(e)) for i, e in enumerate(error.nan_to_num(nan=shown)))
    base = Finding(
        probe="cut",
        verdict=Verdict.PASS,
        summary=f"{cut.name}: logits move by {worst:.3g}, allowed {bound:.3g}",
        effect=Effect(name="largest move of a logit", value=shown, unit="logits", bound=bound),
        excitation={
            "cut": cut.name,
            "tokens": len(error),
            "kernels": "deterministic" if target.invariant else "serving",
            "seed": target.seed,
        },
        curves=(
            Curve(
                title=f"{cut.name} against one piece",
                x_label="position",
                y_label="largest move of a logit",
                series={cut.name: series, "allowed": tuple((x, bound) for x, _ in series)},
            ),
        ),
        repro=repro,
        cost_s=cost_s,
    )
    if not bad.any():
        return base
    place = int(bad.nonzero()[0])
    locus = Locus(component="model", op=_culprit(cut), position=place, parameter=cut.name)
    told = f"{cut.name}: from position {place} on logits differ, by up to {worst:.3g} ({bound:.3g})"
    return replace(base, verdict=Verdict.FAIL, summary=told, locus=locus)


def _culprit(cut: Cut) -> str:
    """Name what a cut exercises that one piece does not."""
    if cut.poison:
        return "reads what it has not written"
    if len(cut.ends) == 1:
        return "block_table or state_slots"
    steps = {b - a for a, b in zip(cut.ends, cut.ends[1:], strict=False)}
    return "decode" if steps == {1} else "carried state"


def _allowed(
    target: ModelUnderTest, model: HybridModel, text: Sequence[int], whole: Tensor
) -> float:
    """Return the whole-model law's bound on a logit, from three seeded nudges."""
    log = CallLog(CONTRACTS)
    logged = target.observed(log.wrap)
    logits_of(logged, text[:2], Cut(name="", ends=(2,)), target.device)
    width = model.spec.text.hidden
    relative = UNIT_ROUNDOFF[torch.float32] * math.sqrt(width)
    moves = []
    for seed in range(3):
        moved = _nudged(model, relative, target.seed + seed)
        got = logits_of(moved, text, Cut(name="whole", ends=(len(text),)), target.device)
        moves.append(float((got - whole).abs().max()))
    return _FACTOR * math.sqrt(len(log.calls)) * max(moves)


def _nudged(model: HybridModel, relative: float, seed: int) -> HybridModel:
    plain = model.embedding

    class Nudged(type(plain)):  # type: ignore[misc]
        def __init__(self) -> None:
            self._generator = torch.Generator().manual_seed(seed)

        def __call__(self, token_ids: Tensor) -> Tensor:
            rows: Tensor = plain(token_ids)
            noise = torch.randn(rows.shape, generator=self._generator).to(rows)
            return rows * (1 + relative * noise)

    return replace(model, embedding=Nudged())
