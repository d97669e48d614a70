"""Contracts of the vision ops (being written)."""

from oxplow.contracts.schema import OpContract

CONTRACTS: tuple[OpContract, ...] = ()
