"""The rungs of `oxplow check`: which probe stands on which step, for one model and device.

Owns the list, its two sizes (quick and whole) and the repro command of each rung. Knows every
probe, judges nothing itself. Invariant: each rung relies only on what lower rungs have shown, and
each command in a finding repeats that finding alone.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from oxplow.contracts import CONTRACTS
from oxplow.contracts.schema import Case, CaseKind
from oxplow.errors import ConfigError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.growth import SWEEPS, growth_finding
from oxplow.feedback.ladder import Rung
from oxplow.feedback.op_check import OpWork, check_op
from oxplow.feedback.segments import SegmentSweep, segment_finding
from oxplow.feedback.semantics import DeviceProfile, probe_semantics
from oxplow.ops.affine import PRODUCTS, Chain, Form, choose_product
from oxplow.ops.table import Kernel
from oxplow.serve.audits import AUDITS, audit
from oxplow.serve.engine_cuts import WAYS, DeterministicBench, way_finding
from oxplow.serve.model_probes import (
    ModelUnderTest,
    cut_findings,
    judge_forward,
    repeat_finding,
)
from oxplow.serve.workbench import Workbench

__all__ = ["Bringup"]

_QUICK_WAYS = ("in company", "cached", "preempted", "restarted")
_QUICK_TOKENS, _TOKENS = 20, 64
_EMBEDDED = 64  # rows compared with the stored ones


@dataclass(frozen=True, kw_only=True)
class Bringup:
    """Everything that `oxplow check` looks at. `only` is RUNG or RUNG:PART."""

    directory: Path
    device: torch.device
    quick: bool = False
    seed: int = 0
    only: str = ""
    profile: list[DeviceProfile] = field(default_factory=list)

    def rungs(self) -> list[Rung]:
        """Return the rungs from the bottom up. Raises ConfigError for an unknown `only`."""
        table: tuple[tuple[str, str, Callable[[], Sequence[Finding]]], ...] = (
            ("device", "what the device does with numbers", self._device),
            ("weights", "every tensor is there, finite and not blank", self._weights),
            ("embedding", "rows are the stored rows", self._embedding),
            ("ops", "every kernel keeps its contract", self._ops),
            ("segments", "KDA states folded over segments are those of one piece", self._segments),
            ("growth", "errors grow with length and position as they must", self._growth),
            ("layers", "every op of a forward pass keeps its contract at work", self._layers),
            ("repeat", "the same inputs give the same bits", self._repeat),
            ("cuts", "prefill = decode, in any pieces, within the law", self._cuts),
            ("exact cuts", "the same, bit for bit, on deterministic kernels", self._exact_cuts),
            ("requests", "batch, reuse, preemption and restart change no bit", self._requests),
            ("audits", "engine parts against a second opinion", self._audits),
        )
        wanted = self.only.partition(":")[0]
        if wanted and wanted not in {name for name, _, _ in table}:
            raise ConfigError(
                "no such rung", got=wanted, wanted=", ".join(name for name, _, _ in table)
            )
        return [
            Rung(name=name, asks=asks, repro=self.repro(name), run=run)
            for name, asks, run in table
            if wanted in ("", name)
        ]

    def repro(self, rung: str, part: str = "") -> str:
        """Return the command that runs one rung, or one part of it."""
        what = f"{rung}:{part}" if part else rung
        words = ["oxplow", "check", "--model", str(self.directory), "--only", what]
        if self.device.type != "cpu":
            words += ["--device", str(self.device)]
        if self.seed:
            words += ["--seed", str(self.seed)]
        return shlex.join([*words, *(["--quick"] if self.quick else [])])

    def kernel(self, op: str) -> Kernel:
        """Return the kernel that the rungs judge for `op`."""
        return self._target.table.kernels[op]

    @property
    def _part(self) -> str:
        return self.only.partition(":")[2]

    @cached_property
    def _target(self) -> ModelUnderTest:
        return ModelUnderTest(directory=self.directory, device=self.device, seed=self.seed)

    def _chosen(self, names: Sequence[str], quick: Sequence[str]) -> Sequence[str]:
        if not self._part:
            return quick if self.quick else names
        if self._part not in names:
            raise ConfigError("no such part", got=self._part, wanted=", ".join(names))
        return [self._part]

    # The rungs, bottom first.

    def _device(self) -> list[Finding]:
        profile, findings = probe_semantics(self.device, self.repro("device"))
        self.profile.append(profile)
        return findings

    def _weights(self) -> list[Finding]:
        began = time.perf_counter()
        wrong: list[tuple[str, str]] = []
        count = 0
        for path in sorted(self.directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    count += 1
                    fault = _blank(file.get_tensor(name))
                    if fault:
                        wrong.append((name, fault))
        _ = self._target.model  # every stored tensor is accounted for, or a WeightError
        base = Finding(
            probe="weights",
            verdict=Verdict.PASS,
            summary=f"{count} tensors are finite and all are used",
            effect=Effect(name="bad tensors", value=len(wrong), unit="tensors", bound=0, n=count),
            repro=self.repro("weights"),
            cost_s=time.perf_counter() - began,
        )
        if not count:
            return [replace(base, verdict=Verdict.INVALID, summary="no *.safetensors here")]
        if not wrong:
            return [base]
        name, fault = wrong[0]
        locus = Locus(component="model", op="weights", parameter=name)
        told = f"{len(wrong)} tensors are bad, first {name}: {fault}"
        return [replace(base, verdict=Verdict.FAIL, summary=told, locus=locus)]

    def _embedding(self) -> list[Finding]:
        model = self._target.model
        vocab = model.spec.text.vocab_size
        ids = torch.linspace(0, vocab - 1, min(_EMBEDDED, vocab)).long()
        got = model.embedding(ids.to(self.device)).float().cpu()
        name, stored = _stored_embedding(self.directory)
        wanted = stored[ids].float()
        base = Finding(
            probe="embedding",
            verdict=Verdict.PASS,
            summary=f"{len(ids)} rows equal the stored ones of {name}",
            excitation={"rows": len(ids)},
            repro=self.repro("embedding"),
        )
        differ = (got != wanted).any(1).nonzero()
        if not len(differ):
            return [base]
        row = int(ids[int(differ[0])])
        locus = Locus(component="model", op="embedding", position=row, parameter=name)
        told = f"{len(differ)} rows differ from the stored ones, first token id {row}"
        return [replace(base, verdict=Verdict.FAIL, summary=told, locus=locus)]

    def _ops(self) -> list[Finding]:
        findings = []
        for op in self._chosen(list(CONTRACTS), list(CONTRACTS)):
            contract = CONTRACTS[op]
            cases = _cases(contract.cases, quick=self.quick)
            work = OpWork(contract, self.kernel(op), cases, device=self.device, seed=self.seed)
            findings.append(check_op(work, f"op:{op}", self.repro("ops", op)))
            if not findings[-1].ok:
                break  # the rung is red; the other ops wait until this one is mended
        return findings

    def _segments(self) -> list[Finding]:
        """Judge the chain that this device gets; a part names another one: "tf32 dense"."""
        product, reason = choose_product(self.device)
        chains = {"chosen": Chain.of(product)}
        chains |= {f"{p.name} {f.value}": Chain.of(p, f) for p in PRODUCTS for f in Form}
        sweep = SegmentSweep(segments=(1, 8, 32) if self.quick else (1, 2, 4, 8, 16, 32),
                             seed=self.seed)  # fmt: skip
        return [
            segment_finding(
                chains[name],
                self.repro("segments", name),
                sweep,
                chosen_because=reason if name == "chosen" else "",
                device=self.device,
            )
            for name in (self._chosen(list(chains), ()) if self._part else ["chosen"])
        ]

    def _growth(self) -> list[Finding]:
        """Fit the growth of errors on the kernels that this device gets."""
        draws = 3 if self.quick else 7
        return [
            growth_finding(
                CONTRACTS[name],
                self.kernel(name).run,
                replace(SWEEPS[name], draws=draws, device=self.device),
                seed=self.seed,
                repro=self.repro("growth", name),
            )
            for name in self._chosen(list(SWEEPS), list(SWEEPS))
        ]

    def _layers(self) -> list[Finding]:
        length = _QUICK_TOKENS if self.quick else _TOKENS
        return [judge_forward(self._target, length, self.repro("layers"))]

    def _repeat(self) -> list[Finding]:
        return [repeat_finding(self._target, _QUICK_TOKENS, self.repro("repeat"))]

    def _cuts(self) -> list[Finding]:
        length = 3 * _QUICK_TOKENS if self.quick else 2 * _TOKENS
        return cut_findings(self._target, length, self.repro("cuts"))

    def _exact_cuts(self) -> list[Finding]:
        length = 2 * _QUICK_TOKENS if self.quick else 2 * _TOKENS
        target = replace(self._target, invariant=True)
        return cut_findings(target, length, self.repro("exact cuts"))

    def _requests(self) -> list[Finding]:
        if self.device.type != "cpu":
            return [self._not_here("requests")]
        bench = DeterministicBench(directory=self.directory, seed=self.seed)
        names = self._chosen(list(WAYS), _QUICK_WAYS)
        return [way_finding(name, bench, self.repro("requests", name)) for name in names]

    def _audits(self) -> list[Finding]:
        if self.device.type != "cpu":
            return [self._not_here("audits")]
        bench = Workbench(directory=self.directory, seed=self.seed)
        names = self._chosen(list(AUDITS), list(AUDITS))
        return [audit(name, bench, self.repro("audits", name)) for name in names]

    def _not_here(self, rung: str) -> Finding:
        return Finding(
            probe=rung,
            verdict=Verdict.INVALID,
            summary=f"these probes run on the CPU only so far, not on {self.device}",
        )


def _cases(cases: Sequence[Case], *, quick: bool) -> Sequence[Case]:
    """Return every case, or where time is short one ordinary case and all that excite a fault."""
    if not quick:
        return cases
    first = next(c for c in cases if c.kind is CaseKind.ORDINARY)
    return [first, *(c for c in cases if c.kind is CaseKind.EXCITATION)]


def _blank(tensor: torch.Tensor) -> str:
    """Say what is wrong with a stored tensor; empty where nothing is."""
    if tensor.numel() == 0:
        return "it is empty"
    values = tensor.float()
    if not bool(values.isfinite().all()):
        return "it holds numbers that are not finite"
    is_matrix = tensor.ndim >= 2 and min(tensor.shape) > 1
    if is_matrix and bool((values == values.flatten()[0]).all()):
        return "all its values are equal"
    return ""


def _stored_embedding(directory: Path) -> tuple[str, torch.Tensor]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("embed_tokens.weight") and "mtp" not in name:
                    return name, file.get_tensor(name)
    raise ConfigError("no embedding is stored", wanted="*embed_tokens.weight", where=directory)
