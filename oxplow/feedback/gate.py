"""The correctness gate: one kernel, one contract case, one verdict with a locus.

Owns the examination: fresh inputs in fenced, NaN-poisoned memory, poisoned output allocations,
the float64 reference, the contract's checks, untouched inputs and repeatability. Knows nothing of
timing or models. Invariant: the order is fixed (shape and dtype, alias, fences, untouched inputs,
numerics, repeatability) and the candidate never sees the reference's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Evidence
from oxplow.contracts.schema import Args, Case, OpContract, Role
from oxplow.feedback.fences import Fence, PoisonedAllocations, fenced


class Reason(Enum):
    """Where an examination stopped."""

    PASSED = "passed"
    RAISED = "raised"  # the candidate raised an exception
    FORM = "form"  # wrong number, shape, dtype or kind of outputs
    ALIAS = "alias"  # an output shares memory with an input
    FENCE = "fence"  # memory outside a tensor was written
    UNTOUCHED = "untouched"  # an input that the contract does not name as mutated was written
    NUMERICS = "numerics"  # a check of the contract failed
    UNREPEATABLE = "unrepeatable"  # the same inputs gave other bits


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


class _Stop(Exception):  # noqa: N818 - carries a verdict, never leaves this module
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
    args = cast_args(contract, case.build(torch.Generator().manual_seed(seed)), dtype, weight)
    contract.validate(args)

    def finding(reason: Reason, tensor: str = "", detail: str = "", worst: float = 0.0) -> Finding:
        return Finding(
            op=contract.name, kernel=kernel, case=case.name, dtype=dtype, seed=seed,
            reason=reason, tensor=tensor, detail=detail, worst=worst,
        )  # fmt: skip

    try:
        first = _run_fenced(contract, run, args, device)
        worst = _judge(contract, args, first)
        second = _run_fenced(contract, run, args, device)
        for name, value in first.items():
            if not torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)):
                raise _Stop(
                    Reason.UNREPEATABLE, name, "a second call on the same inputs gave other bits"
                )
    except _Stop as stop:
        return finding(stop.reason, stop.tensor, stop.detail, stop.worst)
    return finding(Reason.PASSED, worst=worst)


def _run_fenced(
    contract: OpContract, run: Callable[..., Any], args: Args, device: torch.device | None
) -> dict[str, Tensor]:
    """Call `run` once on fenced copies; return outputs and mutated tensors on the CPU."""
    fences: dict[str, Fence] = {
        n: fenced(v, device or v.device) for n, v in args.items() if isinstance(v, Tensor)
    }
    call = {n: fences[n].inner if n in fences else v for n, v in args.items()}
    with PoisonedAllocations() as allocations:
        try:
            result = run(**call)
        except Exception as error:  # a candidate may raise anything; the verdict records it
            raise _Stop(Reason.RAISED, "", f"{type(error).__name__}: {error}") from error
    outputs = _named_outputs(contract, args, result)
    for name, value in outputs.items():
        shared = [n for n, f in fences.items() if f.shares_memory(value)]
        if shared and value.numel():
            raise _Stop(Reason.ALIAS, name, f"shares memory with input {shared[0]}")
    for name, fence in fences.items():
        if not fence.intact():
            raise _Stop(Reason.FENCE, name, "memory outside the tensor was written")
    if not allocations.intact():
        raise _Stop(Reason.FENCE, "an allocation of the kernel", "memory outside it was written")
    for name, fence in fences.items():
        if name not in contract.mutates and not fence.unchanged():
            raise _Stop(Reason.UNTOUCHED, name, "the contract does not let the op write it")
    mutated = {name: fences[name].inner for name in contract.mutates if name in fences}
    return {n: v.detach().cpu().contiguous() for n, v in (*outputs.items(), *mutated.items())}


def _named_outputs(contract: OpContract, args: Args, result: object) -> dict[str, Tensor]:
    values = () if result is None else result if isinstance(result, tuple) else (result,)
    if len(values) != len(contract.outputs):
        raise _Stop(
            Reason.FORM, "", f"returned {len(values)} values, wanted {list(contract.outputs)}"
        )
    named: dict[str, Tensor] = {}
    for (name, spec), value in zip(contract.outputs.items(), values, strict=True):
        if type(value) is not Tensor:
            raise _Stop(Reason.FORM, name, f"is {type(value).__name__}, wanted a plain tensor")
        wanted = _output_dtype(contract, spec.role, args)
        if wanted is not None and value.dtype != wanted:
            raise _Stop(Reason.FORM, name, f"has dtype {value.dtype}, wanted {wanted}")
        named[name] = value
    return named


def _output_dtype(contract: OpContract, role: Role, args: Args) -> torch.dtype | None:
    if role is Role.F32:
        return torch.float32
    if role is not Role.ACT:
        return None
    acts = [
        args[n].dtype
        for n, s in contract.inputs.items()
        if s.role is Role.ACT and isinstance(args[n], Tensor)
    ]
    return acts[0] if acts else None


def _judge(contract: OpContract, args: Args, got: dict[str, Tensor]) -> float:
    truth = reference_values(contract, args, torch.float64)
    baseline = reference_values(contract, args, torch.float32)
    worst = 0.0
    for name, value in got.items():
        if value.shape != truth[name].shape:
            raise _Stop(
                Reason.FORM,
                name,
                f"has shape {tuple(value.shape)}, wanted {tuple(truth[name].shape)}",
            )
        evidence = Evidence(
            got=value, truth=truth[name], baseline=baseline[name], args=args, outputs=got
        )
        verdict = contract.checks[name].judge(evidence)
        if not verdict.ok:
            raise _Stop(Reason.NUMERICS, name, verdict.reason, verdict.worst)
        worst = max(worst, verdict.worst)
    return worst
