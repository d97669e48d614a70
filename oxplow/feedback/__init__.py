"""Instruments: evidence about what is wrong or slow, local, cheap and verifiable.

Imports layers L0 to L2 only; the engine never imports this room.
"""
