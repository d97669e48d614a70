"""What each op means: one record per op with reference, cases, tolerance law and cost.

`CONTRACTS` is the catalogue, in the order of the model's data flow. Imports no kernel.
"""

from oxplow.contracts.catalogue import CONTRACTS

__all__ = ["CONTRACTS"]
