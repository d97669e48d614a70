"""Judgement of a machine and an install: what is wrong, and how to mend it.

Owns the checks behind `oxplow doctor`. It must not print, and it asks the system only through
`machine` and the installed packages' own metadata.
Invariant: each finding says what was found; one that is not "ok" says how to mend it.
"""

import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from oxplow.serve import machine

__all__ = [
    "Finding",
    "examine",
    "judge_disk",
    "judge_memory",
    "judge_python",
    "judge_shared_memory",
    "judge_threads",
    "judge_torch",
]

_GIB = 1 << 30

# package -> what it is for; none of them is needed to serve.
_OPTIONAL = {
    "triton": "CUDA and ROCm kernels: pip install 'oxplow[gpu]'",
    "av": "mp4 video: pip install 'oxplow[video]'",
    "transformers": "the oracle of the tests: pip install 'oxplow[test]'",
    "pytest": "the tests: pip install 'oxplow[test]'",
}
_REQUIRED = ("numpy", "safetensors", "tokenizers", "jinja2", "pillow", "msgspec", "typer", "rich")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """State one check: its name, its verdict, what was found, and how to mend it."""

    check: str
    verdict: Literal["ok", "note", "warn", "fail"]
    found: str
    mend: str = ""


def examine(folder: Path, threads: int | None = None) -> list[Finding]:
    """Run every check; `folder` is where logs and caches would be written."""
    found = [judge_python(sys.version_info[:3]), judge_torch(_version("torch"))]
    if found[-1].verdict != "fail":
        found += _ask_torch(threads)
    found += [_required(name) for name in _REQUIRED]
    found += [_optional(name, use) for name, use in _OPTIONAL.items()]
    found.append(judge_memory(machine.available_memory_bytes()))
    found.append(judge_disk(folder, machine.free_disk_bytes(folder)))
    found.append(judge_shared_memory(machine.shared_memory_bytes()))
    return found


def judge_python(release: tuple[int, ...]) -> Finding:
    """Judge the interpreter's release, such as (3, 11, 7)."""
    told = ".".join(map(str, release))
    if (3, 11) <= release[:2] < (3, 13):
        return Finding(check="python", verdict="ok", found=told)
    mend = "make a virtual environment of Python 3.11 or 3.12: PYTHON=python3.12 make setup"
    return Finding(check="python", verdict="fail", found=told, mend=mend)


def judge_torch(version: str | None) -> Finding:
    """Judge the installed release of torch, None where there is none."""
    if version is None:
        mend = "run make setup, or pip install 'torch>=2.11,<2.15'"
        return Finding(check="torch", verdict="fail", found="not installed", mend=mend)
    parts = version.split("+")[0].split(".")[:2]
    release = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    if (2, 11) <= release < (2, 15):
        return Finding(check="torch", verdict="ok", found=version)
    return Finding(
        check="torch", verdict="fail", found=version, mend="pip install 'torch>=2.11,<2.15'"
    )


def judge_threads(threads: int, cores: int) -> Finding:
    """Judge torch's intra-op threads against the physical cores that this process may use."""
    told = f"{threads} of {cores} physical cores"
    if threads > cores:
        mend = f"oxplow --set compute.threads={cores} ...: threads beyond the cores wait"
        return Finding(check="threads", verdict="warn", found=told, mend=mend)
    return Finding(check="threads", verdict="ok", found=told)


def judge_memory(available_bytes: int | None) -> Finding:
    """Judge the memory that new work may take; None where this system does not tell."""
    if available_bytes is None:
        return Finding(check="memory", verdict="note", found="this system does not tell")
    told = f"{available_bytes / _GIB:.1f} GiB free"
    if available_bytes < 2 * _GIB:
        mend = "free some: the bundled model wants about 2 GiB, a real one its weights and more"
        return Finding(check="memory", verdict="warn", found=told, mend=mend)
    return Finding(check="memory", verdict="ok", found=told)


def judge_disk(folder: Path, free_bytes: int | None) -> Finding:
    """Judge the free space where `folder` lies; None where it cannot be asked."""
    if free_bytes is None:
        mend = "create it, or name a folder that can be written"
        return Finding(check="disk", verdict="warn", found=f"{folder} cannot be asked", mend=mend)
    told = f"{free_bytes / _GIB:.1f} GiB free at {folder}"
    if free_bytes < _GIB:
        mend = "free some, or set log.file to a path on another disk"
        return Finding(check="disk", verdict="warn", found=told, mend=mend)
    return Finding(check="disk", verdict="ok", found=told)


def judge_shared_memory(total_bytes: int | None) -> Finding:
    """Judge the shared memory through which workers of one host hand caches over."""
    if total_bytes is None:
        return Finding(check="shared memory", verdict="note", found="this system has none")
    told = f"{total_bytes / _GIB:.2f} GiB"
    if total_bytes < _GIB // 4:
        mend = "only for several workers on one host: enlarge it (docker run --shm-size=2g)"
        return Finding(check="shared memory", verdict="note", found=told, mend=mend)
    return Finding(check="shared memory", verdict="ok", found=told)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask_torch(threads: int | None) -> list[Finding]:
    """Import torch and ask it for devices; `threads` None: one per physical core."""
    try:
        import torch
    except (ImportError, OSError) as error:
        mend = "its files are damaged or a system library is missing: run make setup again"
        return [Finding(check="torch import", verdict="fail", found=str(error), mend=mend)]
    devices = machine.devices_that_answer()
    capability = torch.backends.cpu.get_cpu_capability()
    told = ", ".join(devices) if devices else f"none; the CPU ({capability}) carries everything"
    return [
        judge_threads(threads or machine.physical_cores(), machine.physical_cores()),
        Finding(check="accelerators", verdict="ok" if devices else "note", found=told),
    ]


def _required(package: str) -> Finding:
    version = _version(package)
    if version is not None:
        return Finding(check=package, verdict="ok", found=version)
    return Finding(check=package, verdict="fail", found="not installed", mend="run make setup")


def _optional(package: str, use: str) -> Finding:
    version = _version(package)
    if version is not None:
        return Finding(check=package, verdict="ok", found=f"{version} (optional)")
    return Finding(check=package, verdict="note", found="not installed (optional)", mend=use)
