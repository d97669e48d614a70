"""`oxplow eval`: what a checkpoint can do, and whether a setting costs any of it.

Owns flags, progress and presentation; `oxplow.feedback.exam` asks and scores, and
`oxplow.serve.evaluation` brings the engine.
Invariant: the last line of `--json` is one object; two sides of a comparison are asked the same
items, and every difference states its odds.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, Session, report, session

if TYPE_CHECKING:
    from oxplow.feedback.exam import ExamPlan, ExamResult

__all__ = ["register"]

_COLUMNS: tuple[str, ...] = ("figure", "value", "95%", "of")
_PAIR_COLUMNS: tuple[str, ...] = ("figure", "A", "B", "lost", "gained", "B - A, 95%", "p")
_SPARE_TOKENS = 256  # beside the longest haystack: the answer, and thinking that cannot be off


Settings = Annotated[
    str,
    typer.Option(
        help="KEY=VALUE,...: weights (stored, fp32, bf16), attention (sparse, dense), or a "
        "dotted name of `oxplow config --show`."
    ),
]
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(help="Two sides, each a saved result or settings: paired flips, A to B."),
]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(
        "eval", epilog="Example: oxplow eval --quick --compare attention=sparse attention=dense"
    )(_eval)


def _eval(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="Checkpoint directory, or `nano` for the bundled one.")
    ] = "nano",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer items: under 5 minutes on 2 cores for the nano.")
    ] = False,
    settings: Settings = "",
    compare: Compare = None,
    only: Annotated[
        str, typer.Option(help="Parts: text, needle, tool_call, json, picture, draft.")
    ] = "",
    lengths: Annotated[
        str, typer.Option(help="Needle lengths in tokens, such as 4096,8192; all if none.")
    ] = "",
    save: Annotated[
        Path | None, typer.Option(help="Keep every item's outcome in this JSON file.")
    ] = None,
    append: Annotated[
        Path | None, typer.Option(help="Append the record to this JSONL file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine a checkpoint on text, recall, tools, JSON and pictures that training never saw."""
    from oxplow.feedback.exam import FULL, QUICK

    plan, given = QUICK if quick else FULL, session(context)
    for path in (save, append):  # told before the work, not after it
        if path is not None and not path.parent.is_dir():
            raise ConfigError("there is no such folder", got=path.parent, where=path)
    plan = _with_lengths(plan, lengths)
    run = _Runs(given, model, plan, [p.strip() for p in only.split(",") if p.strip()])
    command = " ".join(["oxplow", *(f"--set {a}" for a in given.assignments), "eval"])
    command += (" --quick" if quick else "") + f" --model {model}"
    command += f" --only {only}" if only else ""
    command += f" --lengths {lengths}" if lengths else ""
    if compare is None:
        result = run.side(settings, save)
        command += f" --settings {settings}" if settings else ""
        record = {"command": command, **result.about} | _figures(result, plan)
        columns, rows = _COLUMNS, run.table(result)
    else:
        _refuse_settings(settings)
        sides = [run.resolve(text, save, name) for text, name in zip(compare, "ab", strict=True)]
        command += f" --compare '{compare[0]}' '{compare[1]}'"
        record = {"command": command, "plan": plan.name} | _comparison(*sides)
        columns, rows = _PAIR_COLUMNS, _changed(*sides)
    if append is not None:
        with append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    report(columns, rows, title=command, record=record, as_json=as_json)


def _with_lengths(plan: ExamPlan, lengths: str) -> ExamPlan:
    """Keep the plan's haystacks of the named lengths; their items stay the same."""
    named = [p.strip() for p in lengths.split(",") if p.strip()]
    if unknown := [n for n in named if n not in map(str, plan.haystacks)]:
        wanted = ", ".join(map(str, plan.haystacks))
        raise ConfigError("the plan has no such length", got=", ".join(unknown), wanted=wanted)
    kept = {n: count for n, count in plan.haystacks.items() if not named or str(n) in named}
    return replace(plan, haystacks=kept)


def _refuse_settings(settings: str) -> None:
    if settings:
        raise ConfigError(
            "--settings has no side to stand on beside --compare",
            got=settings,
            wanted="the settings of each side in --compare itself",
        )


class _Runs:
    """Runs sides of an evaluation of one model."""

    def __init__(self, given: Session, model: str, plan: ExamPlan, parts: list[str]) -> None:
        self._given, self._model, self._plan, self._parts = given, model, plan, parts

    def resolve(self, text: str, save: Path | None, name: str) -> ExamResult:
        """Return one side of a comparison: read from its file, or run under its settings."""
        from oxplow.feedback.exam import load_result

        if "=" not in text and text not in ("", "default"):
            return load_result(Path(text))
        kept = None if save is None else save.with_name(f"{save.stem}-{name}{save.suffix}")
        return self.side("" if text == "default" else text, kept)

    def side(self, text: str, save: Path | None) -> ExamResult:
        """Examine the model under settings, and keep the result if asked to."""
        from oxplow.feedback.exam import PARTS, run_exam, save_result
        from oxplow.serve.evaluation import EvalSettings, open_examinee
        from oxplow.serve.model_files import default_model

        settings = EvalSettings.parse(text)
        began, worked = time.perf_counter(), time.process_time()
        pairs = [f"{k}={v}" for k, v in (settings.assignments or {}).items()]
        mine = replace(self._given, assignments=(*self._given.assignments, *pairs))
        directory = default_model() if self._model == "nano" else Path(self._model)
        longest = max(self._plan.haystacks) + _SPARE_TOKENS
        examinee, about = open_examinee(directory, settings, mine.load().runtime, longest)
        opened = round(time.perf_counter() - began, 2)
        with _bar() as progress:
            task = progress.add_task(text or "default", total=1.0, part="")
            tell = _Teller(progress, task)
            result = run_exam(examinee, self._plan, tell.note, self._parts or PARTS)
        spent = round(time.process_time() - worked, 2)
        result.about = about | {"plan": self._plan.name, "cpu_seconds": spent}
        result.seconds = {"open": opened, **result.seconds}
        if save is not None:
            save_result(result, save)
        return result

    def table(self, result: ExamResult) -> list[tuple[str, ...]]:
        """Return the rows of one side, time and budget last."""
        from oxplow.feedback.exam.report import table

        spent = f"{sum(result.seconds.values()):.0f} s"
        note = f"budget {self._plan.budget_s:.0f} s; {result.about['cpu_seconds']:.0f} s of CPU"
        return [*table(result), ("time", spent, "", note)]


class _Teller:
    """Moves the bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._done = 0.0

    def note(self, part: str, share: float) -> None:
        """Advance by a share of the run; where there is no bar, say every tenth of it."""
        before = int(10 * self._done)
        self._done += share
        self._progress.update(self._task, advance=share, part=part)
        console = self._progress.console
        if not console.is_terminal and int(10 * self._done) > before:
            console.print(f"{100 * self._done:.0f}% done, at {part}")


def _bar() -> Progress:
    """Make a bar on standard error: standard output carries results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[part]}"),
        console=Console(stderr=True),
    )


def _figures(result: ExamResult, plan: ExamPlan) -> dict[str, Any]:
    from oxplow.feedback.exam.report import figures

    told = figures(result)
    return told | {"budget_s": plan.budget_s, "in_budget": told["seconds"] <= plan.budget_s}


def _comparison(a: ExamResult, b: ExamResult) -> dict[str, Any]:
    from oxplow.feedback.exam.report import changes, figures, flips, unpaired

    return {
        "a": {**a.about, **figures(a)},
        "b": {**b.about, **figures(b)},
        "flips": {f.part: asdict(f) for f in flips(a, b)},
        "changes": {c.name: _plain(asdict(c)) for c in changes(a, b)},
        "unpaired": unpaired(a, b),
        "seconds": round(sum(a.seconds.values()) + sum(b.seconds.values()), 2),
    }


def _plain(value: Any) -> Any:
    """Write an end that is not known as null: JSON has no NaN."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _changed(a: ExamResult, b: ExamResult) -> list[tuple[str, ...]]:
    from oxplow.feedback.exam.report import changes, flips, unpaired

    rows: list[tuple[str, ...]] = []
    for c in changes(a, b):
        d = c.difference
        span = f"{d.value:+.4f} ({d.low:+.4f} to {d.high:+.4f})"
        note = "differs" if d.excludes_zero else "no difference"
        rows.append((c.name, f"{c.a:.4f}", f"{c.b:.4f}", "", "", span, note))
    for f in flips(a, b):
        shares = [f"{100 * right / f.num_items:.1f}%" for right in (f.right_a, f.right_b)]
        d = f.change
        span = f"{100 * d.value:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f}) points"
        rows.append((f.part, *shares, str(f.lost), str(f.gained), span, f"{f.p:.3g}"))
    left_out = unpaired(a, b)
    return [*rows, ("in one side only", str(left_out), "", "", "", "", "")] if left_out else rows
