"""The surroundings of a run as a record, and what changed between two of them.

Owns the capture, the comparison and its finding: versions, settings, hardware, clocks, governor,
affinity, load, memory, threads. Knows no model. Invariant: what cannot be read is absent, never
guessed; a difference is told with both values; conditions that always wander (load, free memory,
clock) count only beyond their usual spread.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from oxplow import __version__
from oxplow.config import compute_variables
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

__all__ = ["Change", "capture", "differences", "environment_finding"]

Value = str | int | float | bool
Environment = Mapping[str, Value]
"""Facts by dotted name; the first word is the group."""

_PACKAGES = ("numpy", "safetensors", "tokenizers", "transformers", "triton", "llguidance")
_SPINS = 20_000
_CPU = Path("/sys/devices/system/cpu")
_WANDERS: Mapping[str, tuple[float, float]] = {
    # name: how far a value may move, as (factor, absolute); either one excuses it
    "load.average": (1.5, 0.5),
    "memory.available_bytes": (2.0, 2.0**30),
    "clock.spin_ns": (1.25, 0.0),
    "clock.mhz": (1.15, 0.0),
    "process.threads": (1.0, 2.0),
    "load.steal_share": (2.0, 0.03),
}
_WEIGHTS = {
    "setting": 0, "variable": 1, "version": 2, "device": 3, "cpu": 4, "clock": 5, "load": 6,
    "memory": 7, "process": 8, "system": 9,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One fact that differs: its name, and its value before and after (None: not known)."""

    name: str
    before: Value | None
    after: Value | None

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.before)} -> {_shown(self.after)}"


def capture(device: torch.device | None = None) -> dict[str, Value]:
    """Return the facts of this moment; takes some 30 ms."""
    facts: dict[str, Value] = {
        "version.python": platform.python_version(),
        "version.torch": torch.__version__,
        "version.oxplow": __version__,
        "system.kernel": platform.release(),
        "system.machine": platform.machine(),
        "process.threads": _native_threads(),
        "process.python_threads": threading.active_count(),
        "process.optimised": sys.flags.optimize,
    }
    facts |= _packages() | _settings() | _processor() | _condition()
    facts |= {f"variable.{name}": value for name, value in compute_variables().items()}
    if device is not None and device.type != "cpu":
        facts |= _device(device)
    return facts


def differences(before: Environment, after: Environment) -> tuple[Change, ...]:
    """Return what changed, settings first, conditions last; wandering within its spread is none."""
    changed = [
        Change(name=name, before=before.get(name), after=after.get(name))
        for name in {*before, *after}
        if not _alike(name, before.get(name), after.get(name))
    ]
    return tuple(sorted(changed, key=lambda c: (_WEIGHTS.get(_group(c.name), 99), c.name)))


def environment_finding(before: Environment, after: Environment, *, repro: str) -> Finding:
    """Judge two records: any difference that counts is a failure that names it, before all else."""
    began = time.perf_counter()
    changed = differences(before, after)
    common = len({*before} & {*after})
    shown = {c.name: [c.before, c.after] for c in changed}
    effect = Effect(name="differences", value=len(changed), unit="facts", bound=0, n=common)
    if not common:
        return Finding(
            probe="environment", verdict=Verdict.INVALID, repro=repro,
            summary="the two records have no fact in common",
        )  # fmt: skip
    if not changed:
        return Finding(
            probe="environment", verdict=Verdict.PASS, effect=effect, repro=repro,
            summary=f"{common} facts are alike", cost_s=time.perf_counter() - began,
        )  # fmt: skip
    loci = tuple(
        Locus(component="runtime", op="environment", parameter=c.name) for c in changed[:5]
    )
    return Finding(
        probe="environment",
        verdict=Verdict.FAIL,
        summary="; ".join(map(str, changed[:4])) + (" ..." if len(changed) > 4 else ""),
        locus=loci[0],
        suspects=loci[1:],
        effect=effect,
        evidence=shown,
        cost_s=time.perf_counter() - began,
        repro=repro,
    )


def rows(changes: tuple[Change, ...]) -> list[dict[str, object]]:
    """Return plain data for JSON."""
    return [asdict(c) for c in changes]


def _group(name: str) -> str:
    return name.partition(".")[0]


def _shown(value: Value | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _alike(name: str, before: Value | None, after: Value | None) -> bool:
    if before == after:
        return True
    wander = _WANDERS.get(name)
    if wander is None:
        return False
    if before is None or after is None:
        return True  # a condition that one side could not read says nothing
    factor, absolute = wander
    low, high = sorted((float(before), float(after)))
    return high - low <= absolute or (low > 0 and high / low <= factor)


def _packages() -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name in _PACKAGES:
        try:
            found[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _settings() -> dict[str, Value]:
    tiny = torch.tensor(1e-39)
    return {
        "setting.threads": torch.get_num_threads(),
        "setting.interop_threads": torch.get_num_interop_threads(),
        "setting.matmul_precision": torch.get_float32_matmul_precision(),
        "setting.default_dtype": str(torch.get_default_dtype()),
        "setting.deterministic": torch.are_deterministic_algorithms_enabled(),
        "setting.flush_denormal": float(tiny * 1.0) == 0.0,
        "setting.mkldnn": bool(torch.backends.mkldnn.enabled),
        "setting.switch_interval_s": sys.getswitchinterval(),
        "setting.capability": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> dict[str, Value]:
    facts: dict[str, Value] = {}
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            facts["cpu.model"] = value.strip()
        elif name.strip() == "cpu MHz":
            facts["clock.mhz"] = max(float(value), float(facts.get("clock.mhz", 0.0)))
    if hasattr(os, "sched_getaffinity"):
        facts["cpu.affinity"] = _ranges(sorted(os.sched_getaffinity(0)))
    for name, path in (
        ("cpu.governor", _CPU / "cpu0/cpufreq/scaling_governor"),
        ("cpu.max_khz", _CPU / "cpu0/cpufreq/scaling_max_freq"),
        ("cpu.turbo_off", _CPU / "intel_pstate/no_turbo"),
        ("cpu.smt", _CPU / "smt/active"),
        ("cpu.limit", Path("/sys/fs/cgroup/cpu.max")),
        ("memory.huge_pages", Path("/sys/kernel/mm/transparent_hugepage/enabled")),
    ):
        told = _text(path).strip()
        if told:
            facts[name] = told
    return facts


def _condition() -> dict[str, Value]:
    facts: dict[str, Value] = {"clock.spin_ns": _spin_ns()}
    if hasattr(os, "getloadavg"):
        facts["load.average"] = round(os.getloadavg()[0], 2)
    for line in _text(Path("/proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        if name in {"MemTotal", "MemAvailable", "SwapTotal"}:
            key = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}[name]
            facts[f"memory.{key}_bytes"] = int(value.split()[0]) * 1024
    ticks = _text(Path("/proc/stat")).splitlines()[:1]
    if ticks and len(ticks[0].split()) > 8:
        counts = [int(t) for t in ticks[0].split()[1:9]]
        facts["load.steal_share"] = round(counts[7] / max(1, sum(counts)), 4)
    return facts


def _device(device: torch.device) -> dict[str, Value]:
    facts: dict[str, Value] = {"device.kind": device.type}
    if device.type == "cuda" and torch.cuda.is_available():
        known = torch.cuda.get_device_properties(device)
        facts["device.name"] = known.name
        facts["device.processors"] = known.multi_processor_count
        facts["device.memory_bytes"] = known.total_memory
        facts["version.cuda"] = str(torch.version.cuda or torch.version.hip)
        facts["setting.tf32"] = torch.backends.cuda.matmul.allow_tf32
    return facts


def _native_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _spin_ns() -> float:
    """Return the least nanoseconds of one pass of a fixed loop: the speed of this core now."""
    best = math.inf
    for _ in range(5):
        began = time.thread_time_ns()
        for _ in range(_SPINS):
            pass
        best = min(best, (time.thread_time_ns() - began) / _SPINS)
    return round(best, 3)


def _ranges(cores: list[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, p)) for p in parts)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
