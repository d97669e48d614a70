"""Contracts of the hyper ops (being written)."""

from oxplow.contracts.schema import OpContract

CONTRACTS: tuple[OpContract, ...] = ()
