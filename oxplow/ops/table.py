"""Which kernel computes which op: records, reasons, one selection at start, frozen afterwards.

Owns the `Kernel` record, the choice among candidates and its explanation. Knows nothing about
what an op means beyond its contract's name, and never probes a device while a step runs.
Invariant: an `OpTable` is complete (every op has exactly one kernel) and does not change after
`select`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from oxplow.errors import ContractError, KernelUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a kernel may ask before it says yes: the device, the dtypes, the mode and the model's
    sizes.

    `sizes` holds constant axes of the model by name (for instance "head_dim"); a kernel must
    treat a missing size as "unknown". `invariant` asks for batch- and split-invariant bits
    (`--deterministic`).
    """

    device: torch.device
    dtype: torch.dtype
    invariant: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Support:
    """A kernel's answer: usable or not, and why."""

    ok: bool
    reason: str


def always(reason: str = "plain torch, any device") -> Callable[[Facts], Support]:
    """Return a `supports` that accepts everything, for portable kernels."""
    return lambda facts: Support(ok=True, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation of one op.

    `run` takes the contract's inputs in order (or by name) and its scalars by name, mutates
    exactly what the contract says and returns the outputs (one tensor, a tuple, or None).
    `invariant` promises that a row's bits depend neither on other rows nor on how a sequence is
    split into calls. Among usable kernels the highest `rank` wins; a preference by name wins over
    rank. `layouts` says for weights, by input name, how the kernel reads them best: a function that
    returns the tensor itself, or a copy with the same values, shape and dtype and other strides.
    """

    op: str
    name: str
    run: Callable[..., Any]
    supports: Callable[[Facts], Support] = field(default_factory=always)
    invariant: bool = False
    rank: int = 0
    layouts: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Why an op got its kernel: the chosen one, its reason, and every rejected one with its
    reason.
    """

    op: str
    chosen: str
    reason: str
    rejected: tuple[tuple[str, str], ...]


class OpTable:
    """The frozen answer: `table.rms_norm(x, weight, eps=...)` calls the chosen kernel directly."""

    def __init__(
        self, kernels: Mapping[str, Kernel], choices: tuple[Choice, ...], facts: Facts
    ) -> None:
        self._kernels = MappingProxyType(dict(kernels))
        self._choices = choices
        self.facts = facts
        for op, kernel in kernels.items():
            self.__dict__[op] = kernel.run  # an instance attribute: no lookup cost in the step path
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise ContractError(
                f"op table: {name} set after the freeze; select a new table instead"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # copy and pickle probe for these
            raise AttributeError(name)
        raise ContractError(f"op table has no op {name!r}", wanted=sorted(self._kernels))

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The chosen kernel of every op, read-only."""
        return self._kernels

    def lay(self, op: str, name: str, weight: Tensor) -> Tensor:
        """Return `weight` as the op's kernel reads it best: itself, or a copy with other strides.

        For the owner of a weight, once, when it is bound; a kernel takes any strides at any time.
        """
        layout = self._kernels[op].layouts.get(name)
        return weight if layout is None else layout(weight)

    def explain(self) -> tuple[Choice, ...]:
        """Return one Choice per op, in the order of the contracts."""
        return self._choices


def collect(kernels: Iterable[Kernel], ops: Iterable[str]) -> dict[str, list[Kernel]]:
    """Group kernels by op; raises ContractError for an unknown op or two kernels of one name."""
    grouped: dict[str, list[Kernel]] = {op: [] for op in ops}
    for kernel in kernels:
        if kernel.op not in grouped:
            raise ContractError(
                f"kernel {kernel.name}: op {kernel.op!r} has no contract", wanted=sorted(grouped)
            )
        if any(k.name == kernel.name for k in grouped[kernel.op]):
            raise ContractError(f"kernel {kernel.name}: registered twice for op {kernel.op!r}")
        grouped[kernel.op].append(kernel)
    return grouped


def select(
    kernels: Iterable[Kernel],
    ops: Iterable[str],
    facts: Facts,
    prefer: Mapping[str, str] | None = None,
) -> OpTable:
    """Choose one kernel per op for `facts` and freeze the result.

    `prefer` maps op to kernel name (measured winners, or a person's wish); a preferred kernel that
    cannot run is an error, never a silent fallback. Raises KernelUnavailable with every rejection.
    """
    ops = tuple(ops)
    prefer = dict(prefer or {})
    unknown = sorted(set(prefer) - set(ops))
    if unknown:
        raise ContractError(f"kernel preferences: no op {unknown}, known are {sorted(ops)}")
    chosen: dict[str, Kernel] = {}
    choices: list[Choice] = []
    for op, candidates in collect(kernels, ops).items():
        choice = _choose(op, candidates, facts, prefer.get(op))
        chosen[op] = next(k for k in candidates if k.name == choice.chosen)
        choices.append(choice)
    return OpTable(chosen, tuple(choices), facts)


def _choose(op: str, candidates: list[Kernel], facts: Facts, wish: str | None) -> Choice:
    answers = [(kernel, _answer(kernel, facts)) for kernel in candidates]
    usable = [(kernel, support) for kernel, support in answers if support.ok]
    if wish is not None:
        usable = [(kernel, support) for kernel, support in usable if kernel.name == wish]
    if not usable:
        refused = [
            (k.name, s.reason if not s.ok else "usable, but not the preferred one")
            for k, s in answers
        ]
        if wish is not None and all(k.name != wish for k in candidates):
            refused.append((wish, "no kernel of that name is registered"))
        raise KernelUnavailable(op, refused, where=f"{facts.device} in {facts.dtype}")
    best, support = max(usable, key=lambda pair: pair[0].rank)
    why = f"preferred by name; {support.reason}" if wish else support.reason
    rejected = tuple((k.name, _loss(s, k, best, wish)) for k, s in answers if k is not best)
    return Choice(op=op, chosen=best.name, reason=why, rejected=rejected)


def _loss(support: Support, kernel: Kernel, best: Kernel, wish: str | None) -> str:
    if not support.ok:
        return support.reason
    return (
        "usable, not the preferred one" if wish else f"usable, rank {kernel.rank} under {best.rank}"
    )


def _answer(kernel: Kernel, facts: Facts) -> Support:
    if facts.invariant and not kernel.invariant:
        return Support(
            ok=False, reason="its bits depend on the batch or the split, and --deterministic is on"
        )
    return kernel.supports(facts)
