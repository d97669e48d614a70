"""Every contract's reference as a bindable backend: slow, obvious, any device.

Owns the adapter from a pure reference to a kernel's calling form. Knows the contracts, no kernel.
Invariant: a reference kernel computes exactly what the contract says, in float32 or wider, so a
model that runs on these kernels tests the meaning of the contracts rather than any
implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from oxplow.contracts.schema import OpContract, Role
from oxplow.ops.table import Kernel, always


def reference_kernels(
    contracts: Iterable[OpContract], width: torch.dtype = torch.float32
) -> tuple[Kernel, ...]:
    """Return one kernel named "reference" per contract, computing in `width` (float32 or
    float64).
    """
    return tuple(
        Kernel(
            op=c.name,
            name="reference",
            run=_adapted(c, width),
            supports=always("the contract's own reference"),
            rank=-100,
        )
        for c in contracts
    )


def _adapted(contract: OpContract, width: torch.dtype) -> Callable[..., Any]:
    order = (*contract.inputs, *contract.scalars)

    def run(*positional: Any, **named: Any) -> Any:
        args = dict(zip(order, positional, strict=False)) | named
        act = next(
            (
                args[n].dtype
                for n, s in contract.inputs.items()
                if s.role is Role.ACT and args[n] is not None
            ),
            None,
        )
        wide = {n: _widened(v, width) for n, v in args.items()}
        values = contract.reference(**wide)
        for name in contract.mutates:
            args[name].copy_(values[name])
        outputs = tuple(
            _narrowed(values[n], spec.role, act, width) for n, spec in contract.outputs.items()
        )
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    return run


def _widened(value: Any, width: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(width)
    return value


def _narrowed(value: Tensor, role: Role, act: torch.dtype | None, width: torch.dtype) -> Tensor:
    if role is Role.ACT and act is not None:
        return value.to(act)
    return value.to(width) if role is Role.F32 else value
