"""`oxplow bench`: speed of a checkpoint, paired with a peer in one run.

Owns flags and presentation; `oxplow.serve.bench` does the work.
Invariant: the last line of `--json` is one object that names figures, machine, versions and dtype.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxplow.config import Facts, LoadedConfig, RuntimeConfig, resolve
from oxplow.errors import ConfigError
from oxplow.serve.commands import bench_load, bench_op, bench_sweep
from oxplow.serve.console import AsJson, report, session

if TYPE_CHECKING:
    import torch

    from oxplow.ops.table import OpTable

__all__ = ["register"]

Model = Annotated[str, typer.Option(help="Checkpoint directory, or `nano` for the bundled one.")]
Weights = Annotated[
    str, typer.Option(help="Format of plain weights in memory: stored, fp32, bf16.")
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Compute threads of both sides; compute.threads or 1 if none."),
]
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
    bench_op.add_to(group)
    bench_load.add_to(group)
    bench_sweep.add_to(group)
    app.add_typer(group, name="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One call's flags; `new_tokens` 0 times the prefill."""

    kind: str
    model: str
    weights: str
    loaded: LoadedConfig
    threads: int
    peer: str | None
    prompt_tokens: int
    new_tokens: int
    pairs: int
    append: Path | None
    as_json: bool

    @property
    def command(self) -> str:
        """The command line that repeats this run."""
        lengths = f"--tokens {self.prompt_tokens}"
        if self.new_tokens:
            lengths = f"--context {self.prompt_tokens} --tokens {self.new_tokens}"
        peer = f" --peer {self.peer}" if self.peer else ""
        return (
            f"oxplow bench {self.kind} --model {self.model} --weights {self.weights}"
            f" --threads {self.threads} {lengths} --pairs {self.pairs}{peer}"
        )


def _decode(
    ctx: typer.Context,
    model: Model = "nano",
    weights: Weights = "stored",
    threads: Threads = None,
    peer: Peer = None,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens before decoding.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded per round.")] = 32,
    pairs: Pairs = 7,
    append: Append = None,
    as_json: AsJson = False,
) -> None:
    """Time greedy decoding of one request: tokens per second, share of the byte floor."""
    loaded = session(ctx).load({"compute.threads": threads} if threads else None)
    _run(
        _Asked(
            loaded=loaded,
            kind="decode",
            model=model,
            weights=weights,
            threads=loaded.runtime.compute.threads or 1,
            peer=peer,
            prompt_tokens=context,
            new_tokens=tokens,
            pairs=pairs,
            append=append,
            as_json=as_json,
        )
    )


def _prefill(
    ctx: typer.Context,
    model: Model = "nano",
    weights: Weights = "stored",
    threads: Threads = None,
    peer: Peer = None,
    tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 512,
    pairs: Pairs = 7,
    append: Append = None,
    as_json: AsJson = False,
) -> None:
    """Time the prefill of one prompt from empty caches; prints prompt tokens per second."""
    loaded = session(ctx).load({"compute.threads": threads} if threads else None)
    _run(
        _Asked(
            loaded=loaded,
            kind="prefill",
            model=model,
            weights=weights,
            threads=loaded.runtime.compute.threads or 1,
            peer=peer,
            prompt_tokens=tokens,
            new_tokens=0,
            pairs=pairs,
            append=append,
            as_json=as_json,
        )
    )


def _run(asked: _Asked) -> None:
    import torch

    from oxplow.serve import bench

    if asked.peer not in (None, "transformers"):
        raise ConfigError("unknown peer", got=asked.peer, wanted="transformers")
    torch.set_num_threads(asked.threads)
    directory = _directory(asked.model)
    ops = _table(asked.loaded.runtime, directory)
    dtype = _weight_dtype(asked.weights)
    plan = bench.BenchPlan(
        prompt_tokens=asked.prompt_tokens, new_tokens=asked.new_tokens, pairs=asked.pairs
    )
    ours = bench.OurEngine(
        directory, ops, dtype, asked.prompt_tokens + max(asked.new_tokens, 64) + 64
    )
    peer = bench.TransformersPeer(directory, ops.facts.device) if asked.peer else None
    record: dict[str, Any] = {"command": asked.command, "model": asked.model}
    record |= {"weights": asked.weights} | bench.run_bench(plan, ours, peer)
    record |= bench.machine_record(ops, asked.threads)
    if asked.new_tokens:
        floor = bench.step_floor(directory, ops, dtype, asked.prompt_tokens)
        seconds = floor.bytes / record["bandwidth_bytes_s"]
        record |= {"floor_bytes": floor.bytes, "floor_share": seconds * record["ours_tok_s"]}
    if asked.append is not None:
        with asked.append.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    rows = [(k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in record.items()]
    report(("figure", "value"), rows, title=asked.command, record=record, as_json=asked.as_json)


def _directory(model: str) -> Path:
    from oxplow.serve.model_files import default_model

    return default_model() if model == "nano" else Path(model)


def _table(runtime: RuntimeConfig, directory: Path) -> OpTable:
    """Choose kernels as the server would: device, dtype and wishes are settings."""
    from oxplow.serve.kernel_choice import chosen_kernels
    from oxplow.serve.machine import devices_that_answer, physical_cores
    from oxplow.serve.model_files import read_model_files

    facts = Facts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        model_max_len_tokens=read_model_files(directory).max_positions,
    )
    return chosen_kernels(resolve(runtime, facts), runtime)


def _weight_dtype(weights: str) -> torch.dtype | None:
    from oxplow.serve.bench import WEIGHT_FORMATS

    if weights not in WEIGHT_FORMATS:
        raise ConfigError("unknown weight format", got=weights, wanted=", ".join(WEIGHT_FORMATS))
    return WEIGHT_FORMATS[weights]
