"""`oxplow faults`: measure the instruments on planted faults and clean controls.

Owns flags, the search for the planted faults in a checkout, and presentation;
`oxplow.serve.fault_trials` runs the trials. Invariant: the last line of `--json` is one object with
the figures; a wheel has no planted faults and says where they are.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

import oxplow
from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    from oxplow.feedback.policy import Diagnosis
    from oxplow.feedback.scoring import ControlMark, Mark
    from oxplow.serve.fault_trials import Trials
    from oxplow.serve.speed_bench import GoodRun

__all__ = ["planted_faults", "register"]

_ARMS = ("policy", "metrics-only", "random-order")
_FULL_SEEDS = 5


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("faults", epilog="Example: oxplow faults --quick --only F03 --only F17")(_faults)


def planted_faults() -> ModuleType:
    """Import the planted faults of the checkout. Raises ConfigError where there is none."""
    root = Path(oxplow.__file__).resolve().parents[1]
    if not (root / "tests" / "faults" / "__init__.py").is_file():
        raise ConfigError(
            "planted faults are not part of an installed oxplow",
            got=str(root),
            wanted="a source checkout: run `oxplow faults` from a clone of the repository",
            where="tests/faults",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("tests.faults")


def _faults(
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed each; controls share a pass.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="These faults or controls; repeatable.")
    ] = None,
    arm: Annotated[str, typer.Option(help="policy, metrics-only or random-order.")] = "policy",
    model: Annotated[
        str, typer.Option(metavar="DIR", help="Checkpoint folder, or nano, the bundled model.")
    ] = "nano",
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    repros: Annotated[
        bool, typer.Option("--repros/--no-repros", help="Try each printed command.")
    ] = True,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every trial as JSON.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plant each fault, let the policy search from its symptom, and grade the answers."""
    import json

    from oxplow.feedback.scoring import summary
    from oxplow.serve.fault_trials import Trials

    if arm not in _ARMS:
        raise ConfigError("unknown arm", got=arm, wanted=", ".join(_ARMS))
    planted, wanted = planted_faults(), only or []
    began = time.perf_counter()
    with _baseline_file(model, seed) as (path, good):
        trials = Trials(
            diagnose=_searcher(model, arm, good, path),
            tell=_say,
            check_repros=repros and arm != "metrics-only",
        )
        seeds = range(seed, seed + (1 if quick else _FULL_SEEDS))
        marks = _try_faults(trials, planted, wanted, seeds)
        controls = [c for c in planted.CONTROLS if not wanted or c.id in wanted]
        judged: list[ControlMark] = []
        for one in seeds:
            judged += trials.controls(controls, one, shared=quick)
    figures = summary(marks, judged) | {
        "arm": arm,
        "seconds": round(time.perf_counter() - began, 1),
        "not_applicable": [n.id for n in planted.NOT_APPLICABLE],
    }
    if record is not None:
        rows = {
            "figures": figures,
            "marks": [m.row() for m in marks],
            "controls": [c.row() for c in judged],
        }
        record.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    _show(marks, figures, as_json)


def _try_faults(
    trials: Trials, planted: ModuleType, wanted: Sequence[str], seeds: Sequence[int]
) -> list[Mark]:
    from oxplow.feedback.scoring import Answer

    faults = [f for f in planted.FAULTS if not wanted or f.id in wanted]
    marks = []
    for fault in faults:
        right = fault.expected
        answer = Answer(components=right.components, ops=right.ops, parameters=right.parameters)
        marks += [trials.fault(fault, answer, fault.kind.value, one) for one in seeds]
    return marks


def _baseline_file(model: str, seed: int) -> Any:
    """Return a context that gives a path and the baseline written there."""
    from contextlib import contextmanager
    from tempfile import TemporaryDirectory

    import torch

    from oxplow.serve.speed_bench import take_baseline

    @contextmanager
    def taken() -> Any:
        torch.set_num_threads(1)
        _say("taking the baseline of the clean engine")
        with TemporaryDirectory(prefix="oxplow-faults-") as folder:
            path = Path(folder) / "baseline.json"
            good = take_baseline(_bench(model, seed))
            good.save(path)
            yield path, good

    return taken()


def _bench(model: str, seed: int) -> Any:
    from oxplow.serve.model_files import default_model
    from oxplow.serve.workbench import Workbench

    return Workbench(directory=default_model() if model == "nano" else Path(model), seed=seed)


def _searcher(model: str, arm: str, good: GoodRun, path: Path) -> Callable[[str, int], Diagnosis]:
    """Return what a trial calls: a fresh bench, the arm's instruments and order."""
    from oxplow.feedback.policy import ByValue, InRandomOrder, Order, diagnose
    from oxplow.serve.toolbox import BenchToolbox, MetricsToolbox

    def search(symptom: str, seed: int) -> Diagnosis:
        order: Order = InRandomOrder(seed) if arm == "random-order" else ByValue()
        make = MetricsToolbox if arm == "metrics-only" else BenchToolbox
        return diagnose(
            make(_bench(model, seed), symptom, good, path), symptom=symptom, order=order
        )

    return search


def _say(line: str) -> None:
    sys.stderr.write(line[:220] + "\n")
    sys.stderr.flush()


def _show(marks: Sequence[Mark], figures: dict[str, object], as_json: bool) -> None:
    def depth(mark: Mark) -> str:
        names = ("parameter", "op", "component")
        return next((n for n in names if getattr(mark.top, n)), "-")

    report(
        ("fault", "class", "half", "found", "depth", "seconds", "blamed"),
        [
            (
                m.id,
                m.kind,
                "held out" if m.held_out else "tuned",
                "yes" if m.detected else "no",
                depth(m),
                f"{m.seconds:.1f}",
                m.blamed,
            )
            for m in marks
        ],
        title="Planted faults",
        record=figures,
        as_json=as_json,
    )
    if not as_json:
        keys = ("faults", "detected", "op_localised", "median_s", "clean_controls", "false_alarms")
        sys.stdout.write(", ".join(f"{k} {figures[k]}" for k in keys) + "\n")
