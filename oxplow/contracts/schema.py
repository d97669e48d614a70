"""What an op means, as data: axes, tensors, constraints, reference, cases, checks and cost.

Owns the record types that every contract is made of, and nothing about who computes an op (that is
`ops`) or how a candidate is judged in detail (`contracts.laws` holds the tolerance law).
Invariant: a contract is frozen, its reference is a pure function that never calls a kernel, and its
cases build fresh inputs from a seed, so that any kernel can be examined again with unseen data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch

from oxplow.contracts.laws import Check
from oxplow.errors import ContractError

Value: TypeAlias = Any
Args: TypeAlias = dict[str, Value]


class Role(Enum):
    """The dtype family of a tensor; the examined activation dtype decides ACT."""

    ACT = "act"  # the activation dtype under examination: float32 or bfloat16
    WEIGHT = "weight"  # stored weights: the activation dtype, or bfloat16 under float32 arithmetic
    F32 = "f32"  # always float32, whatever the activations are (model.md section 8)
    E4M3 = "e4m3"  # one byte, torch.float8_e4m3fn
    INT = "int"  # int64 or int32 indices
    BOOL = "bool"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an op: a role and named axes, outermost first.

    An axis is a name ("T"), or an expression of names understood by `Axes` ("W-1", "T/4").
    `optional` tensors may be None. The axis letters are explained in the contract's `axes`.
    """

    role: Role
    axes: tuple[str, ...]
    optional: bool = False


def tensor(role: Role, axes: str, *, optional: bool = False) -> TensorSpec:
    """Write a TensorSpec as one line: `tensor(Role.ACT, "T H K")`."""
    return TensorSpec(role=role, axes=tuple(axes.split()), optional=optional)


class CaseKind(Enum):
    """Why a case exists."""

    ORDINARY = "ordinary"  # shapes that service sees every day
    EDGE = "edge"  # borders: length 0 and 1, block edges, padding rows, odd sizes
    EXCITATION = "excitation"  # inputs that make a specific fault visible; the name says which


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe for fresh inputs: `build(generator)` returns every argument of the op by name.

    Floating tensors come in float32 (or exactly float8 for E4M3); the examiner rounds ACT tensors
    to the dtype under examination before both the reference and the candidate see them. `note`
    says which fault the case excites, where `kind` is EXCITATION.
    """

    name: str
    kind: CaseKind
    build: Callable[[torch.Generator], Args]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """Least work of one call: bytes that must move and floating point operations that must be
    done.
    """

    bytes: int
    flops: int


def moved_bytes(args: Args, *names: str) -> int:
    """Return the bytes of the named tensors, each counted once; absent ones count nothing."""
    tensors = [args[name] for name in names]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule that inputs obey, in words and as a predicate over the arguments."""

    text: str
    holds: Callable[[Args], bool]


@dataclass(frozen=True, kw_only=True)
class OpContract:
    """The meaning of one op.

    `inputs` are in call order, `scalars` follow them as keywords. `reference(**args)` is pure: it
    works in the dtype of its floating inputs (float64 under examination), mutates nothing and
    returns every output and the new value of every tensor in `mutates`, by name. `checks` names
    one check for each of these. `cost(args)` counts the floor. `dtypes` lists the activation
    dtypes the op is examined in.
    """

    name: str
    summary: str
    source: str
    axes: Mapping[str, str]
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    reference: Callable[..., dict[str, torch.Tensor]]
    cases: tuple[Case, ...]
    checks: Mapping[str, Check]
    cost: Callable[[Args], Cost]
    scalars: Mapping[str, str] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __post_init__(self) -> None:
        missing = [n for n in (*self.outputs, *self.mutates) if n not in self.checks]
        if missing:
            raise ContractError(f"contract {self.name}: no check for {missing}")
        stray = [n for n in self.mutates if n not in self.inputs]
        if stray:
            raise ContractError(f"contract {self.name}: mutates {stray}, which are no inputs")
        names = [c.name for c in self.cases]
        if len(names) != len(set(names)):
            raise ContractError(f"contract {self.name}: two cases share a name in {names}")
        if {c.kind for c in self.cases} != set(CaseKind):
            raise ContractError(
                f"contract {self.name}: cases of kind {sorted({c.kind.value for c in self.cases})},"
                " wanted ordinary, edge and excitation"
            )

    def case(self, name: str) -> Case:
        """Return the case called `name`; raises ContractError with the known names."""
        for case in self.cases:
            if case.name == name:
                return case
        raise ContractError(
            f"contract {self.name}: no case {name!r}, has {[c.name for c in self.cases]}"
        )

    def validate(self, args: Args) -> dict[str, int]:
        """Check names, ranks, axis sizes and constraints of `args`; return the size of every
        named axis.

        Raises ContractError that names the op, the tensor, what it got and what was wanted.
        """
        wanted = [*self.inputs, *self.scalars]
        if sorted(args) != sorted(wanted):
            raise ContractError(
                f"{self.name}: got arguments {sorted(args)}, wanted {sorted(wanted)}"
            )
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            _bind_axes(self.name, name, spec, args[name], sizes)
        for rule in self.constraints:
            if not rule.holds(args):
                raise ContractError(f"{self.name}: the inputs break the rule: {rule.text}")
        return sizes


def _bind_axes(op: str, name: str, spec: TensorSpec, value: object, sizes: dict[str, int]) -> None:
    if value is None and spec.optional:
        return
    if not isinstance(value, torch.Tensor):
        raise ContractError(f"{op}: {name} is {type(value).__name__}, wanted a tensor {spec.axes}")
    if value.ndim != len(spec.axes):
        raise ContractError(f"{op}: {name} has shape {tuple(value.shape)}, wanted axes {spec.axes}")
    for axis, got in zip(spec.axes, value.shape, strict=True):
        if (
            not axis.isidentifier()
        ):  # an expression such as "N+1" or a literal: judged once all names are known
            continue
        if sizes.setdefault(axis, got) != got:
            raise ContractError(
                f"{op}: {name} has {axis} = {got}",
                got=tuple(value.shape),
                wanted=f"{axis} = {sizes[axis]}",
            )
