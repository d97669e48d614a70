"""Facts of the machine this process runs on: cores, memory, disk, devices.

Owns the questions asked of the system. It must not judge the answers: `doctor` does.
Invariant: a question that this system cannot answer gives None, never a guess.
"""

import os
import shutil
import time
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "devices_that_answer",
    "free_disk_bytes",
    "physical_cores",
    "process_age_s",
    "shared_memory_bytes",
    "usable_cores",
]


def usable_cores() -> int:
    """Return how many logical cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Return the physical cores, at most the usable ones; the usable ones where none are told."""
    usable = usable_cores()
    try:
        text = cpuinfo.read_text()
    except OSError:
        return usable
    pairs: set[tuple[str, str]] = set()
    package = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "physical id":
            package = value.strip()
        elif name.strip() == "core id":
            pairs.add((package, value.strip()))
    return min(usable, len(pairs)) if pairs else usable


def available_memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the memory that new work may take: the system's, or the container's if less."""
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        system = int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no such file, or the word "max": no limit
        return system
    return min(system, max(0, limit - used))


def free_disk_bytes(path: Path) -> int | None:
    """Return the free bytes of the file system that holds `path`."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def shared_memory_bytes() -> int | None:
    """Return the size of shared memory, which workers of one host exchange caches through."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def devices_that_answer() -> tuple[str, ...]:
    """Return the accelerators that torch reaches, such as cuda:0; cpu is not listed."""
    import torch

    if not torch.accelerator.is_available():
        return ()
    current = torch.accelerator.current_accelerator()
    kind = current.type if current is not None else "cuda"
    return tuple(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))


def process_age_s() -> float | None:
    """Return how long ago this process was started; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / ticks
