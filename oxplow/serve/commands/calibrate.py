"""`oxplow calibrate`: what this machine can do at best, measured once and kept.

Owns flags and presentation; `oxplow.feedback.calibrate` measures. `profile_for` is how other
commands get the profile. Invariant: a kept profile is used only on the machine, device, threads and
torch that it was measured with, and always told with its age.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    import torch

    from oxplow.feedback.calibrate import MachineProfile

__all__ = ["profile_for", "register"]

_FOLDER_HELP = "Keep the profile here; default: the user's cache folder."


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("calibrate", epilog="Example: oxplow calibrate --threads 2 --json")(_calibrate)


def profile_for(
    device: torch.device, threads: int, *, folder: Path | None = None, again: bool = False
) -> tuple[MachineProfile, Path, bool]:
    """Return the kept profile, or measure one; with its file and whether it was measured now."""
    from oxplow.config import cache_home
    from oxplow.feedback.calibrate import (
        calibrate,
        fingerprint,
        load_profile,
        profile_path,
        save_profile,
    )

    home = folder or cache_home()
    mark = fingerprint(device, threads)
    kept = None if again else load_profile(home, mark)
    if kept is not None and not kept.is_stale:
        return kept, profile_path(home, mark), False
    made = calibrate(device, threads, _tell)
    return made, save_profile(made, home), True


def _tell(what: str) -> None:
    sys.stderr.write(f"calibrating: {what}\n")


def _calibrate(
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Measure although one is kept.")] = False,
    folder: Annotated[Path | None, typer.Option(help=_FOLDER_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Measure bandwidth, peak rates, call costs and the width of equal; keep them for floors."""
    from oxplow.serve.devices import torch_device

    profile, path, is_new = profile_for(torch_device(device), threads, folder=folder, again=again)
    width = f"{profile.control.low:.3f} to {profile.control.high:.3f}"
    lines: list[tuple[str, object]] = [
        ("origin", profile.origin()),
        ("file", f"{path} ({'new' if is_new else 'kept'})"),
    ]
    for name, rates in (("read", profile.read_bytes_s), ("copy", profile.copy_bytes_s)):
        lines += [(f"{name}, {size >> 10} KiB", f"{rate / 1e9:.2f} GB/s") for size, rate in rates]
    lines += [(f"product, {n}", f"{rate / 1e9:.1f} GFLOP/s") for n, rate in profile.flops_s.items()]
    lines += [
        ("torch call", f"{profile.dispatch_s * 1e6:.2f} us"),
        ("call and wait", f"{profile.launch_s * 1e6:.2f} us"),
        ("look at the clock", f"{profile.timer_s * 1e9:.0f} ns"),
        ("equal work, 99% interval", width),
    ]
    record = profile.row() | {
        "age_s": profile.age_s,
        "origin": "measured now" if is_new else "kept",
        "file": str(path),
    }
    report(("what", "value"), lines, title="Machine profile", record=record, as_json=as_json)
