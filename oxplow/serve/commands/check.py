"""`oxplow check`: climb the bring-up ladder and stop at the first red rung.

Owns flags and presentation; `oxplow.serve.rungs` lists the rungs and `oxplow.feedback` judges.
Invariant: exit code 0 means every rung was green, 1 that one was red, 3 that none was red but one
could not judge.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    from oxplow.feedback.ladder import RungResult
    from oxplow.serve.rungs import Bringup

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("check", epilog="Example: oxplow check --quick --report check.html")(_check)


def _check(
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint folder, or nano, the bundled model.")
    ] = "nano",
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda:0.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, under a minute.")] = False,
    only: Annotated[
        str, typer.Option(metavar="RUNG[:PART]", help="One rung, or one part of it: ops:router.")
    ] = "",
    keep_on: Annotated[bool, typer.Option("--keep-on", help="Go on after a red rung.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides every random input.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    record: Annotated[
        Path | None, typer.Option(help="Append all findings to this hash-chained JSONL.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--report", help="Write an HTML page with plots.")
    ] = None,
    shrunk: Annotated[
        Path | None, typer.Option("--shrink", help="Write a red op's smallest failing call here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check device, weights, ops, layers, cuts and requests, from the bottom up."""
    import torch

    from oxplow.feedback.ladder import climb
    from oxplow.serve.devices import torch_device
    from oxplow.serve.model_files import default_model
    from oxplow.serve.rungs import Bringup

    torch.set_num_threads(threads)
    bringup = Bringup(
        directory=default_model() if model == "nano" else Path(model),
        device=torch_device(device),
        quick=quick,
        seed=seed,
        only=only,
    )
    rungs = bringup.rungs()
    results = climb(rungs, keep_on=keep_on, tell=_tell)
    smallest = _shrink(results, bringup, shrunk)
    profile = bringup.profile[0].row() if bringup.profile else None
    _keep(results, record, page, {"model": model, **(profile or {})})
    code = _code(results)
    report(
        ("rung", "verdict", "seconds", "what was seen", "where, and how to see it again"),
        [_row(r) for r in results],
        title=f"Bring-up of {model} on {device}",
        record={
            "verdict": {0: "pass", 1: "fail"}.get(code, "unsure"),
            "rungs": [r.row() for r in results],
            "not_climbed": [r.name for r in rungs[len(results) :]],
            "device_profile": profile,
            "shrunk": smallest,
            "seconds": round(sum(r.seconds for r in results), 2),
        },
        as_json=as_json,
    )
    raise typer.Exit(code)


def _keep(
    results: list[RungResult],
    record: Path | None,
    page: Path | None,
    facts: dict[str, object],
) -> None:
    from oxplow.feedback.record import RecordFile
    from oxplow.feedback.report import write_report

    chain = None if record is None else RecordFile(record)
    findings = [f for r in results for f in r.findings]
    if chain is not None:
        for finding in findings:
            chain.append("finding", finding.row())
    if page is not None:
        write_report(findings, page, "oxplow check", facts)


def _shrink(results: list[RungResult], bringup: Bringup, path: Path | None) -> str | None:
    """Write the smallest failing call of the op that a red rung names; return how to run it."""
    if path is None:
        return None
    import shlex

    from oxplow.contracts import CONTRACTS
    from oxplow.feedback.shrink import repro_file, shrink

    red = next((r.decisive for r in results if r.verdict.value == "fail"), None)
    op = "" if red is None else red.locus.op
    if op not in CONTRACTS:
        sys.stderr.write("nothing to shrink: no op is blamed\n")
        return None
    kernel = bringup.kernel(op)
    found = shrink(CONTRACTS[op], kernel.run, seed=bringup.seed, device=bringup.device)
    if found is None:
        sys.stderr.write(f"nothing to shrink: {op} fails on no case whose inputs are frozen\n")
        return None
    path.write_text(repro_file(found, f"kernel:{kernel.name}", str(bringup.device)))
    sys.stderr.write(f"{op}: {found.elements_before} elements shrank to {found.elements_after}\n")
    return f"python {shlex.quote(str(path))}"


def _code(results: list[RungResult]) -> int:
    said = {r.verdict.value for r in results}
    return 1 if "fail" in said else 3 if said - {"pass"} else 0


def _tell(result: RungResult) -> None:
    what = f"{result.rung.name}: {result.rung.asks}: {result.verdict.value}"
    sys.stderr.write(f"{what} ({result.seconds:.1f} s)\n")


def _row(result: RungResult) -> tuple[object, ...]:
    told = result.row()
    seen = f"{told['findings']} findings; {told['summary']}"
    where = "" if told["locus"] is None else f"{told['locus']}\n{told['repro']}"
    return result.rung.name, result.verdict.value, f"{result.seconds:.1f}", seen, where
