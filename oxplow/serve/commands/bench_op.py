"""`oxplow bench op`: each op's kernel, paired with itself or another, against the machine's floor.

Owns flags and presentation; `oxplow.feedback.op_bench` measures.
Invariant: an answer is one of pass, fail, inconclusive, invalid; a busy machine gives the third.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxplow.errors import ConfigError
from oxplow.serve.console import AsJson, report

if TYPE_CHECKING:
    import torch

    from oxplow.feedback.calibrate import MachineProfile
    from oxplow.feedback.finding import Finding
    from oxplow.ops.table import Kernel

__all__ = ["ReportFile", "add_to"]

ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML report here.")
]


def add_to(group: typer.Typer) -> None:
    """Add the command to the group `bench`."""
    group.command("op", epilog="Example: oxplow bench op linear kda_prefill --report ops.html")(_op)


def _op(
    ops: Annotated[list[str] | None, typer.Argument(help="Only these ops; all if none.")] = None,
    device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    pairs: Annotated[int, typer.Option(min=3, help="Interleaved rounds.")] = 15,
    against: Annotated[str | None, typer.Option(help="Compare with the kernel so called.")] = None,
    case: Annotated[str | None, typer.Option(help="A case of the contract, as it is.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    report_file: ReportFile = None,
    as_json: AsJson = False,
) -> None:
    """Time kernels on fresh inputs; each has its share of the machine's limit beside it."""
    import torch

    from oxplow.contracts import CONTRACTS
    from oxplow.feedback.report import write_report
    from oxplow.serve.commands.calibrate import profile_for
    from oxplow.serve.devices import torch_device

    unknown = sorted(set(ops or ()) - set(CONTRACTS))
    if unknown:
        raise ConfigError("unknown op", got=", ".join(unknown), wanted=", ".join(CONTRACTS))
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError("unknown dtype", got=dtype, wanted="float32 or bfloat16")
    place = torch_device(device)
    torch.set_num_threads(threads)
    profile, _, _ = profile_for(place, threads)
    bench = _Bench(place, getattr(torch, dtype), pairs, against, case, threads, profile)
    findings = [bench.run(op) for op in ops or CONTRACTS]
    if report_file is not None:
        findings_shown = [*findings, *bench.roof()]
        write_report(findings_shown, report_file, "oxplow bench op", {"machine": profile.origin()})
    rows = [(f.locus.op, f.locus.parameter, f.verdict.value, f.summary) for f in findings]
    record = {"findings": [f.row() for f in findings], "machine": profile.row()}
    report(("op", "kernel", "verdict", "told"), rows, title=f"bench op on {device}, {dtype}",
           record=record, as_json=as_json)  # fmt: skip


class _Bench:
    """The settings of one call, and what it measured."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        pairs: int,
        against: str | None,
        case: str | None,
        threads: int,
        profile: MachineProfile,
    ) -> None:
        """Keep the settings."""
        self.device, self.dtype, self.pairs = device, dtype, pairs
        self.against, self.case, self.threads, self.profile = against, case, threads, profile
        self.points: dict[str, tuple[int, int, float]] = {}

    def run(self, op: str) -> Finding:
        """Time one op; a kernel that cannot be had, or is wrong, is an invalid finding."""
        import torch

        from oxplow.contracts import CONTRACTS
        from oxplow.errors import ContractError, KernelUnavailable
        from oxplow.feedback.finding import Finding, Locus, Verdict
        from oxplow.feedback.op_bench import OpPlan, op_finding, service_case, time_op

        began = time.perf_counter()
        contract = CONTRACTS[op]
        try:
            kernel, other = self._kernels(op)
            chosen = service_case(contract, self.profile)
            plan = OpPlan(
                contract=contract,
                case=contract.case(self.case) if self.case else chosen,
                dtype=self.dtype,
                device=self.device,
                pairs=self.pairs,
            )
            timing = time_op(plan, kernel, other, self.profile)
        except (ConfigError, ContractError, KernelUnavailable) as error:
            return Finding(
                probe="bench.op", verdict=Verdict.INVALID, summary=str(error),
                locus=Locus(component="ops", op=op), repro=self._repro(op),
            )  # fmt: skip
        cost = contract.cost(plan.case.build(torch.Generator().manual_seed(0)))
        self.points[op] = (cost.flops, cost.bytes, timing.seconds)
        spent = time.perf_counter() - began
        return op_finding(plan, timing, self.profile, repro=self._repro(op), cost_s=spent)

    def roof(self) -> list[Finding]:
        """Return one finding that carries the roofline of everything that was timed."""
        from oxplow.feedback.finding import Finding, Verdict
        from oxplow.feedback.op_bench import roofline

        if not self.points:
            return []
        curve = roofline(self.points, self.profile)
        told = f"{len(self.points)} ops under the roof of this machine"
        return [
            Finding(probe="bench.roofline", verdict=Verdict.PASS, summary=told, curves=(curve,))
        ]

    def _kernels(self, op: str) -> tuple[Kernel, Kernel | None]:
        from oxplow.ops.kernels import builtin_kernels
        from oxplow.ops.table import Facts, select

        facts = Facts(device=self.device, dtype=self.dtype)
        candidates = [k for k in builtin_kernels() if k.op == op]
        kernel = select(candidates, (op,), facts).kernels[op]
        if self.against is None:
            return kernel, None
        other = select(candidates, (op,), facts, {op: self.against}).kernels[op]
        return kernel, other

    def _repro(self, op: str) -> str:
        more = f" --against {self.against}" if self.against else ""
        more += f" --case {self.case}" if self.case else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"oxplow bench op {op} --device {self.device} --dtype {dtype}"
            f" --pairs {self.pairs} --threads {self.threads}{more}"
        )
