"""Ops at work: every call of a running model, judged by its contract or compared with another run.

Owns the two observers (the judge and the call log), the first divergence and their findings. Knows
op tables and contracts, no model and no engine: the caller runs the work on an observed table.
Invariant: an observer never changes what a kernel sees or returns; the judge computes its truth
from private copies taken before the call; fingerprints depend on the order of elements.

Sources: feedback-and-agent.md 2.1 and 2.3. The salted sum is the order-sensitive fingerprint that
an unsalted tensor hash is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts import laws
from oxplow.contracts.schema import Args, OpContract
from oxplow.errors import ContractError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.gate import reference_values
from oxplow.ops.table import OpTable

__all__ = [
    "BadCall",
    "Call",
    "CallLog",
    "Divergence",
    "LiveJudge",
    "divergence_finding",
    "fingerprint",
    "first_divergence",
    "judged_finding",
    "observed_table",
]

Run = Callable[..., Any]
_SALT = -7046029254386353131  # 2**64 / golden ratio, as a signed number: odd, so no bit is lost
_MOST_BAD = 1000  # kept; a service that goes wrong goes wrong at every call
_MIX = -4417276706812531889


def observed_table(table: OpTable, wrap: Callable[[str, Run], Run]) -> OpTable:
    """Return the same choices with every kernel's `run` wrapped; load the model on it."""
    kernels = {op: replace(k, run=wrap(op, k.run)) for op, k in table.kernels.items()}
    return OpTable(kernels, table.explain(), table.facts)


def _bound(contract: OpContract, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Args:
    """Return a call's arguments by the contract's names. Raises ContractError for others."""
    names = (*contract.inputs, *contract.scalars)
    stray = sorted(set(named) - set(names))
    if stray or len(positional) > len(names):
        raise ContractError(
            f"{contract.name}: a call does not fit", got=stray or len(positional), wanted=names
        )
    return dict(zip(names, positional, strict=False)) | dict(named)


# The judge: contracts on the inputs of a real run.


@dataclass(frozen=True, slots=True, kw_only=True)
class BadCall:
    """One call that broke its contract: the `number`-th call of `op` in the run, from 0."""

    op: str
    number: int
    layer: int | None
    tensor: str
    reason: str
    worst: float
    index: tuple[int, ...]


class LiveJudge:
    """Judges calls by their contracts' laws in float64; `bad` holds what failed, in order.

    `layer` is set by whoever runs the work, as it goes. `every` judges one call in so many of
    each op (1: all). A judged call costs what the reference costs, far more than the kernel.
    """

    def __init__(
        self,
        contracts: Mapping[str, OpContract],
        *,
        every: int = 1,
        most_bytes: int | None = None,
        tell: Callable[[BadCall], None] = lambda bad: None,
    ) -> None:
        """`tell` hears each bad call; calls with more input than `most_bytes` are `skipped`.

        Raises ContractError for `every` below 1.
        """
        if every < 1:
            raise ContractError("a judge looks at one call in so many", got=every, wanted=">= 1")
        self._contracts, self._every = contracts, every
        self._most_bytes, self._tell = most_bytes, tell
        self.skipped: dict[str, int] = {}
        self.layer: int | None = None
        self.bad: list[BadCall] = []
        self.judged: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.worst: dict[str, float] = {}

    def wrap(self, op: str, run: Run) -> Run:
        """Return `run`, watched; the bare `run` for an op without a contract."""
        contract = self._contracts.get(op)
        if contract is None:
            return run

        def watched(*positional: Any, **named: Any) -> Any:
            number = self.seen.get(op, 0)
            self.seen[op] = number + 1
            handed = _bound(contract, positional, named)
            if number % self._every:
                return run(**handed)
            if self._is_too_large(handed):
                self.skipped[op] = self.skipped.get(op, 0) + 1
                return run(**handed)
            before = {n: v.clone() if isinstance(v, Tensor) else v for n, v in handed.items()}
            result = run(**handed)
            self._judge(contract, number, before, handed, result)
            return result

        return watched

    def _is_too_large(self, handed: Args) -> bool:
        if self._most_bytes is None:
            return False
        tensors = [v for v in handed.values() if isinstance(v, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) > self._most_bytes

    def _judge(
        self, contract: OpContract, number: int, before: Args, handed: Args, result: Any
    ) -> None:
        self.judged[contract.name] = self.judged.get(contract.name, 0) + 1
        values = () if result is None else result if isinstance(result, tuple) else (result,)
        got = dict(zip(contract.outputs, values, strict=True))
        got |= {n: handed[n] for n in contract.mutates if isinstance(handed.get(n), Tensor)}
        got = {n: v.detach().cpu() for n, v in got.items()}
        truth = reference_values(contract, before, torch.float64)
        baseline = reference_values(contract, before, torch.float32)
        for name, value in got.items():
            evidence = laws.Evidence(
                got=value, truth=truth[name], baseline=baseline[name], args=before, outputs=got
            )
            verdict = contract.checks[name].judge(evidence)
            self.worst[contract.name] = max(self.worst.get(contract.name, 0.0), verdict.worst)
            if not verdict.ok:
                bad = BadCall(
                    op=contract.name,
                    number=number,
                    layer=self.layer,
                    tensor=name,
                    reason=verdict.reason,
                    worst=verdict.worst,
                    index=verdict.index,
                )
                if len(self.bad) < _MOST_BAD:
                    self.bad.append(bad)
                self._tell(bad)
                return


def judged_finding(judge: LiveJudge, base: Finding) -> Finding:
    """Say which op broke its contract at work, in which layer and row.

    `base` gives excitation, cost and repro command.
    """
    calls = sum(judge.judged.values())
    worst = max(judge.worst.values(), default=0.0)
    shown = worst if isfinite(worst) else float(torch.finfo(torch.float64).max)
    base = replace(
        base,
        probe="live-contracts",
        evidence={"calls": calls, "worst_of_bound": dict(sorted(judge.worst.items()))},
        effect=Effect(name="error", value=shown, unit="bounds", bound=1.0, n=calls),
    )
    if not calls:
        return replace(base, verdict=Verdict.INVALID, summary="no op was called")
    if not judge.bad:
        told = f"{calls} calls of {len(judge.judged)} ops stay within their laws"
        return replace(base, verdict=Verdict.PASS, summary=told)
    first = judge.bad[0]
    loci = [_locus(bad) for bad in judge.bad]
    others = dict.fromkeys(locus for locus in loci if locus.op != first.op)
    return replace(
        base,
        verdict=Verdict.FAIL,
        summary=f"{first.op} breaks its law at {first.tensor}: {first.reason}",
        locus=loci[0],
        suspects=tuple(others)[:3],
    )


def _locus(bad: BadCall) -> Locus:
    return Locus(
        component="ops",
        op=bad.op,
        layer=bad.layer,
        position=bad.index[0] if bad.index else None,
        parameter=bad.tensor,
    )


# The log: fingerprints of two runs, and the first call that differs.


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit sum of the tensor's bytes, each salted with its place.

    Equal bytes in equal places give equal numbers; one changed or moved byte changes the sum.
    Shape and dtype are mixed in.
    """
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    words = raw.numel() // 8 * 8
    total = 0
    if words:
        values = raw[:words].clone().view(torch.int64)
        salts = torch.arange(1, values.numel() + 1, dtype=torch.int64) * _SALT
        mixed = (values ^ salts) * _MIX
        total = int(((mixed ^ (mixed >> 29)) * salts).sum())
    for place, byte in enumerate(raw[words:].tolist()):
        total += (byte + 1) * (place + 3) * 0x100000001B3
    return hash((total, tuple(tensor.shape), str(tensor.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: fingerprints of its tensors before and after, by name."""

    op: str
    layer: int | None
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(slots=True)
class CallLog:
    """Records every call of an observed table, in order."""

    contracts: Mapping[str, OpContract]
    calls: list[Call] = field(default_factory=list)
    layer: int | None = None

    def wrap(self, op: str, run: Run) -> Run:
        """Return `run`, recorded; the bare `run` for an op without a contract."""
        contract = self.contracts.get(op)
        if contract is None:
            return run

        def recorded(*positional: Any, **named: Any) -> Any:
            handed = _bound(contract, positional, named)
            inputs = {n: fingerprint(v) for n, v in handed.items() if isinstance(v, Tensor)}
            result = run(**handed)
            values = () if result is None else result if isinstance(result, tuple) else (result,)
            outputs = dict(zip(contract.outputs, map(fingerprint, values), strict=True))
            outputs |= {
                n: fingerprint(handed[n])
                for n in contract.mutates
                if isinstance(handed.get(n), Tensor)
            }
            call = Call(op=op, layer=self.layer, inputs=inputs, outputs=outputs)
            self.calls.append(call)
            return result

        return recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first call at which two runs part: `place` in the run, and what differs there.

    `inputs_equal` True convicts the op; False means that what reached it differed already, although
    no earlier op made the difference: the caller's tensors, an index or a cache pool.
    """

    place: int
    op: str
    layer: int | None
    tensor: str
    inputs_equal: bool


def first_divergence(one: Sequence[Call], other: Sequence[Call]) -> Divergence | None:
    """Return where two logs of the same work part; None where they never do.

    A run that calls another op, or ends earlier, parts there with tensor "call".
    """
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.op != b.op or a.inputs.keys() != b.inputs.keys():
            return _parting(place, b, "call", inputs_equal=False)
        for inputs_equal in (False, True):
            mine, theirs = (a.outputs, b.outputs) if inputs_equal else (a.inputs, b.inputs)
            wrong = [n for n, value in mine.items() if theirs[n] != value]
            if wrong:
                return _parting(place, b, wrong[0], inputs_equal=inputs_equal)
    if len(one) == len(other):
        return None
    place = min(len(one), len(other))
    return _parting(place, max(one, other, key=len)[place], "call", inputs_equal=False)


def _parting(place: int, call: Call, tensor: str, *, inputs_equal: bool) -> Divergence:
    return Divergence(
        place=place, op=call.op, layer=call.layer, tensor=tensor, inputs_equal=inputs_equal
    )


def divergence_finding(found: Divergence | None, calls: int, base: Finding) -> Finding:
    """Turn a divergence among `calls` compared calls into a finding.

    `base` gives excitation, cost and repro command.
    """
    base = replace(base, probe="first-divergence", evidence={"calls": calls})
    if not calls:
        return replace(base, verdict=Verdict.INVALID, summary="no op was called")
    if found is None:
        told = f"{calls} calls gave the same bits in both runs"
        return replace(base, verdict=Verdict.PASS, summary=told)
    told = f"call {found.place}: {found.op} got equal inputs and gave other {found.tensor}"
    if not found.inputs_equal:
        told = f"call {found.place}: {found.op} got other {found.tensor}, and no op before differs"
    locus = Locus(
        component="ops" if found.inputs_equal else "engine.batch",
        op=found.op,
        layer=found.layer,
        parameter=found.tensor,
    )
    return replace(base, verdict=Verdict.FAIL, summary=told, locus=locus)
