"""Switches: replace a kernel or a method of the engine while a context is open.

Owns the exchange and its undoing. Knows no fault. Invariant: after the context everything is the
object that it was; a planted function stands under the file, line and name of what it replaces,
because that is where a real fault would stand, so a profile or a traceback gives nothing away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from types import FunctionType, ModuleType
from typing import Any

from oxplow.ops.kernels import builtin_kernels

Run = Callable[..., Any]
Make = Callable[[Run], Run]


@contextmanager
def kernels_of(*ops: str, make: Make) -> Iterator[None]:
    """Replace `run` of every kernel of `ops` by `make(run)`; tables chosen inside get it."""
    replaced = [(kernel, kernel.run) for kernel in builtin_kernels() if kernel.op in ops]
    if {kernel.op for kernel, _ in replaced} != set(ops):
        raise AssertionError(f"no kernel for some of {ops}")
    for kernel, run in replaced:
        object.__setattr__(kernel, "run", _in_place_of(run, make(run)))
    try:
        yield
    finally:
        for kernel, run in replaced:
            object.__setattr__(kernel, "run", run)


@contextmanager
def attribute(owner: type | ModuleType, name: str, make: Make) -> Iterator[None]:
    """Replace a method or a module's function by `make(original)`."""
    raw = owner.__dict__[name]
    is_static = isinstance(raw, staticmethod)
    original = raw.__func__ if is_static else raw
    new = _in_place_of(original, make(original))
    setattr(owner, name, staticmethod(new) if is_static else new)
    try:
        yield
    finally:
        setattr(owner, name, raw)


@contextmanager
def value(owner: type | ModuleType, name: str, new: object) -> Iterator[None]:
    """Replace a constant."""
    old = owner.__dict__[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _in_place_of(original: Run, planted: Run) -> Run:
    if not (isinstance(original, FunctionType) and isinstance(planted, FunctionType)):
        return planted
    code = unwrap(original).__code__
    planted.__code__ = planted.__code__.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
    )
    planted.__name__, planted.__qualname__ = original.__name__, original.__qualname__
    planted.__module__, planted.__doc__ = original.__module__, original.__doc__
    return planted
