"""What a piece of work must move and compute at least, counted through the contracts' cost models.

Owns the counting op table and its tally. Knows the contracts, no engine and no model.
Invariant: counting changes no result; every op call adds exactly its contract's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oxplow.contracts.schema import Cost, OpContract
from oxplow.ops.table import OpTable

__all__ = ["Tally", "counting_table"]


@dataclass(slots=True)
class Tally:
    """Calls and least cost by op since the last reset."""

    calls: dict[str, int] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything counted so far."""
        self.calls.clear()
        self.costs.clear()

    def add(self, op: str, cost: Cost) -> None:
        """Add one call of `op`."""
        self.calls[op] = self.calls.get(op, 0) + 1
        old = self.costs.get(op, Cost(bytes=0, flops=0))
        self.costs[op] = Cost(bytes=old.bytes + cost.bytes, flops=old.flops + cost.flops)

    @property
    def total(self) -> Cost:
        """The sum over all ops."""
        return Cost(
            bytes=sum(c.bytes for c in self.costs.values()),
            flops=sum(c.flops for c in self.costs.values()),
        )


def counting_table(ops: OpTable, contracts: Mapping[str, OpContract]) -> tuple[OpTable, Tally]:
    """Return a table with the same kernels that also counts the cost of every call."""
    tally = Tally()
    kernels = {
        name: replace(kernel, run=_counted(contracts[name], kernel.run, tally))
        for name, kernel in ops.kernels.items()
    }
    return OpTable(kernels, ops.explain(), ops.facts), tally


def _counted(contract: OpContract, run: Callable[..., Any], tally: Tally) -> Callable[..., Any]:
    order = (*contract.inputs, *contract.scalars)

    def counted(*positional: Any, **named: Any) -> Any:
        args = dict(zip(order, positional, strict=False)) | named
        tally.add(contract.name, contract.cost(args))
        return run(**args)

    return counted
