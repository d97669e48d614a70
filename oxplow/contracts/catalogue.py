"""The catalogue of every op contract.

Owns the one list that tests, tables, benchmarks and the planner iterate over. Knows no kernel.
Invariant: names are unique and equal the contract's own.
"""

from collections.abc import Mapping
from types import MappingProxyType

from oxplow.contracts import (
    dense,
    hyper,
    index,
    kda,
    mla,
    moe,
    pool_keys,
    sampling,
    sparse_mla,
    vision,
)
from oxplow.contracts.schema import OpContract
from oxplow.errors import ContractError


def _catalogue(*families: tuple[OpContract, ...]) -> Mapping[str, OpContract]:
    by_name: dict[str, OpContract] = {}
    for contract in (c for family in families for c in family):
        if contract.name in by_name:
            raise ContractError(f"two contracts are called {contract.name!r}")
        by_name[contract.name] = contract
    return MappingProxyType(by_name)


CONTRACTS: Mapping[str, OpContract] = _catalogue(
    dense.CONTRACTS,
    hyper.CONTRACTS,
    kda.CONTRACTS,
    mla.CONTRACTS,
    pool_keys.CONTRACTS,
    index.CONTRACTS,
    sparse_mla.CONTRACTS,
    moe.CONTRACTS,
    vision.CONTRACTS,
    sampling.CONTRACTS,
)
