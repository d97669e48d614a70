"""`oxplow bench sweep`: one launch parameter against time, its winner re-measured elsewhere.

Owns the parameters that can be swept and their shapes; `oxplow.feedback.sweep` judges.
Invariant: what a sweep sets for a run is put back after it; shapes to tune on and to hold out
differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.errors import ConfigError
from oxplow.serve.commands.bench_op import ReportFile
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    from oxplow.feedback.sweep import Space, Timed

__all__ = ["add_to"]


def add_to(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("sweep", epilog="Example: oxplow bench sweep kda_chunk --report sweep.html")(
        _sweep
    )


def _sweep(
    parameter: Annotated[str, typer.Argument(help="kda_chunk or prefill_tokens.")],
    model: Annotated[str, typer.Option(help="For prefill_tokens: directory or nano.")] = "nano",
    rounds: Annotated[int, typer.Option(min=3, help="Rounds on each shape.")] = 7,
    report_file: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Sweep a parameter: curve, cliffs, and whether the best setting holds on other shapes."""
    import torch

    from oxplow.feedback.report import write_report
    from oxplow.feedback.sweep import sweep

    makers: dict[str, Callable[[int, str], tuple[Space, Timed]]] = {
        "kda_chunk": _kda_chunk,
        "prefill_tokens": _prefill_tokens,
    }
    if parameter not in makers:
        raise ConfigError("unknown parameter", got=parameter, wanted=", ".join(makers))
    torch.set_num_threads(1)
    space, timed = makers[parameter](rounds, model)
    command = f"oxplow bench sweep {parameter} --model {model} --rounds {rounds}"
    swept, found = sweep(space, timed, repro=command)
    if report_file is not None:
        write_report([found], report_file, command)
    rows = [
        (shape, f"{setting:g}", f"{ratio:.3f}", "default" if setting == space.default else "")
        for shape, curve in swept.ratios.items()
        for setting, ratio in sorted(curve.items())
    ]
    rows += [(s, f"{a:g} to {b:g}", f"{r:.2f}", "cliff") for s, a, b, r in swept.cliffs]
    rows.append(("held out", f"{swept.winner:g}", f"{swept.held.ratio:.3f}", found.summary))
    report(("shape", "setting", "time / default", "told"), rows, title=command,
           record={"findings": [found.row()]}, as_json=as_json)  # fmt: skip


def _kda_chunk(rounds: int, model: str) -> tuple[Space, Timed]:
    """Sweep the rows of a chunk of the chunked KDA prefill on this machine's CPU."""
    import torch

    from oxplow.contracts.kda_cases import prompts
    from oxplow.feedback.sweep import Space
    from oxplow.ops.kernels.torch import kda_chunk

    def timed(setting: float, shape: str, seed: int) -> float:
        lengths = tuple(map(int, shape.split("+")))
        g = torch.Generator().manual_seed(seed)
        args = prompts(g, lengths=lengths, fresh=(0,), sizes=(4, 32, 32))
        kept = kda_chunk.CHUNK
        kda_chunk.CHUNK = int(setting)
        try:
            began = time.perf_counter()
            kda_chunk.kda_prefill_chunked(**args)
            return time.perf_counter() - began
        finally:
            kda_chunk.CHUNK = kept

    space = Space(
        op="kda_prefill", parameter="chunk", settings=(16, 32, 64, 128),
        default=float(kda_chunk.CHUNK), tuning=("256", "512"), held_out=("300+90", "700"),
        rounds=rounds,
    )  # fmt: skip
    return space, timed


def _prefill_tokens(rounds: int, model: str) -> tuple[Space, Timed]:
    """Sweep the prefill tokens of a step; the shape is prompts x tokens."""
    from oxplow.engine.options import SchedulerOptions
    from oxplow.feedback.load import Arrival
    from oxplow.feedback.sweep import Space
    from oxplow.serve.commands.bench_load import open_arms
    from oxplow.serve.speed_arms import ArmSpec

    arms = open_arms(model, 1)

    def timed(setting: float, shape: str, seed: int) -> float:
        count, tokens = map(int, shape.split("x"))
        work = tuple(Arrival(at_s=0.0, prompt_tokens=tokens, new_tokens=1) for _ in range(count))
        schedule = SchedulerOptions(step_target_s=None, max_prefill_tokens=int(setting))
        return arms.measured(ArmSpec(scheduler=schedule), work)(seed).total_s

    space = Space(
        op="schedule", parameter="max_prefill_tokens", settings=(32, 64, 128, 256, 512),
        default=256, tuning=("4x96", "2x200"), held_out=("3x150", "6x70"), rounds=rounds,
    )  # fmt: skip
    return space, timed
