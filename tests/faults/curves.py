"""Excitation curves: how often a probe sees a fault, against what makes the fault show.

Owns the sweeps. Run `python -m tests.faults.curves FOLDER` from the root of the checkout: one SVG a
curve and `curves.json`. Invariant: each point is a share of fresh seeds, on the kernels as planted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from oxplow.contracts import CONTRACTS, kda_cases, mla, router
from oxplow.contracts.schema import Args, Case, CaseKind
from oxplow.feedback import offsets
from oxplow.feedback.finding import Curve, Verdict
from oxplow.feedback.gate import examine
from oxplow.serve.cache_audits import kept_states
from oxplow.serve.model_files import default_model
from oxplow.serve.workbench import Workbench
from tests.faults import FAULTS
from tests.faults.swap import value

Build = Callable[[torch.Generator], Args]
SEEDS = 8


def plant(fault_id: str) -> AbstractContextManager[None]:
    """Open the switch of one fault."""
    return next(f for f in FAULTS if f.id == fault_id).plant()


def op_rate(op: str, build: Build, seeds: int = SEEDS) -> float:
    """Return the share of seeds at which the contract's examination rejects the bound kernel."""
    bench, case = Workbench(directory=default_model()), Case("sweep", CaseKind.EXCITATION, build)
    kernel = bench.table.kernels[op]
    seen = [
        not examine(CONTRACTS[op], kernel.name, kernel.run, case, seed=s).ok for s in range(seeds)
    ]
    return sum(seen) / len(seen)


def sweep(
    fault_id: str, points: Sequence[int], rate: Callable[[int], float]
) -> tuple[tuple[float, float], ...]:
    """Return (x, rate) with the fault planted."""
    with plant(fault_id):
        return tuple((float(x), rate(x)) for x in points)


def routed(rows: int, experts: int) -> Build:
    return lambda g: router._router_case((rows, 48, experts, 4), g)


def decayed(length: int, gate: Callable[..., torch.Tensor]) -> Build:
    return lambda g: kda_cases.prompts(g, lengths=[length], fresh=(0,), gate=gate)


def attended(cached: int, scale: float) -> Build:
    return lambda g: mla._dense_case([(cached, 1)], g, scale=scale)


def wide_pool(power: int) -> float:
    contract = CONTRACTS["latent_write"]
    with value(offsets, "ELEMENTS", 1 << power):
        bench = Workbench(directory=default_model())
        run = bench.table.kernels["latent_write"].run
        found = offsets.check_offsets(contract, run, repro="oxplow diagnose --only offsets")
    return float(found.verdict is Verdict.FAIL)


def states(blocks: int) -> float:
    seen = [
        bool(kept_states(Workbench(directory=default_model(), seed=s), blocks)) for s in range(2)
    ]
    return sum(seen) / len(seen)


def curves() -> dict[str, Curve]:
    """Return every curve by file name."""
    rows, lengths = (1, 2, 4, 8, 12, 16, 17, 24, 32), (16, 32, 48, 64, 65, 80, 96, 128, 256)
    return {
        "f04-rows": Curve(
            title="F04: router in bfloat16 below 17 rows",
            x_label="rows in the call",
            y_label="share of seeds that see it",
            series={"16 experts": sweep("F04", rows, lambda n: op_rate("router", routed(n, 16)))},
        ),
        "f03-experts": Curve(
            title="F03: routing bias in bfloat16",
            x_label="rows in the call",
            y_label="share of seeds that see it",
            log_x=True,
            series={
                f"{e} experts": sweep(
                    "F03", (1, 4, 16, 64, 256), lambda n, e=e: op_rate("router", routed(n, e))
                )
                for e in (16, 64, 288)
            },
        ),
        "f09-length": Curve(
            title="F09: states written every 32 rows, read every 64",
            x_label="tokens of the prefill piece",
            y_label="share of seeds that see it",
            series={
                name: sweep(
                    "F09",
                    lengths,
                    lambda n, gate=gate: op_rate("kda_prefill", decayed(n, gate), 4),
                )
                for name, gate in (
                    ("weak decay", kda_cases.weak),
                    ("typical decay", kda_cases.typical),
                    ("strong decay", kda_cases.strong),
                )
            },
        ),
        "f02-cached": Curve(
            title="F02: log-sum-exps of base 2 merged as natural ones",
            x_label="cached tokens",
            y_label="share of seeds that see it",
            series={
                f"score scale {s}": sweep(
                    "F02",
                    (0, 1, 2, 4, 8, 16, 64),
                    lambda n, s=s: op_rate("dense_mla", attended(n, s)),
                )
                for s in (0.01, 1.0, 6.0)
            },
        ),
        "f08-elements": Curve(
            title="F08: an offset of 32 bits",
            x_label="elements of the pool, power of two",
            y_label="seen",
            series={"latent_write": sweep("F08", (24, 27, 29, 30, 31), wide_pool)},
        ),
        "f10-blocks": Curve(
            title="F10: a state filed under a block of another size",
            x_label="whole blocks of the repeated prompt",
            y_label="share of seeds that see it",
            series={"kept states": sweep("F10", (2, 3, 4, 5, 6), states)},
        ),
    }


def svg(curve: Curve) -> str:
    """Return one plot as an SVG file of its own."""
    from matplotlib import pyplot, rcParams

    rcParams["svg.fonttype"] = "none"  # text as text: a quarter of the size
    figure, axes = pyplot.subplots(figsize=(5.2, 3.0))
    for name, line in curve.series.items():
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    axes.set(title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label, ylim=(-0.05, 1.05))
    axes.set_xscale("log" if curve.log_x else "linear")
    axes.legend(fontsize=8)
    figure.tight_layout()
    from io import StringIO

    out = StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return out.getvalue()


def main(folder: Path) -> None:
    """Write every curve into `folder`."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    made = curves()
    for name, curve in made.items():
        (folder / f"{name}.svg").write_text(svg(curve), encoding="utf-8")
    rows = {name: {k: list(v) for k, v in curve.series.items()} for name, curve in made.items()}
    (folder / "curves.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
