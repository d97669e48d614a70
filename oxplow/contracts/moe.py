"""Contracts of the moe ops (being written)."""

from oxplow.contracts.schema import OpContract

CONTRACTS: tuple[OpContract, ...] = ()
