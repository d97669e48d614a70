"""Other shapes of a contract's cases: wished sizes for a benchmark, unforeseeable ones for a gate.

Owns the resizing of named axes. Knows no kernel. Invariant: what comes out satisfies the contract's
own constraints and its reference runs on it; an axis that indices or expressions depend on is left
as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oxplow.contracts.schema import Args, Case, CaseKind, OpContract, Role
from oxplow.errors import ContractError
from oxplow.feedback.gate import reference_values

__all__ = ["free_axes", "grown_case", "held_out_case", "resized"]

_INDICES = (Role.INT, Role.BOOL)
_TRIES = 24
_MOST_ELEMENTS = 1 << 18  # of one tensor of a held-out case: the references are slow
_LARGEST = 1 << 22  # elements of one tensor of a case grown for the clock
_FACTORS = (0.4, 2.7)


def free_axes(contract: OpContract) -> tuple[str, ...]:
    """Return the axes that may be resized: no expression mentions them, no index tensor has them.

    Whether the constraints allow a new size is known only when it is tried.
    """
    specs = list(contract.inputs.values())
    plain = {a for s in specs for a in s.axes if a.isidentifier()}
    words = {w for s in specs for a in s.axes if not a.isidentifier() for w in _names(a)}
    indexed = {a for s in specs if s.role in _INDICES for a in s.axes}
    return tuple(sorted(plain - words - indexed))


def resized(contract: OpContract, args: Args, sizes: Mapping[str, int], g: torch.Generator) -> Args:
    """Return copies of `args` whose axes have the given sizes: cut, or grown by altered repeats.

    Raises ContractError for an axis that is not free, or where a constraint does not hold.
    """
    unknown = sorted(set(sizes) - set(free_axes(contract)))
    if unknown:
        raise ContractError(
            f"{contract.name}: these axes cannot be resized",
            got=", ".join(unknown),
            wanted=", ".join(free_axes(contract)) or "none can",
        )
    made = dict(args)
    for name, spec in contract.inputs.items():
        value = made[name]
        if isinstance(value, Tensor):
            for dim, axis in enumerate(spec.axes):
                if axis in sizes:
                    value = _fit(value, dim, sizes[axis], g)
            made[name] = value
    contract.validate(made)
    return made


def held_out_case(contract: OpContract, case: Case, seed: int) -> Case | None:
    """Return a case of sizes drawn from `seed`; None where this case has no other size.

    Its values are drawn from `seed` too, so nobody who does not know it can have seen them.
    """
    rng = random.Random(seed)
    axes = free_axes(contract)
    for attempt in range(_TRIES):
        drawn = torch.Generator().manual_seed(rng.getrandbits(62))
        args = case.build(drawn)
        known = contract.validate(args)
        sized = [a for a in axes if known.get(a, 0) > 0]
        if not sized:
            return None
        alone = attempt >= _TRIES // 3  # axes may be bound to each other: then one at a time
        chosen = [rng.choice(sized)] if alone else [a for a in sized if rng.random() < 0.7]
        # indices that fit a large pool need not fit a small one, whatever the first draw shows
        least = 1.0 if any(s.role in _INDICES for s in contract.inputs.values()) else _FACTORS[0]
        sizes = {a: max(1, round(known[a] * rng.uniform(least, _FACTORS[1]))) for a in chosen}
        if all(sizes[a] == known[a] for a in sizes):
            continue
        if _runs(contract, args, sizes, drawn):
            shown = ",".join(f"{a}={n}" for a, n in sizes.items())
            return Case(f"held_out({case.name},{shown})", CaseKind.EXCITATION, _Builder(
                contract, case, sizes))  # fmt: skip
    return None


class _Builder:
    """Builds a resized case from any generator."""

    def __init__(self, contract: OpContract, case: Case, sizes: Mapping[str, int]) -> None:
        self._contract, self._case, self._sizes = contract, case, dict(sizes)

    def __call__(self, g: torch.Generator) -> Args:
        return resized(self._contract, self._case.build(g), self._sizes, g)


def _runs(contract: OpContract, args: Args, sizes: Mapping[str, int], g: torch.Generator) -> bool:
    try:
        made = resized(contract, args, sizes, g)
        tensors = [v for v in made.values() if isinstance(v, Tensor)]
        base = max(v.numel() for v in args.values() if isinstance(v, Tensor))
        if any(t.numel() > max(_MOST_ELEMENTS, 3 * base) for t in tensors):
            return False
        reference_values(contract, made, torch.float32)
    except (ContractError, IndexError, RuntimeError, ValueError, AssertionError):
        return False  # an unstated bond between axes: this is no case of the op
    return True


def _elements(contract: OpContract, known: Mapping[str, int], factors: Mapping[str, int]) -> int:
    """Return the elements of the largest input after its axes are multiplied."""
    sizes = {axis: size * factors.get(axis, 1) for axis, size in known.items()}
    shapes = [[sizes.get(a, 1) for a in spec.axes] for spec in contract.inputs.values()]
    return max(math.prod(shape) for shape in shapes)


def _fit(value: Tensor, dim: int, size: int, g: torch.Generator) -> Tensor:
    """Cut or grow one axis; repeats are shuffled and scaled by 0.75 to 1, so no two are equal."""
    if size <= value.shape[dim]:
        return value.narrow(dim, 0, size).clone()
    if value.shape[dim] == 0:
        raise ContractError("an empty axis cannot grow", wanted=size)
    grown = value
    while grown.shape[dim] < size:
        order = torch.randperm(grown.shape[dim], generator=g)
        more = _altered(_as_bytes(grown).index_select(dim, order).view(value.dtype), g)
        grown = torch.cat((_as_bytes(grown), _as_bytes(more)), dim).view(value.dtype)
    return grown.narrow(dim, 0, size).clone()


def _altered(value: Tensor, g: torch.Generator) -> Tensor:
    if value.dtype not in (torch.float32, torch.float64):
        return value  # codes of one byte have no finer steps
    return value * (0.75 + 0.25 * torch.rand(value.shape, generator=g).to(value.dtype))


def _as_bytes(value: Tensor) -> Tensor:
    """Return codes of one byte as integers, which every torch operation takes."""
    return value.view(torch.uint8) if value.element_size() == 1 else value


def _names(expression: str) -> set[str]:
    return {
        w for w in "".join(c if c.isalnum() else " " for c in expression).split() if w.isalpha()
    }


def grown_case(contract: OpContract, case: Case, enough: Callable[[Args], bool]) -> Case | None:
    """Return the case with all free axes enlarged until `enough`; None where that is not reached.

    Axes grow together, or one at a time where they are bound to each other.
    """
    args = case.build(torch.Generator().manual_seed(0))
    known = contract.validate(args)
    axes = [a for a in free_axes(contract) if known.get(a, 0) > 0]
    for chosen in (axes, *([a] for a in axes)):
        for power in range(14):
            if _elements(contract, known, dict.fromkeys(chosen, 2**power)) > _LARGEST:
                if chosen is axes:
                    return None  # they do grow together, and even so it is not enough
                break
            sizes = {a: known[a] * 2**power for a in chosen}
            g = torch.Generator().manual_seed(0)
            try:
                made = resized(contract, args, sizes, g)
            except ContractError:
                break
            if enough(made):
                shown = ",".join(f"{a}={n}" for a, n in sizes.items())
                return Case(f"{case.name}({shown})", case.kind, _Builder(contract, case, sizes))
    return None
