"""Which input of an op was read in fewer bits than it has.

Owns the experiment that tells rounding of one input from other errors: the reference is run with
that input rounded, and a candidate that agrees with it, though not with the truth, has rounded it.
Knows contracts and callables. Invariant: an input is named only if rounding it alone explains the
candidate on a case where the candidate fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.laws import Evidence
from oxplow.contracts.schema import Args, OpContract
from oxplow.errors import ContractError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.gate import reference_values

__all__ = ["narrowed_input"]

_NARROWER = (torch.bfloat16, torch.float16)
_MOST_CASES = 6


def narrowed_input(
    contract: OpContract, run: Callable[..., Any], *, seed: int = 0, repro: str = ""
) -> Finding | None:
    """Return a failure that names the input and the format, None where rounding explains nothing.

    `run` is called with the contract's inputs by name.
    """
    tried = 0
    for case in contract.cases:
        args = case.build(torch.Generator().manual_seed(seed))
        got = _outputs(contract, run, args)
        if got is None or _agrees(contract, args, got):
            continue
        tried += 1
        for name in contract.inputs:
            value = args.get(name)
            if not isinstance(value, Tensor) or value.dtype is not torch.float32:
                continue
            for narrow in _NARROWER:
                rounded = {**args, name: value.to(narrow).to(value.dtype)}
                if _agrees(contract, rounded, got):
                    return _found(contract, name, narrow, case.name, seed, repro)
        if tried == _MOST_CASES:
            break
    return None


def _found(
    contract: OpContract, name: str, narrow: torch.dtype, case: str, seed: int, repro: str
) -> Finding:
    short = str(narrow).removeprefix("torch.")
    return Finding(
        probe="inputs",
        verdict=Verdict.FAIL,
        summary=f"{contract.name} computes as if {name} were rounded to {short}"
        f" (case {case}: the reference with it rounded agrees, the truth does not)",
        locus=Locus(component="ops", op=contract.name, parameter=name),
        effect=Effect(name="format", value=1.0, unit="inputs narrowed"),
        excitation={"case": case, "seed": seed, "format": short},
        repro=repro,
    )


def _outputs(contract: OpContract, run: Callable[..., Any], args: Args) -> dict[str, Tensor] | None:
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()}
    try:
        out = run(**copies)
    except (RuntimeError, IndexError, TypeError, ContractError):
        return None  # the contract's own examination tells of it
    values = () if out is None else out if isinstance(out, tuple) else (out,)
    return dict(zip(contract.outputs, values, strict=True)) | {
        n: copies[n] for n in contract.mutates
    }


def _agrees(contract: OpContract, wanted: Args, got: Mapping[str, Tensor]) -> bool:
    """Judge outputs against the reference on `wanted`."""
    truth = reference_values(contract, wanted, torch.float64)
    baseline = reference_values(contract, wanted, torch.float32)
    for name, value in got.items():
        if value.shape != truth[name].shape:
            return False
        evidence = Evidence(
            got=value, truth=truth[name], baseline=baseline[name], args=wanted, outputs=dict(got)
        )
        if not contract.checks[name].judge(evidence).ok:
            return False
    return True
