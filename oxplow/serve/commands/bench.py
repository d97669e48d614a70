"""`oxplow bench`: speed of a checkpoint, paired with a peer in one run.

Owns flags and presentation; `oxplow.serve.bench` does the work.
Invariant: the last line of `--json` is one object that names figures, machine, versions and dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    import torch

    from oxplow.ops.table import OpTable

__all__ = ["register"]

_WEIGHTS = ("stored", "fp32", "bf16")

Model = Annotated[str, typer.Option(help="Checkpoint directory, or `nano` for the bundled one.")]
Weights = Annotated[
    str, typer.Option(help="Format of plain weights in memory: stored, fp32, bf16.")
]
Threads = Annotated[int, typer.Option(min=1, help="Compute threads of both sides.")]
Peer = Annotated[str | None, typer.Option(help="Compare with this engine: transformers.")]
Pairs = Annotated[int, typer.Option(min=3, help="Interleaved rounds.")]
Append = Annotated[Path | None, typer.Option(help="Append the record to this JSONL file.")]


def register(app: typer.Typer) -> None:
    """Add the command group to `app`."""
    group = typer.Typer(no_args_is_help=True, help="Measure speed, paired with a peer in one run.")
    group.command(
        "decode",
        epilog="Example: oxplow bench decode --model nano --weights fp32 --peer transformers",
    )(_decode)
    group.command(
        "prefill", epilog="Example: oxplow bench prefill --tokens 512 --peer transformers --json"
    )(_prefill)
    app.add_typer(group, name="bench")


def _decode(
    model: Model = "nano",
    weights: Weights = "stored",
    threads: Threads = 1,
    peer: Peer = None,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens before decoding.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded per round.")] = 32,
    pairs: Pairs = 7,
    append: Append = None,
    as_json: AsJson = False,
) -> None:
    """Time greedy decoding of one request: tokens per second, share of the byte floor."""
    command = f"oxplow bench decode --model {model} --weights {weights} --threads {threads}"
    command += f" --context {context} --tokens {tokens} --pairs {pairs}" + (
        f" --peer {peer}" if peer else ""
    )
    _run(command, model, weights, threads, peer, context, tokens, pairs, append, as_json)


def _prefill(
    model: Model = "nano",
    weights: Weights = "stored",
    threads: Threads = 1,
    peer: Peer = None,
    tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 512,
    pairs: Pairs = 7,
    append: Append = None,
    as_json: AsJson = False,
) -> None:
    """Time the prefill of one prompt from empty caches; prints prompt tokens per second."""
    command = f"oxplow bench prefill --model {model} --weights {weights} --threads {threads}"
    command += f" --tokens {tokens} --pairs {pairs}" + (f" --peer {peer}" if peer else "")
    _run(command, model, weights, threads, peer, tokens, 0, pairs, append, as_json)


def _run(
    command: str,
    model: str,
    weights: str,
    threads: int,
    peer: str | None,
    context: int,
    tokens: int,
    pairs: int,
    append: Path | None,
    as_json: bool,
) -> None:
    import torch

    from oxplow.serve import bench

    if peer not in (None, "transformers"):
        raise ConfigError("unknown peer", got=peer, wanted="transformers")
    torch.set_num_threads(threads)
    directory, ops, dtype = _directory(model), _table(), _weight_dtype(weights)
    plan = bench.BenchPlan(prompt_tokens=context, new_tokens=tokens, pairs=pairs)
    ours = bench.OurEngine(directory, ops, dtype, context + max(tokens, 64) + 64)
    other = bench.TransformersPeer(directory, ops.facts.device) if peer else None
    record: dict[str, Any] = {"command": command, "model": model, "weights": weights}
    record |= bench.run_bench(plan, ours, other) | bench.machine_record(ops, threads)
    if tokens:
        floor = bench.step_floor(directory, ops, dtype, context)
        record |= {
            "floor_bytes": floor.bytes,
            "floor_share": floor.bytes / record["bandwidth_bytes_s"] * record["ours_tok_s"],
        }
    if append is not None:
        with append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    rows = [
        (key, f"{value:.4g}" if isinstance(value, float) else value)
        for key, value in record.items()
    ]
    report(("figure", "value"), rows, title=command, record=record, as_json=as_json)


def _directory(model: str) -> Path:
    if model == "nano":
        return Path(__file__).resolve().parents[2] / "models" / "nano"
    return Path(model)


def _table() -> OpTable:
    import torch

    from oxplow.contracts import CONTRACTS
    from oxplow.ops.kernels import builtin_kernels
    from oxplow.ops.table import Facts, select

    has_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if has_gpu else ("cpu", torch.float32)
    return select(builtin_kernels(), CONTRACTS, Facts(device=torch.device(device), dtype=dtype))


def _weight_dtype(weights: str) -> torch.dtype | None:
    import torch

    if weights not in _WEIGHTS:
        raise ConfigError("unknown weight format", got=weights, wanted=", ".join(_WEIGHTS))
    return {"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16}[weights]
