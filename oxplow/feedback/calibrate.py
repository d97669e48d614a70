"""What this machine can do at best: the profile that floors are computed from.

Owns the measurements, the profile and its file. Knows no op and no model. Invariant: every rate is
the best of several runs, so that a busy machine makes a floor no higher than it is; a profile names
what it was measured on, when, and under which load, and is used for that machine only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oxplow.contracts.schema import Cost
from oxplow.errors import ConfigError
from oxplow.feedback.environment import capture
from oxplow.feedback.measure import Interval, compare

__all__ = [
    "Floor",
    "MachineProfile",
    "calibrate",
    "fingerprint",
    "load_profile",
    "profile_path",
    "save_profile",
    "settle",
]

_VERSION = 1
_SIZES = tuple(2**e for e in (15, 17, 19, 21, 23, 25, 27))
_MATMUL = {"cpu": (192, 320, 768), "other": (2048, 4096)}
"""Widths of the products: a short one finds a moment that nobody else disturbs."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_STALE_S = 30 * 86400.0
_CONTROL_PAIRS = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least seconds of a piece of work, and what sets it: bytes, flops or launch."""

    seconds: float
    bound_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Best rates of one device under a number of threads.

    `read_bytes_s` and `copy_bytes_s` hold (working set in bytes, bytes per second); a copy counts
    bytes read and written. `flops_s` is by dtype, absent where the device has no such product.
    `dispatch_s` is the least cost of one torch call, `launch_s` of one call and its wait, `timer_s`
    of one look at the clock. `control` is a ratio of equal work to itself: how wide "equal" was.
    `made_at` counts seconds since 1970, `load` the processes that ran beside.
    """

    fingerprint: str
    device: str
    device_name: str
    threads: int
    torch: str
    made_at: float
    load: float
    read_bytes_s: tuple[tuple[int, float], ...]
    copy_bytes_s: tuple[tuple[int, float], ...]
    flops_s: dict[str, float]
    dispatch_s: float
    launch_s: float
    timer_s: float
    control: Interval
    cost_s: float

    @property
    def age_s(self) -> float:
        """Seconds since it was measured."""
        return max(0.0, time.time() - self.made_at)

    @property
    def is_stale(self) -> bool:
        """Tell whether it is older than a month."""
        return self.age_s > _STALE_S

    def bandwidth(self, num_bytes: int) -> float:
        """Return the best rate of any working set that is not much smaller than `num_bytes`.

        Contents of a cache are read faster than memory: the floor allows for that.
        """
        smaller = [size for size, _ in self.read_bytes_s if size <= num_bytes]
        least = max(smaller, default=0)
        rates = [r for size, r in (*self.read_bytes_s, *self.copy_bytes_s) if size >= least]
        return max(rates)

    def floor(self, cost: Cost, dtype: str = "float32") -> Floor:
        """Return the least seconds of work that moves and computes `cost`."""
        peak = self.flops_s.get(dtype) or max(self.flops_s.values())
        parts = {
            "bytes": cost.bytes / self.bandwidth(cost.bytes),
            "flops": cost.flops / peak,
            "launch": self.dispatch_s,
        }
        bound_by = max(parts, key=lambda name: parts[name])
        return Floor(seconds=parts[bound_by], bound_by=bound_by)

    def origin(self) -> str:
        """Say in one line where the rates come from."""
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.made_at))
        days = self.age_s / 86400
        return (
            f"measured on {self.device_name} with {self.threads} thread(s), {when}"
            f" ({days:.1f} days ago), load {self.load:.1f}"
        )

    def row(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"version": _VERSION, **asdict(self)}


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def fingerprint(device: torch.device, threads: int) -> str:
    """Return 16 hex digits of what a profile is valid for: machine, cores, device, torch."""
    facts = capture(device)
    known = [facts.get(n, "") for n in ("cpu.model", "cpu.affinity", "cpu.limit", "device.name")]
    parts = [_VERSION, platform.machine(), *known, str(device), threads, torch.__version__]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def calibrate(
    device: torch.device,
    threads: int,
    tell: Callable[[str], None] = lambda _: None,
    *,
    budget_s: float = 6.0,
) -> MachineProfile:
    """Measure for about `budget_s` seconds; `tell` hears what is being measured."""
    began = time.perf_counter()
    each = budget_s / 40
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sizes = _SIZES if device.type == "cpu" else (*_SIZES, 2**30)
        tell("read bandwidth")
        read = tuple((size, _read_rate(device, size, each)) for size in sizes)
        tell("copy bandwidth")
        copy = tuple((size, _copy_rate(device, size, each)) for size in sizes)
        tell("matrix products")
        peaks = {name: _matmul_rate(device, dtype, each) for name, dtype in _DTYPES.items()}
        tell("calls and clocks")
        dispatch, launch = _call_costs(device, each)
        tell("equal work against itself")
        control = _control(device)
        return MachineProfile(
            fingerprint=fingerprint(device, threads),
            device=str(device),
            device_name=_device_name(device),
            threads=threads,
            torch=torch.__version__,
            made_at=time.time(),
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
            read_bytes_s=read,
            copy_bytes_s=copy,
            flops_s={name: rate for name, rate in peaks.items() if rate is not None},
            dispatch_s=dispatch,
            launch_s=launch,
            timer_s=_timer_cost(),
            control=control,
            cost_s=time.perf_counter() - began,
        )
    finally:
        torch.set_num_threads(kept)


def profile_path(folder: Path, mark: str) -> Path:
    """Return the file of the profile with fingerprint `mark`."""
    return folder / "profiles" / f"{mark}.json"


def save_profile(profile: MachineProfile, folder: Path) -> Path:
    """Write the profile, whole or not at all. Raises ConfigError where the folder refuses."""
    path = profile_path(folder, profile.fingerprint)
    spare = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare.write_text(json.dumps(profile.row(), indent=1))
        os.replace(spare, path)
    except OSError as error:
        raise ConfigError(f"the profile cannot be kept: {error}", where=str(path)) from error
    return path


def load_profile(folder: Path, mark: str) -> MachineProfile | None:
    """Read the profile with fingerprint `mark`; None where there is none of this version.

    Raises ConfigError for a damaged file.
    """
    path = profile_path(folder, mark)
    if not path.exists():
        return None
    try:
        row = json.loads(path.read_text())
        if row.pop("version") != _VERSION or row["fingerprint"] != mark:
            return None
        row["control"] = Interval(**row["control"])
        for name in ("read_bytes_s", "copy_bytes_s"):
            row[name] = tuple((int(size), float(rate)) for size, rate in row[name])
        return MachineProfile(**row)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"this is no machine profile: {error!r}", wanted="oxplow calibrate", where=str(path)
        ) from error


def _best(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the least seconds of one call within a budget of time, at least five calls."""
    work()
    settle(device)
    best, spent, calls = math.inf, 0.0, 0
    while calls < 5 or (spent < budget_s and calls < 2000):
        began = time.perf_counter()
        work()
        settle(device)
        taken = time.perf_counter() - began
        best, spent, calls = min(best, taken), spent + taken, calls + 1
    return best


def _read_rate(device: torch.device, size: int, budget_s: float) -> float:
    """Return bytes read per second: a sum over the array, and a dot product of two halves."""
    source = torch.ones(size // 4, device=device)
    first, second = source.chunk(2)
    by_sum = _best(source.sum, device, budget_s)
    by_dot = _best(lambda: torch.dot(first, second), device, budget_s)
    return size / min(by_sum, by_dot)


def _copy_rate(device: torch.device, size: int, budget_s: float) -> float:
    source = torch.ones(size // 8, device=device)
    target = torch.empty_like(source)
    return size / _best(lambda: target.copy_(source), device, budget_s)


def _matmul_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> float | None:
    best = 0.0
    for width in _MATMUL.get(device.type, _MATMUL["other"]):
        try:
            if dtype is torch.int8:
                codes = torch.ones(width, width, dtype=dtype, device=device)
                work: Callable[[], object] = partial(torch._int_mm, codes, codes)
            else:
                values = torch.randn(width, width, device=device).to(dtype)
                work = partial(torch.mm, values, values)
            best = max(best, 2.0 * width**3 / _best(work, device, budget_s))
        except (RuntimeError, NotImplementedError):  # this device has no such product
            return None
    return best


def _call_costs(device: torch.device, budget_s: float) -> tuple[float, float]:
    """Return the least seconds of a torch call alone, and of one with its wait."""
    one = torch.zeros(1, device=device)
    calls = 200

    def many() -> None:
        for _ in range(calls):
            one.neg()

    return _best(many, device, budget_s) / calls, _best(lambda: one.neg().sum(), device, budget_s)


def _timer_cost() -> float:
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            time.perf_counter()
        best = min(best, (time.perf_counter() - began) / 100)
    return best


def _control(device: torch.device) -> Interval:
    """Compare a product of a millisecond or so with itself."""
    side = torch.randn(256, 256, device=device)

    def work(seed: int) -> float:
        began = time.perf_counter()
        for _ in range(4):
            side @ side
        settle(device)
        return time.perf_counter() - began

    return compare(("one", work), ("one", work), pairs=_CONTROL_PAIRS).control


def _device_name(device: torch.device) -> str:
    facts = capture(device)
    name = facts.get("device.name") if device.type != "cpu" else facts.get("cpu.model")
    return str(name or platform.processor() or platform.machine())
