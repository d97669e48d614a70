"""Contracts of the mla ops (being written)."""

from oxplow.contracts.schema import OpContract

CONTRACTS: tuple[OpContract, ...] = ()
