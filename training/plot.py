"""Draws the loss and skill curves of `docs/nano.md` from the saved logs.

Owns two pictures. Logs lie in `training/results`, one a run, in order, some with an evaluation
beside them; a run that started again from a checkpoint counts its tokens from 0, so offsets are
added here.

    python -m training.plot --results training/results --out docs
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SKILLS = {
    "needle 1K": "needle_1024_sparse",
    "needle 4K": "needle_4096_sparse",
    "tool calls": "tool_call_sparse",
    "JSON": "json_sparse",
    "pictures": "picture",
    "dev needle 1K": "dev_needle_1024_sparse",
    "dev needle 8K": "dev_needle_8192_sparse",
    "dev tool calls": "dev_tools_sparse",
}
Row = dict[str, float]


def load_runs(folder: Path) -> tuple[list[list[Row]], list[tuple[float, dict[str, object]]]]:
    """Return the runs' rows, tokens counted over all runs, and (tokens, evaluation) at each end."""
    runs, ends, offset, last = [], [], 0.0, 0.0
    for log in sorted(folder.glob("log_*.json")):
        rows: list[Row] = json.loads(log.read_text())
        offset += last if rows[0]["tokens"] < last else 0.0
        last = rows[-1]["tokens"]
        for row in rows:
            row["tokens"] += offset
        runs.append(rows)
        evaluation = folder / log.name.replace("log", "evaluation")
        if evaluation.exists():
            ends.append(((last + offset) / 1e6, json.loads(evaluation.read_text())))
    return runs, ends


def points_of(
    ends: list[tuple[float, dict[str, object]]], key: str, value: str
) -> tuple[list[float], list[float]]:
    """Return where a figure was read and what it was; not every evaluation has every figure."""
    found = [(x, e[key]["all"] if key == "picture" else e[key]) for x, e in ends if key in e]
    return [x for x, _ in found], [figure[value] for _, figure in found]


def mark_stages(axes: plt.Axes, runs: list[list[Row]]) -> None:
    """Shade every other context length and name it."""
    rows = [row for run in runs for row in run]
    start = rows[0]
    for before, row in zip(rows, [*rows[1:], None], strict=True):
        if row is None or row["length"] != before["length"]:
            left, right = start["tokens"] / 1e6, before["tokens"] / 1e6
            axes.text(
                (left + right) / 2,
                1.01,
                f"{int(before['length'])}",
                ha="center",
                fontsize=7,
                transform=axes.get_xaxis_transform(),
            )
            axes.axvline(right, color="0.8", lw=0.7)
            start = row if row is not None else start


def draw_losses(
    runs: list[list[Row]], ends: list[tuple[float, dict[str, object]]], file: Path
) -> None:
    """Draw corpus, MTP and alignment losses, and held-out bits a byte at the end of each run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, colour in (("corpus", "C0"), ("mtp", "C1"), ("align", "C2")):
        for index, rows in enumerate(runs):
            x = [row["tokens"] / 1e6 for row in rows]
            left.plot(
                x, [row[name] for row in rows], colour, lw=1, label=name if not index else None
            )
    mark_stages(left, runs)
    left.set(xlabel="M tokens", ylabel="nats a token", ylim=(0, 6))
    left.legend()
    for kind in ("code", "prose"):
        points = points_of(ends, f"held_out_{kind}_sparse", "bits_per_byte")
        right.plot(*points, marker="o", label=f"held-out {kind}")
    right.set(xlabel="M tokens", ylabel="bits a byte")
    right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def draw_skills(
    runs: list[list[Row]], ends: list[tuple[float, dict[str, object]]], file: Path
) -> None:
    """Draw token accuracy on training answers, and the examination at the end of each run."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for index, rows in enumerate(runs):
        x = [row["tokens"] / 1e6 for row in rows]
        left.plot(
            x, [row["answer_acc"] for row in rows], "C0", lw=1, label=None if index else "answers"
        )
        # Long rows leave pictures out of some steps, which count as 0: drawn for short rows only.
        seen = [row for row in rows if row["length"] != 4096]
        left.plot(
            [row["tokens"] / 1e6 for row in seen],
            [row["picture_acc"] for row in seen],
            "C3.",
            ms=2,
            label=None if index else "picture answers",
        )
    mark_stages(left, runs)
    left.set(xlabel="M tokens", ylabel="token accuracy, training phrasings", ylim=(0, 1))
    left.legend(loc="lower right")
    for label, key in SKILLS.items():
        right.plot(*points_of(ends, key, "exact"), marker="o", label=label)
    right.set(xlabel="M tokens", ylabel="examination, exact", ylim=(0, 1))
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("training/results"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    runs, ends = load_runs(args.results)
    draw_losses(runs, ends, args.out / "nano-losses.png")
    draw_skills(runs, ends, args.out / "nano-skills.png")


if __name__ == "__main__":
    main()
