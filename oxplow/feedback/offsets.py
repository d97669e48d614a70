"""Do kernels still find their rows in a pool of more than 2**31 elements?

Owns the index probe: a contract's case with its blocks and slots moved to the end of a pool so
large that an element offset of 32 bits wraps. Knows contracts and callables, no model. Invariant:
the pool is memory that the system hands out untouched, so only rows in use cost anything; the
answer must have the bits of the same case in a small pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oxplow.contracts.schema import Args, Case, CaseKind, OpContract
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

__all__ = ["ELEMENTS", "check_offsets", "has_pools"]

ELEMENTS = 1 << 31
"""Elements at which a signed offset of 32 bits wraps."""

_POOL_AXES = ("B", "slots")
_INDICES = ("slot_mapping", "block_table", "state_slots")


def has_pools(contract: OpContract) -> bool:
    """Tell whether an op finds rows of a pool by index."""
    return bool(_pools(contract)) and any(name in contract.inputs for name in _INDICES)


def check_offsets(
    contract: OpContract, run: Callable[..., Any], *, seed: int = 0, repro: str = ""
) -> Finding:
    """Run one ordinary case in a small and in a huge pool; fail where a bit differs.

    `run` is called with the contract's inputs by name. Inconclusive where the system gives no such
    amount of memory.
    """
    began = time.perf_counter()
    case = next(c for c in contract.cases if c.kind is CaseKind.ORDINARY)
    excitation = {"op": contract.name, "case": case.name, "elements": ELEMENTS, "seed": seed}
    small = _built(contract, case, seed)
    try:
        huge, shifts = _moved(contract, _built(contract, case, seed))
    except (MemoryError, RuntimeError) as error:
        return Finding(
            probe="offsets", verdict=Verdict.INCONCLUSIVE, excitation=excitation, repro=repro,
            summary=f"{contract.name}: no room for a pool of {ELEMENTS} elements ({error})",
        )  # fmt: skip
    wrong = _first_difference(contract, run, small, huge, shifts)
    effect = Effect(name="wrong outputs", value=float(bool(wrong)), unit="outputs", bound=0.0)
    spent = time.perf_counter() - began
    if not wrong:
        return Finding(
            probe="offsets", verdict=Verdict.PASS, excitation=excitation, effect=effect,
            summary=f"{contract.name} finds its rows beyond {ELEMENTS} elements",
            repro=repro, cost_s=spent,
        )  # fmt: skip
    index = next(name for name in _INDICES if name in contract.inputs)
    return Finding(
        probe="offsets", verdict=Verdict.FAIL, excitation=excitation, effect=effect,
        summary=f"{contract.name}: {wrong} differs when its rows lie beyond {ELEMENTS} elements:"
        f" an offset made from {index} is too narrow",
        locus=Locus(component="ops", op=contract.name, parameter=index), repro=repro, cost_s=spent,
    )  # fmt: skip


def _pools(contract: OpContract) -> tuple[str, ...]:
    return tuple(n for n, s in contract.inputs.items() if s.axes and s.axes[0] in _POOL_AXES)


def _built(contract: OpContract, case: Case, seed: int) -> Args:
    args = case.build(torch.Generator().manual_seed(seed))
    contract.validate(args)
    return args


def _moved(contract: OpContract, args: Args) -> tuple[Args, Mapping[str, int]]:
    """Lay every pool at the end of a huge one, and move the indices with it."""
    shifts: dict[str, int] = {}
    by_axis: dict[str, int] = {}
    for name in _pools(contract):
        axis, pool = contract.inputs[name].axes[0], args[name]
        by_axis[axis] = max(by_axis.get(axis, 0), -(-ELEMENTS // max(1, pool[0].numel())) + 1)
    for name in _pools(contract):
        pool, shift = args[name], by_axis[contract.inputs[name].axes[0]]
        args[name] = _untouched((shift + pool.shape[0], *pool.shape[1:]), pool.dtype)
        args[name][shift:] = pool
        shifts[name] = shift
    blocks, slots = by_axis.get("B", 0), by_axis.get("slots", 0)
    size = next((args[n].shape[1] for n in _pools(contract) if n == "cache"), 1)
    moves = {"slot_mapping": blocks * size, "block_table": blocks, "state_slots": slots}
    for name, move in moves.items():
        if name in args:
            index = args[name].long()
            args[name] = torch.where(index >= 0, index + move, index)
    return args, shifts


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages the system gives only when they are written."""
    count = torch.Size(shape).numel()
    raw = torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8))
    return raw.view(dtype).view(shape)


def _first_difference(
    contract: OpContract,
    run: Callable[..., Any],
    small: Args,
    huge: Args,
    shifts: Mapping[str, int],
) -> str:
    """Return the first output or pool whose bits differ, "" where none does."""
    results = []
    for args in (small, huge):
        try:
            out = run(**args)
        except (IndexError, RuntimeError) as error:
            return f"the call ({type(error).__name__})"
        results.append(() if out is None else out if isinstance(out, tuple) else (out,))
    for name, ours, theirs in zip(contract.outputs, *results, strict=True):
        if not _same_bits(ours, theirs):
            return name
    for name in contract.mutates:
        tail = huge[name][shifts[name] :] if name in shifts else huge[name]
        if not _same_bits(small[name], tail):
            return name
    return ""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = one.contiguous().view(-1), other.contiguous().view(-1)
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
