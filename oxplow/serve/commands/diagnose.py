"""`oxplow diagnose`: from a symptom to the place that causes it, with the experiment that shows it.

Owns flags and presentation; `oxplow.feedback.policy` searches and `oxplow.serve.toolbox` holds its
instruments. Invariant: exit code 0 means that every suspect was cleared, 1 that a place was found,
3 that the instruments could not tell.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    from oxplow.feedback.finding import Finding
    from oxplow.feedback.policy import Diagnosis, Step
    from oxplow.serve.speed_bench import GoodRun
    from oxplow.serve.toolbox import BenchToolbox
    from oxplow.serve.workbench import Workbench

__all__ = ["register"]

_CODES = {"pass": 0, "fail": 1, "inconclusive": 3, "invalid": 3}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("diagnose", epilog="Example: oxplow diagnose --symptom accuracy")(_diagnose)


def _diagnose(
    symptom: Annotated[
        str, typer.Option(help="accuracy, nan, ttft, throughput, itl, hang; none: all results.")
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint folder, or nano, the bundled model.")
    ] = "nano",
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A good run, for ttft, throughput and itl.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a baseline of this run and end.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="NAME", help="Run one instrument: ops:router, audit:lookups.")
    ] = "",
    between: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="GOOD BAD", help="Two commits: name the one that broke --probe."),
    ] = None,
    probe: Annotated[
        str, typer.Option(metavar="COMMAND", help="With --between: what fails at BAD.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Decides every random input.")] = 0,
    budget: Annotated[float, typer.Option(min=1, help="Seconds that the search may take.")] = 600,
    page: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find where a fault is: compare, choose the next probe by value, sharpen, try to disprove."""
    from oxplow.feedback.report import write_report

    if between is not None:
        findings, code = _between(between, probe, as_json)
    elif record is not None:
        findings, code = _record(_bench(model, seed), record, as_json)
    else:
        good = _good_run(baseline, symptom, only)
        toolbox = _toolbox(_bench(model, seed), symptom, good, baseline)
        findings, code = _look(toolbox, only, symptom, budget, as_json)
    if page is not None:
        write_report(findings, page, f"oxplow diagnose {symptom or only}".strip())
    raise typer.Exit(code)


def _bench(model: str, seed: int) -> Workbench:
    import torch

    from oxplow.serve.model_files import default_model
    from oxplow.serve.workbench import Workbench

    torch.set_num_threads(1)
    return Workbench(directory=default_model() if model == "nano" else Path(model), seed=seed)


def _good_run(path: Path | None, symptom: str, only: str) -> GoodRun | None:
    from oxplow.serve.speed_bench import GoodRun

    if path is not None:
        return GoodRun.open(path)
    if symptom in ("ttft", "throughput", "itl") and not only:
        _say(
            "oxplow: without --baseline only look-ups are judged; take one of a good version with"
            " oxplow diagnose --record FILE"
        )
    return None


def _toolbox(
    bench: Workbench, symptom: str, good: GoodRun | None, path: Path | None
) -> BenchToolbox:
    from oxplow.serve.toolbox import BenchToolbox

    return BenchToolbox(bench, symptom, good, path)


def _record(bench: Workbench, path: Path, as_json: bool) -> tuple[list[Finding], int]:
    from oxplow.serve.speed_bench import take_baseline

    take_baseline(bench).save(path)
    report(
        ("baseline",), [(str(path),)], title="Baseline",
        record={"baseline": str(path)}, as_json=as_json,
    )  # fmt: skip
    return [], 0


def _look(
    toolbox: BenchToolbox, only: str, symptom: str, budget_s: float, as_json: bool
) -> tuple[list[Finding], int]:
    """Run one instrument, or the whole search."""
    from oxplow.feedback.policy import diagnose

    if only:
        findings = list(toolbox.named(only).run())
        _show_findings(only, findings, as_json)
        return findings, _CODES[_worst(findings)]
    found = diagnose(toolbox, symptom=symptom, budget_s=budget_s, tell=_tell)
    _show(found, as_json)
    return list(found.findings), _CODES[found.verdict.value]


def _tell(step: Step) -> None:
    said = f"{step.verdict.value:12} {step.instrument:24} {step.seconds:6.1f} s"
    _say(f"{said}  {step.summary[:120]}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _show(found: Diagnosis, as_json: bool) -> None:
    rows = [
        ("verdict", found.verdict.value),
        ("where", str(found.locus)),
        ("what", found.summary),
        ("disproof tried", "yes, it stands" if found.confirmed else "no"),
        ("also suspect", "; ".join(str(s) for s in found.suspects[1:4]) or "-"),
        ("repeat with", found.repro or "-"),
        ("seconds", f"{found.seconds:.1f} ({found.cpu_s:.1f} of processor time)"),
    ]
    record = {
        "symptom": found.symptom,
        "verdict": found.verdict.value,
        "locus": found.row()["locus"],
        "summary": found.summary,
        "confirmed": found.confirmed,
        "suspects": found.row()["suspects"],
        "repro": found.repro,
        "probes": len(found.steps),
        "seconds": round(found.seconds, 3),
        "cpu_s": round(found.cpu_s, 3),
    }
    report(("", "answer"), rows, title="Diagnosis", record=record, as_json=as_json)


def _show_findings(name: str, findings: list[Finding], as_json: bool) -> None:
    report(
        ("verdict", "where", "what"),
        [(f.verdict.value, str(f.locus), f.summary) for f in findings],
        title=name,
        record={"instrument": name, "findings": [f.row() for f in findings]},
        as_json=as_json,
    )


def _worst(findings: list[Finding]) -> str:
    said = {f.verdict.value for f in findings}
    return next((v for v in ("fail", "inconclusive", "invalid") if v in said), "pass")


def _between(commits: tuple[str, str], probe: str, as_json: bool) -> tuple[list[Finding], int]:
    """Bisect the commits of the repository that this process stands in."""
    from oxplow.feedback.bisect import Range, bisect

    if not probe:
        raise ConfigError("--between needs --probe COMMAND", got="none", wanted="a command")
    asked = Range(repo=Path.cwd(), good=commits[0], bad=commits[1], command=probe)
    found = bisect(asked, _say)
    _show_findings("between", [found], as_json)
    return [found], _CODES[found.verdict.value]
