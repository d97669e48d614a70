"""Contracts of the sampling ops (being written)."""

from oxplow.contracts.schema import OpContract

CONTRACTS: tuple[OpContract, ...] = ()
