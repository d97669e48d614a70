"""From a failing kernel to the smallest call that still fails, as a file that anybody can run.

Owns the search over a contract's cases, axes and values, and the repro file. Knows contracts and
callables, no model. Invariant: every step keeps the reason and the tensor of the first failure;
what is written has failed three times in a row, holds its own inputs and needs no seed, checkpoint
or record.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Args, Case, CaseKind, OpContract
from oxplow.errors import ContractError
from oxplow.feedback.gate import Finding, Reason, examine
from oxplow.feedback.isolate import load_candidate
from oxplow.feedback.shapes import free_axes, resized

__all__ = ["Shrunk", "replay", "repro_file", "shrink", "unpack"]

Run: TypeAlias = Callable[..., Any]

_CONFIRMED = 3
_MOST_TRIALS = 400
_LITERAL = 16  # elements of a tensor that the file shows as numbers
_NO_CASE = (ContractError, IndexError, RuntimeError, ValueError, AssertionError)
"""What a reference raises for inputs that are no case of the op, such as an index past a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A failing call: its inputs, how it fails, and elements before and after the search."""

    op: str
    case: str
    args: Args
    ruling: Finding
    elements_before: int
    elements_after: int
    trials: int


@dataclass(slots=True)
class _Search:
    """The failure that is kept, and how often the kernel was examined."""

    contract: OpContract
    run: Run
    device: torch.device | None
    reason: Reason = Reason.PASSED
    tensor: str = ""
    trials: int = 0
    last: Finding | None = field(default=None)

    def ruling(self, args: Args) -> Finding | None:
        """Examine the kernel on these inputs; None where they are no case of the op."""
        self.trials += 1
        try:
            return _examined(self.contract, self.run, args, self.device)
        except _NO_CASE:
            return None

    def still_fails(self, args: Args) -> bool:
        """Tell whether the same check fails at the same tensor."""
        if self.trials >= _MOST_TRIALS:
            return False
        found = self.ruling(args)
        if found is None or (found.reason, found.tensor) != (self.reason, self.tensor):
            return False
        self.last = found
        return True


def shrink(
    contract: OpContract, run: Run, *, seed: int = 0, device: torch.device | None = None
) -> Shrunk | None:
    """Return the smallest failing call found; None where no case fails with its inputs frozen.

    `run` is called with the contract's inputs by name, on `device` (None: the CPU). The search is
    greedy: smallest failing case, then each free axis, then values to one, zero or zero in part.
    """
    search = _Search(contract, run, device)
    failing: list[tuple[int, str, Args, Finding]] = []
    for case in contract.cases:
        args = case.build(torch.Generator().manual_seed(seed))
        found = search.ruling(args)
        if found is not None and not found.ok:
            failing.append((_elements(args), case.name, args, found))
    if not failing:
        return None
    before, name, args, first = min(failing, key=lambda entry: entry[0])
    search.reason, search.tensor, search.last = first.reason, first.tensor, first
    args = _smaller_values(search, _smaller_axes(search, args))
    search.trials = 0  # the confirmation is not rationed
    if not all(search.still_fails(args) for _ in range(_CONFIRMED)):
        return None  # it comes and goes: no file could promise to show it
    return Shrunk(
        op=contract.name,
        case=name,
        args=args,
        ruling=search.last,
        elements_before=before,
        elements_after=_elements(args),
        trials=search.trials,
    )


def _examined(contract: OpContract, run: Run, args: Args, device: torch.device | None) -> Finding:
    frozen = Case("shrunk", CaseKind.EXCITATION, lambda g: _copy(args))
    return examine(contract, "shrunk", run, frozen, device=device)


def _copy(args: Args) -> Args:
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in args.items()}


def _elements(args: Args) -> int:
    return sum(v.numel() for v in args.values() if isinstance(v, Tensor))


def _smaller_axes(search: _Search, args: Args) -> Args:
    """Cut each free axis to the least size that a bisection finds, until nothing more goes."""
    contract, shrunk = search.contract, True
    while shrunk:
        shrunk = False
        for axis in free_axes(contract):
            low, high = 0, contract.validate(args).get(axis, 0)
            while high - low > 1:
                size = (low + high) // 2 if low else 1
                cut = _cut(contract, args, axis, size)
                if cut is not None and search.still_fails(cut):
                    args, high, shrunk = cut, size, True
                else:
                    low = size
    return args


def _cut(contract: OpContract, args: Args, axis: str, size: int) -> Args | None:
    try:
        return resized(contract, args, {axis: size}, torch.Generator())
    except ContractError:
        return None


def _smaller_values(search: _Search, args: Args) -> Args:
    """Make each floating tensor as plain as the failure allows."""
    for name, value in args.items():
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point or not value.numel():
            continue
        for plain in _plainer(value):
            tried = {**args, name: plain}
            if search.still_fails(tried):
                args = tried
                break
        else:
            args = _zeroed(search, args, name)
    return args


def _plainer(value: Tensor) -> Iterator[Tensor]:
    yield torch.zeros_like(value)
    if value.element_size() > 1:
        yield torch.ones_like(value)


def _zeroed(search: _Search, args: Args, name: str) -> Args:
    """Zero runs of a tensor's elements, halves first, where the failure stays."""
    count = args[name].numel()
    if args[name].element_size() == 1:
        return args
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            value = args[name].clone().contiguous()
            run = value.view(-1)[start : start + size]
            if not run.count_nonzero():
                continue
            run.zero_()
            tried = {**args, name: value}
            if search.still_fails(tried):
                args = tried
        size //= 2
    return args


# The file.


def repro_file(found: Shrunk, spec: str, device: str = "cpu") -> str:
    """Return a Python program that repeats the failure: exit code 1 while it fails, else 0.

    `spec` names the kernel, as `isolate.load_candidate` reads it: "kernel:NAME", "FILE.py:NAME".
    """
    lines = [f"    {name!r}: {_written(value)}," for name, value in found.args.items()]
    return "\n".join(
        (
            f'"""{found.op} by {spec.rpartition("/")[2]} breaks its contract: '
            f"{found.ruling.reason.value} at {found.ruling.tensor or 'the call'}.",
            "",
            "Run this file with the Python that has Oxplow: exit code 1 while it fails, else 0.",
            '"""',
            "",
            "import sys",
            "",
            "import torch",
            "",
            "from oxplow.feedback.shrink import replay, unpack",
            "",
            "ARGS = {",
            *lines,
            "}",
            "",
            'if __name__ == "__main__":',
            f"    ok, told = replay({found.op!r}, {spec!r}, ARGS, {device!r})",
            "    print(told)",
            "    sys.exit(0 if ok else 1)",
            "",
        )
    )


def replay(op: str, spec: str, args: Mapping[str, Any], device: str = "cpu") -> tuple[bool, str]:
    """Examine the kernel `spec` of `op` on frozen inputs; return whether it passes, and words.

    Raises ConfigError for an unknown kernel, ContractError for inputs that do not fit.
    """
    run = load_candidate(spec, op)
    found = _examined(CONTRACTS[op], run, dict(args), torch.device(device))
    return found.ok, str(replace(found, kernel=spec))


def unpack(dtype: str, shape: tuple[int, ...], text: str) -> Tensor:
    """Return the tensor that a repro file holds as compressed bytes."""
    raw = bytearray(zlib.decompress(base64.b85decode(text)))
    kind: torch.dtype = getattr(torch, dtype)
    if not raw:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).view(shape)


def _written(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    wide = value.element_size() > 1 or not value.dtype.is_floating_point
    if wide and 0 < value.numel() <= _LITERAL and bool(value.isfinite().all()):
        return f"torch.tensor({value.tolist()!r}, dtype=torch.{dtype})"
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    text = base64.b85encode(zlib.compress(raw, 9)).decode()
    return f"unpack({dtype!r}, {tuple(value.shape)!r}, {text!r})"
