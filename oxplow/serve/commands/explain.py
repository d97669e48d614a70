"""`oxplow explain`: which kernel computes each op here, and why every other was refused.

Owns the presentation only; the choice is made by `oxplow.ops.table`, the same call as at start.
Invariant: nothing is guessed: a device that does not answer is an error.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.config import Facts as MachineFacts
from oxplow.config import resolve
from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report, session
from oxplow.serve.machine import devices_that_answer, physical_cores

if TYPE_CHECKING:
    from oxplow.config import LoadedConfig
    from oxplow.ops.table import Choice, Facts

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("explain", epilog="Example: oxplow --set compute.device=cpu explain rms_norm")(
        _explain
    )


def _explain(
    context: typer.Context,
    ops: Annotated[list[str] | None, typer.Argument(help="Only these ops; all if none.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the chosen kernel of each op, the reason, and each refused kernel with its reason."""
    from oxplow.contracts import CONTRACTS
    from oxplow.ops.kernels import builtin_kernels
    from oxplow.ops.table import select

    loaded = session(context).load()
    unknown = sorted(set(ops or ()) - set(CONTRACTS))
    if unknown:
        raise ConfigError("unknown op", got=unknown, wanted="one of " + ", ".join(CONTRACTS))
    facts = _facts(loaded)
    table = select(builtin_kernels(), CONTRACTS, facts, loaded.runtime.preferred_kernels())
    choices = [c for c in table.explain() if not ops or c.op in ops]
    report(
        ("op", "kernel", "why", "refused"),
        [(c.op, c.chosen, c.reason, _refused(c)) for c in choices],
        title=f"Kernels on {facts.device}, {str(facts.dtype).removeprefix('torch.')}",
        record={
            "device": str(facts.device),
            "dtype": str(facts.dtype).removeprefix("torch."),
            "ops": {
                c.op: {"kernel": c.chosen, "reason": c.reason, "refused": dict(c.rejected)}
                for c in choices
            },
        },
        as_json=as_json,
    )


def _facts(loaded: "LoadedConfig") -> "Facts":
    """Turn settings into what kernels are asked; no model is loaded, so sizes are unknown."""
    import torch

    from oxplow.ops.table import Facts

    machine = MachineFacts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        # The length plays no part in the choice of kernels; resolve wants one.
        model_max_len_tokens=loaded.runtime.cache.max_model_len_tokens or 1 << 20,
    )
    decided = resolve(loaded.runtime, machine)
    return Facts(
        device=torch.device(decided.device),
        dtype=getattr(torch, decided.activation_dtype),
        invariant=decided.deterministic,
    )


def _refused(choice: "Choice") -> str:
    return "\n".join(f"{kernel}: {reason}" for kernel, reason in choice.rejected) or "-"
