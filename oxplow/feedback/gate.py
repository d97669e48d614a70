"""The correctness gate: one kernel, one contract case, one verdict with a locus.

Owns the examination: fresh inputs in fenced, NaN-poisoned memory, poisoned output allocations,
the float64 reference, the contract's checks, untouched inputs and repeatability. Knows nothing of
timing or models. Invariant: the order is fixed (tampering, form, alias, fences, untouched inputs,
numerics; then other values, other layout, repeatability), and the truth is computed before the
candidate runs, which never sees it. Here the candidate shares the judge's process; `isolate` puts
it into one of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts import laws
from oxplow.contracts.schema import Args, Case, OpContract, Role
from oxplow.feedback import fences as fence_module
from oxplow.feedback.fences import Fence, PoisonedAllocations, fenced, share_memory
from oxplow.feedback.watch import ProcessWatch

_OTHER_SEED = 7919
"""Added to the seed for the second set of values: far from the few seeds that callers use."""
_ROW_PADDING = 3
"""Elements between rows in the strided layout: odd, so that rows are unaligned."""


class Reason(Enum):
    """Where an examination stopped."""

    PASSED = "passed"
    RAISED = "raised"  # the candidate raised an exception, or asked the process to end
    TAMPERED = "tampered"  # a name or a setting of torch or of the judge was changed
    FORM = "form"  # wrong number, shape, dtype, device or kind of outputs
    ALIAS = "alias"  # an output shares memory with an input, or with an earlier call's output
    FENCE = "fence"  # memory outside a tensor was written
    UNTOUCHED = "untouched"  # an input that the contract does not name as mutated was written
    NUMERICS = "numerics"  # a check of the contract failed
    UNREPEATABLE = "unrepeatable"  # the same inputs gave other bits
    HUNG = "hung"  # no answer within the time allowed
    DIED = "died"  # its process ended without an answer
    BUSY = "busy"  # threads or processes of it went on after the answer
    FLOOR = "floor"  # faster than the machine can move the bytes or do the arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one kernel and case: reason, the tensor at fault, one sentence, the error
    in bounds.
    """

    op: str
    kernel: str
    case: str
    dtype: torch.dtype
    seed: int
    reason: Reason
    tensor: str = ""
    detail: str = ""
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        """True when every stage passed."""
        return self.reason is Reason.PASSED

    def __str__(self) -> str:
        where = f"{self.op}/{self.kernel} on case {self.case} ({self.dtype}, seed {self.seed})"
        if self.ok:
            return f"{where}: passed, worst error {self.worst:.3g} of its bound"
        return f"{where}: {self.reason.value} at {self.tensor or 'the call'}: {self.detail}"


class Stop(Exception):  # noqa: N818 - carries a verdict, never leaves the gates
    """Ends an examination: reason, tensor at fault, one sentence, error in bounds."""

    def __init__(self, reason: Reason, tensor: str, detail: str, worst: float = 0.0) -> None:
        super().__init__(detail)
        self.reason, self.tensor, self.detail, self.worst = reason, tensor, detail, worst


def cast_args(
    contract: OpContract, args: Args, dtype: torch.dtype, weight: torch.dtype | None = None
) -> Args:
    """Round ACT tensors to `dtype` and WEIGHT tensors to `weight` (default: `dtype`); leave the
    rest alone.
    """
    roles = {Role.ACT: dtype, Role.WEIGHT: weight or dtype}
    cast: Args = {}
    for name, value in args.items():
        role = contract.inputs[name].role if name in contract.inputs else None
        cast[name] = value.to(roles[role]) if isinstance(value, Tensor) and role in roles else value
    return cast


def reference_values(contract: OpContract, args: Args, dtype: torch.dtype) -> dict[str, Tensor]:
    """Run the contract's reference with every floating input widened to `dtype` on fresh copies."""
    wide = {
        k: v.detach().cpu().to(dtype if v.is_floating_point() else v.dtype).clone()
        if isinstance(v, Tensor)
        else v
        for k, v in args.items()
    }
    return contract.reference(**wide)


def examine(
    contract: OpContract,
    kernel: str,
    run: Callable[..., Any],
    case: Case,
    *,
    dtype: torch.dtype = torch.float32,
    weight: torch.dtype | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> Finding:
    """Examine `run` on one case; never raises for a candidate's fault.

    Raises ContractError when the case itself does not fit the contract.
    """
    caller = Caller(contract, run, device)
    plans = [
        Truth(contract, cast_args(contract, case.build(_generator(s)), dtype, weight))
        for s in (seed, seed + _OTHER_SEED)
    ]
    reason, tensor, detail, worst = Reason.PASSED, "", "", 0.0
    try:
        for error in errors_of(caller.call, *plans):
            worst = max(worst, error)
    except Stop as stop:
        reason, tensor, detail, worst = stop.reason, stop.tensor, stop.detail, stop.worst
    return Finding(
        op=contract.name, kernel=kernel, case=case.name, dtype=dtype, seed=seed,
        reason=reason, tensor=tensor, detail=detail, worst=worst,
    )  # fmt: skip


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _fences_of(
    contract: OpContract, args: Args, device: torch.device | None, padding: int = 0
) -> dict[str, Fence]:
    """Copy every tensor behind guards; `padding` spreads the rows of what ops only read."""
    spread = (Role.ACT, Role.WEIGHT, Role.F32)
    made = {}
    for name, value in args.items():
        if isinstance(value, Tensor):
            reads = name not in contract.mutates and value.ndim > 1
            rows = reads and contract.inputs[name].role in spread
            made[name] = fenced(value, device or value.device, padding if rows else 0)
    return made


class Truth:
    """One set of arguments with its truth, computed before any candidate has run."""

    def __init__(self, contract: OpContract, args: Args) -> None:
        contract.validate(args)
        self.contract, self.args = contract, args
        self.truth = reference_values(contract, args, torch.float64)
        self.baseline = reference_values(contract, args, torch.float32)

    def judge(self, got: dict[str, Tensor]) -> float:
        """Run the contract's checks; return the worst error in bounds, or stop."""
        worst = 0.0
        for name, value in got.items():
            truth = self.truth[name]
            if value.shape != truth.shape:
                wanted = f"has shape {tuple(value.shape)}, wanted {tuple(truth.shape)}"
                raise Stop(Reason.FORM, name, wanted)
            evidence = laws.Evidence(
                got=value, truth=truth, baseline=self.baseline[name], args=self.args, outputs=got
            )
            verdict = self.contract.checks[name].judge(evidence)
            if not verdict.ok:
                raise Stop(Reason.NUMERICS, name, verdict.reason, verdict.worst)
            worst = max(worst, verdict.worst)
        return worst


class Caller:
    """Calls one candidate on fenced copies, and keeps the outputs that it has given so far.

    Knows no truth: what the candidate could find in this process is its own inputs and outputs.
    """

    def __init__(
        self, contract: OpContract, run: Callable[..., Any], device: torch.device | None
    ) -> None:
        self._contract, self._run, self._device = contract, run, device
        self._given: list[Tensor] = []  # kept alive, so that no honest output can share their place
        self._last: tuple[Args, dict[str, Fence]] | None = None

    def call(self, args: Args, how: str) -> dict[str, Tensor]:
        """Call the candidate on fenced copies; return outputs and mutated tensors on the CPU.

        `how` is "fresh", "refill" (other values in the memory of the call before, where the form
        allows) or "padded" (rows apart). Raises Stop for whatever it did that it may not.
        """
        fences = self._fences(args, how)
        self._last = (args, fences)
        handed = {n: fences[n].handed if n in fences else v for n, v in args.items()}
        result, allocations = self._watched(handed)
        outputs = _named_outputs(self._contract, args, result, self._device)
        for name, value in outputs.items():
            shared = [n for n, f in fences.items() if f.shares_memory(value)]
            if shared:
                raise Stop(Reason.ALIAS, name, f"shares memory with input {shared[0]}")
            if any(share_memory(value, earlier) for earlier in self._given):
                raise Stop(Reason.ALIAS, name, "shares memory with an earlier call's output")
        self._given += outputs.values()
        for name, fence in fences.items():
            if not fence.intact():
                raise Stop(Reason.FENCE, name, "memory outside the tensor was written")
        if not allocations.intact():
            raise Stop(Reason.FENCE, "an allocation of the kernel", "memory outside it was written")
        for name, fence in fences.items():
            if not fence.unmoved():
                raise Stop(Reason.UNTOUCHED, name, "was given other memory, shape or strides")
            if name not in self._contract.mutates and not fence.unchanged():
                raise Stop(Reason.UNTOUCHED, name, "the contract does not let the op write it")
        mutated = {n: fences[n].contents for n in self._contract.mutates if n in fences}
        kept = (*outputs.items(), *mutated.items())
        return {n: v.detach().clone(memory_format=torch.contiguous_format).cpu() for n, v in kept}

    def _fences(self, args: Args, how: str) -> dict[str, Fence]:
        if how != "refill" or self._last is None or not _same_forms(self._last[0], args):
            padding = _ROW_PADDING if how == "padded" else 0
            return _fences_of(self._contract, args, self._device, padding)
        for name, fence in self._last[1].items():
            fence.refill(args[name])
        return self._last[1]

    def collect(self, args: Args, result: object) -> dict[str, Tensor]:
        """Return what a call without guards gave and mutated. Raises Stop for its form."""
        outputs = _named_outputs(self._contract, args, result, self._device)
        kept = (*outputs.items(), *((n, args[n]) for n in self._contract.mutates))
        return {n: v.detach().cpu() for n, v in kept if isinstance(v, Tensor)}

    def _watched(self, handed: Args) -> tuple[object, PoisonedAllocations]:
        watch = ProcessWatch(laws, laws.Close, laws.Exact, laws.Picks, fence_module, Fence, time)
        raised: BaseException | None = None
        result: object = None
        with PoisonedAllocations() as allocations:
            try:
                result = self._run(**handed)
            except (Exception, SystemExit) as error:  # a candidate may raise anything; a verdict
                raised = error
        changed = watch.repair()
        if changed:
            raise Stop(Reason.TAMPERED, "", f"changed {', '.join(changed)}")
        if raised is not None:
            raise Stop(Reason.RAISED, "", f"{type(raised).__name__}: {raised}") from raised
        return result, allocations


Call = Callable[[Args, str], dict[str, Tensor]]
"""A guarded call of one candidate, here or in its own process: see `Caller.call`."""


def errors_of(call: Call, one: Truth, other: Truth) -> Iterator[float]:
    """Judge both truths in several layouts and orders; yield the worst error of each call judged.

    Other values in the first call's memory show an answer kept by shape or by address; padded
    rows show a kernel that takes every tensor for contiguous, as the model's are not. Raises Stop.
    """
    first = call(one.args, "fresh")
    yield one.judge(first)
    second = call(other.args, "refill")
    yield other.judge(second)
    spread = call(other.args, "padded")
    if _first_difference(second, spread) is not None:  # honest: another order of summation
        yield other.judge(spread)
    changed = _first_difference(first, call(one.args, "fresh"))
    if changed is not None:
        detail = "a later call on the same inputs gave other bits"
        raise Stop(Reason.UNREPEATABLE, changed, detail)


def _same_forms(one: Args, other: Args) -> bool:
    """Tell whether two sets of arguments differ in values only."""
    return all(_same_form(one.get(n), other.get(n)) for n in {*one, *other})


def _same_form(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype is other.dtype
    return not isinstance(one, Tensor) and not isinstance(other, Tensor)


def _first_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    """Return the first tensor whose bits or shape differ, None where all are equal."""
    for name, value in one.items():
        theirs = other[name]
        if value.shape != theirs.shape:
            return name
        if not torch.equal(value.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)):
            return name
    return None


def _named_outputs(
    contract: OpContract, args: Args, result: object, device: torch.device | None
) -> dict[str, Tensor]:
    values = () if result is None else result if isinstance(result, tuple) else (result,)
    if len(values) != len(contract.outputs):
        raise Stop(
            Reason.FORM, "", f"returned {len(values)} values, wanted {list(contract.outputs)}"
        )
    home = device or next(v.device for v in args.values() if isinstance(v, Tensor))
    named: dict[str, Tensor] = {}
    for (name, spec), value in zip(contract.outputs.items(), values, strict=True):
        if type(value) is not Tensor:
            raise Stop(Reason.FORM, name, f"is {type(value).__name__}, wanted a plain tensor")
        wanted = _output_dtypes(contract, spec.role, args)
        if wanted and value.dtype not in wanted:
            shown = " or ".join(str(w) for w in wanted)
            raise Stop(Reason.FORM, name, f"has dtype {value.dtype}, wanted {shown}")
        if value.layout != torch.strided or value.is_neg() or value.is_conj():
            raise Stop(Reason.FORM, name, "is sparse or lazily negated, wanted plain memory")
        if value.device.type != home.type:
            raise Stop(Reason.FORM, name, f"lies on {value.device}, wanted {home}")
        named[name] = value
    return named


def _output_dtypes(contract: OpContract, role: Role, args: Args) -> tuple[torch.dtype, ...]:
    fixed = {
        Role.F32: (torch.float32,),
        Role.INT: (torch.int64, torch.int32),
        Role.BOOL: (torch.bool,),
    }
    if role is not Role.ACT:
        return fixed.get(role, ())
    acts = [
        args[n].dtype
        for n, s in contract.inputs.items()
        if s.role is Role.ACT and isinstance(args[n], Tensor)
    ]
    return tuple(acts[:1])
