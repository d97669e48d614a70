"""`oxplow explain`: which kernel computes each op here, and why every other was refused.

Owns the presentation only; the choice is made by `oxplow.ops.table`, the same call as at start.
Invariant: nothing is guessed: a device that does not answer is an error, an op without a kernel is
shown with its refusals and gives exit code 1.
"""

from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.config import Facts as MachineFacts
from oxplow.config import LoadedConfig, resolve
from oxplow.errors import ConfigError, KernelUnavailable
from oxplow.serve.console import AsJson, report, session
from oxplow.serve.machine import devices_that_answer, physical_cores

if TYPE_CHECKING:
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

    loaded = session(context).load()
    unknown = sorted({*(ops or ()), *loaded.runtime.preferred_kernels()} - set(CONTRACTS))
    if unknown:
        raise ConfigError("unknown op", got=", ".join(unknown), wanted=", ".join(CONTRACTS))
    facts = _facts(loaded)
    choices = [_choose(op, facts, loaded) for op in ops or CONTRACTS]
    missing = [c.op for c in choices if not c.chosen]
    dtype = str(facts.dtype).removeprefix("torch.")
    report(
        ("op", "kernel", "why", "refused"),
        [(c.op, c.chosen or "NONE", c.reason, _refused(c)) for c in choices],
        title=f"Kernels on {facts.device}, {dtype}",
        record={
            "device": str(facts.device),
            "dtype": dtype,
            "missing": missing,
            "ops": {
                c.op: {
                    "kernel": c.chosen or None,
                    "reason": c.reason,
                    "refused": dict(c.rejected),
                }
                for c in choices
            },
        },
        as_json=as_json,
    )
    if missing:
        raise typer.Exit(1)


def _choose(op: str, facts: "Facts", loaded: LoadedConfig) -> "Choice":
    """Select for one op alone, so that an op without a kernel does not hide the others."""
    from oxplow.ops.kernels import builtin_kernels
    from oxplow.ops.table import Choice, select

    wish = {k: v for k, v in loaded.runtime.preferred_kernels().items() if k == op}
    candidates = [kernel for kernel in builtin_kernels() if kernel.op == op]
    try:
        return select(candidates, (op,), facts, wish).explain()[0]
    except KernelUnavailable as error:
        return Choice(op=op, chosen="", reason="no kernel can serve it", rejected=error.rejections)


def _facts(loaded: LoadedConfig) -> "Facts":
    """Turn settings into what kernels are asked; no model is loaded, so sizes are unknown."""
    from oxplow.serve.kernel_choice import kernel_facts

    machine = MachineFacts(
        physical_cores=physical_cores(),
        devices=devices_that_answer(),
        # The length plays no part in the choice of kernels; resolve wants one.
        model_max_len_tokens=loaded.runtime.cache.max_model_len_tokens or 1 << 20,
    )
    return kernel_facts(resolve(loaded.runtime, machine))


def _refused(choice: "Choice") -> str:
    return "\n".join(f"{kernel}: {reason}" for kernel, reason in choice.rejected) or "-"
