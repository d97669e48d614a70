"""`oxplow bench step` and `oxplow bench serve`: one engine's steps by phase, and its load.

Owns flags and presentation; `oxplow.serve.speed_arms` runs, `oxplow.feedback` judges.
Invariant: a comparison has its baseline against itself beside it, on the same trace.
"""

from __future__ import annotations

import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxplow.errors import ConfigError
from oxplow.serve.commands.bench_op import ReportFile
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    from oxplow.engine.options import SchedulerOptions
    from oxplow.feedback.attribute import Breakdown
    from oxplow.feedback.finding import Finding
    from oxplow.feedback.load import LoadComparison, Trace
    from oxplow.serve.speed_arms import ArmSpec, SpeedArms

__all__ = ["add_to", "open_arms"]

Model = Annotated[str, typer.Option(help="Checkpoint directory, or `nano` for the bundled one.")]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads.")]
Against = Annotated[
    str, typer.Option(help="A second arm: op=KERNEL or SETTING=VALUE of the scheduler.")
]


def add_to(group: typer.Typer) -> None:
    """Add both commands to the group `bench`."""
    group.command("step", epilog="Example: oxplow bench step itl --against linear=torch")(_step)
    group.command("serve", epilog="Example: oxplow bench serve --rate 4 --requests 20")(_serve)


def _step(
    work: Annotated[str, typer.Argument(help="ttft, throughput or itl.")] = "itl",
    model: Model = "nano",
    against: Against = "",
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 7,
    threads: Threads = 1,
    report_file: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Break the steps of one load down: ops, batch, sampling, bookkeeping, queue, gaps."""
    from oxplow.serve.speed_arms import WORK, ArmSpec

    if work not in WORK:
        raise ConfigError("unknown load", got=work, wanted=", ".join(WORK))
    arms = open_arms(model, threads)
    command = f"oxplow bench step {work} --model {model} --rounds {rounds} --threads {threads}"
    if against:
        spec = _spec(arms, against)
        found = _attributed(arms, spec, work, rounds, f"{command} --against {against}")
        _tell_findings([found], command, report_file, as_json)
        raise typer.Exit({"fail": 1, "pass": 0}.get(found.verdict.value, 3))
    run = arms.measured(ArmSpec(), WORK[work])
    run(0)
    told = min((run(n + 1) for n in range(rounds)), key=lambda b: b.total_s)
    rows = [
        (name, told.counts.get(name.replace("op:", "calls:"), ""), f"{s * 1e3:.3f}",
         f"{s / told.total_s:.1%}")
        for name, s in sorted(told.parts.items(), key=lambda item: -item[1])
    ]  # fmt: skip
    if report_file is not None:
        _tell_report(told, command, report_file)
    report(("part", "calls", "ms", "share"), rows,
           title=f"{work}: {told.total_s * 1e3:.1f} ms in {told.counts['steps']} steps",
           record={"command": command, **asdict(told)}, as_json=as_json)  # fmt: skip


def _serve(
    model: Model = "nano",
    url: Annotated[str, typer.Option(help="Load this server instead.")] = "",
    trace: Annotated[Path | None, typer.Option(help="Recorded arrivals, JSON lines.")] = None,
    rate: Annotated[float, typer.Option(min=0.01, help="Poisson arrivals a second.")] = 4.0,
    burst: Annotated[int, typer.Option(min=0, help="So many at once; 0: Poisson.")] = 0,
    requests: Annotated[int, typer.Option(min=2, help="Arrivals.")] = 16,
    tokens: Annotated[tuple[int, int], typer.Option(help="Prompt and answer.")] = (64, 16),
    slo: Annotated[tuple[float, float], typer.Option(help="Seconds: first, next.")] = (1.0, 0.1),
    against: Against = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a comparison.")] = 6,
    report_file: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Serve arrivals by the clock: time to first token, gaps, goodput, queue, cache hits."""
    from oxplow.feedback.load import Slo, compare_arms, figures, read_trace
    from oxplow.serve.load_url import serve_url
    from oxplow.serve.speed_arms import ArmSpec

    arrivals = read_trace(trace) if trace else _trace(rate, burst, requests, tokens)
    limits = Slo(ttft_s=slo[0], itl_s=slo[1])
    if url:
        told = figures(serve_url(url, model, arrivals, 1), limits)
        _tell_figures({"server": told}, as_json)
        return
    arms = open_arms(model, 1)
    if not against:
        arms.serve(ArmSpec(), arrivals[:2], 0)
        _tell_figures({"engine": figures(arms.serve(ArmSpec(), arrivals, 1), limits)}, as_json)
        return
    began, spec = time.perf_counter(), _spec(arms, against)
    both = compare_arms(
        lambda t, s: arms.serve(ArmSpec(), t, s), lambda t, s: arms.serve(spec, t, s),
        arrivals, rounds=rounds, slo=limits,
    )  # fmt: skip
    repro = f"oxplow bench serve --model {model} --against {against} --requests {len(arrivals)}"
    found = [_judged(name, both, repro, time.perf_counter() - began) for name in both.ratios]
    if report_file is not None:
        _tell_findings(found, repro, report_file, as_json)
    else:
        _tell_figures({"base": dict(both.first), against: dict(both.second)}, as_json, found)


def open_arms(model: str, threads: int) -> SpeedArms:
    """Open a checkpoint (`nano`: the bundled one) on the CPU for comparisons."""
    import torch

    from oxplow.serve.model_files import default_model
    from oxplow.serve.speed_arms import SpeedArms

    torch.set_num_threads(threads)
    directory = default_model() if model == "nano" else Path(model)
    return SpeedArms(directory, device=torch.device("cpu"), dtype=torch.float32)


def _spec(arms: SpeedArms, text: str) -> ArmSpec:
    """Read `op=KERNEL` or `SETTING=VALUE` as the second arm."""
    from oxplow.engine.options import SchedulerOptions
    from oxplow.feedback.isolate import load_candidate
    from oxplow.serve.speed_arms import ArmSpec

    name, equals, value = text.partition("=")
    if name in arms.table.kernels and equals:
        spec = value if ":" in value else f"kernel:{value}"
        return ArmSpec(kernels={name: (value, load_candidate(spec, name))})
    known = {f.name: f for f in fields(SchedulerOptions)}
    if name not in known or not equals:
        raise ConfigError(
            "this names no second arm", got=text,
            wanted=f"OP=KERNEL, or one of {', '.join(known)} with a value",
        )  # fmt: skip
    return ArmSpec(scheduler=_scheduler(name, value))


def _scheduler(name: str, value: str) -> SchedulerOptions:
    from dataclasses import replace

    from oxplow.engine.options import SchedulerOptions

    base = SchedulerOptions(step_target_s=None, max_prefill_tokens=256)
    kind = float if name in ("short_share", "deadline_token_s", "step_target_s") else int
    try:
        changes: dict[str, Any] = {name: kind(value)}
        return replace(base, **changes)
    except ValueError as error:
        raise ConfigError("this is no number", got=value, where=name) from error


def _attributed(arms: SpeedArms, spec: ArmSpec, work: str, rounds: int, repro: str) -> Finding:
    from oxplow.feedback.attribute import attribute
    from oxplow.serve.speed_arms import WORK, ArmSpec

    load = WORK[work]
    return attribute(
        f"speed.{work}", arms.measured(ArmSpec(), load), arms.measured(spec, load),
        rounds=rounds, ablate=lambda part: arms.ablated(spec, load, part), repro=repro,
    )  # fmt: skip


def _trace(rate: float, burst: int, requests: int, tokens: tuple[int, int]) -> Trace:
    from oxplow.feedback.load import bursts, poisson

    prompt, new = ((max(1, n // 2), n) for n in tokens)
    if burst:
        return bursts(burst, burst / rate, requests, prompt=prompt, new=new, groups=4)
    return poisson(rate, requests, prompt=prompt, new=new, groups=4)


def _judged(name: str, both: LoadComparison, repro: str, cost_s: float) -> Finding:
    from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

    ratio, control = both.ratios[name], both.controls[name]
    effect = Effect(
        name=f"{name}, second / base", value=ratio.ratio, unit="ratio", low=ratio.low,
        high=ratio.high,
    )  # fmt: skip
    verdict, said = Verdict.INCONCLUSIVE, "within what the base differs from itself"
    if both.differs(name):
        worse = ratio.ratio > 1
        verdict = Verdict.FAIL if worse else Verdict.PASS
        said = f"{abs(ratio.ratio - 1):.0%} {'slower' if worse else 'faster'}"
    return Finding(
        probe=f"bench.serve.{name}", verdict=verdict, summary=said, effect=effect,
        locus=Locus(component="engine", parameter=name), repro=repro, cost_s=cost_s,
        evidence={"equal": [control.low, control.high]},
    )  # fmt: skip


def _tell_figures(
    arms: dict[str, dict[str, float]], as_json: bool, found: list[Finding] | None = None
) -> None:
    names = list(next(iter(arms.values())))
    rows = [(n, *(f"{figures[n]:.4g}" for figures in arms.values())) for n in names]
    rows += [(f.probe, f.verdict.value, f.summary) for f in found or ()]
    record = {"arms": arms, "findings": [f.row() for f in found or ()]}
    report(("figure", *arms), rows, title="bench serve", record=record, as_json=as_json)


def _tell_findings(
    found: list[Finding], title: str, report_file: Path | None, as_json: bool
) -> None:
    from oxplow.feedback.report import write_report

    if report_file is not None:
        write_report(found, report_file, title)
    rows = [(f.probe, f.verdict.value, str(f.locus), f.summary) for f in found]
    record = {"findings": [f.row() for f in found]}
    report(("probe", "verdict", "where", "told"), rows, title=title, record=record,
           as_json=as_json)  # fmt: skip


def _tell_report(told: Breakdown, command: str, path: Path) -> None:
    from oxplow.feedback.finding import Finding, Verdict
    from oxplow.feedback.report import write_report

    parts = {name: round(s, 6) for name, s in told.parts.items()}
    found = Finding(
        probe="bench.step", verdict=Verdict.PASS, summary=f"{told.total_s:.4f} s",
        evidence={"parts_s": parts, "counts": dict(told.counts)}, repro=command,
        cost_s=told.total_s,
    )  # fmt: skip
    write_report([found], path, command)
