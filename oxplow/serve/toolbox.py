"""The policy's toolbox on a bench: which instruments there are, what they see, how a failure is
sharpened and how a suspect is cleared.

Owns the odds of suspects per symptom, the reach and cost of instruments, and the command that
repeats each. Knows contracts, audits and loads by name, and no fault. Invariant: every instrument
can be run alone by `oxplow diagnose --only NAME`, which is the command its findings print.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oxplow.contracts import CONTRACTS
from oxplow.errors import ConfigError
from oxplow.feedback.environment import capture, environment_finding
from oxplow.feedback.finding import Finding, Locus, Verdict
from oxplow.feedback.gate import examine
from oxplow.feedback.hotspots import Profile, best_of_both, growth_finding
from oxplow.feedback.offsets import check_offsets, has_pools
from oxplow.feedback.op_check import OpWork, check_op
from oxplow.feedback.policy import Instrument
from oxplow.feedback.segments import SegmentSweep, segment_finding
from oxplow.feedback.starvation import Prefill, probe_transfer_starvation
from oxplow.ops import affine
from oxplow.ops.reference import reference_kernels
from oxplow.serve.audits import AUDITS, audit
from oxplow.serve.speed_bench import LOADS, GoodRun, answers_of, profile_load
from oxplow.serve.workbench import Workbench

__all__ = ["SYMPTOMS", "BenchToolbox", "MetricsToolbox"]

SYMPTOMS = ("accuracy", "nan", "ttft", "throughput", "itl", "hang")

_OP_ODDS = 0.6  # of all accuracy reports: an op's arithmetic; the rest are state and scheduling
_FAMILIES: Mapping[str, float] = {
    # Shares of the public reports of wrong results by family of ops.
    "kda": 4, "short_conv": 1, "mla": 4, "latent_write": 2, "pool_keys": 1, "index": 2, "router": 4,
    "experts": 4, "linear": 2, "norm": 1, "swiglu": 0.5, "mhc": 0.5, "vision": 2, "sample": 1,
}  # fmt: skip
_PARTS: Mapping[str, float] = {
    # Shares of the public reports of wrong state by part of the engine.
    "cache.prefix": 5, "cache.blocks": 3, "engine.encoder": 3, "engine.batch": 3,
    "engine.sampling": 2, "engine.handover": 2, "engine.scheduler": 1, "parallel": 2,
}  # fmt: skip
_AUDIT_REACH: Mapping[str, Mapping[str, float]] = {
    "step-tensors": {"engine.batch": 0.7, "engine.scheduler": 0.3},
    "pictures": {"engine.encoder": 0.9, "engine.batch": 0.5},
    "sampling": {"engine.sampling": 0.9},
    "kept-states": {"cache.prefix": 0.9, "engine.handover": 0.3},
    "block-counts": {"cache.blocks": 0.9, "engine.scheduler": 0.3},
    "lookups": {"cache.prefix": 0.5},
    "handover": {"engine.handover": 0.9},
    "progress": {"engine.scheduler": 0.9},
}
_AUDIT_COST_S, _LOAD_COST_S, _OFFSETS_COST_S, _SEGMENTS_COST_S = 0.5, 4.0, 0.2, 1.0
_DOUBTFUL = (1.06, 1.25)  # ratios that one more profile should confirm
_OP_COST_S: Mapping[str, float] = {"kda_prefill": 2.0, "dense_mla": 0.5, "index_select": 0.4}
_OTHER_SEED = 101
_SLOWER = 1.15  # whole time over the baseline's that metrics alone call slower


class BenchToolbox:
    """All instruments, for one bench and one symptom; a baseline enables those that compare."""

    def __init__(
        self, bench: Workbench, symptom: str = "", baseline: GoodRun | None = None,
        baseline_path: Path | None = None,
    ) -> None:  # fmt: skip
        if symptom and symptom not in SYMPTOMS:
            raise ConfigError("unknown symptom", got=symptom, wanted=", ".join(SYMPTOMS))
        self.bench, self.symptom, self._baseline = bench, symptom, baseline
        self._path = baseline_path
        self._profiles: dict[str, Profile] = {}

    @property
    def odds(self) -> Mapping[str, float]:
        """Suspects by symptom: speed complaints suspect time, all others suspect results."""
        ops = {f"ops/{op}": share for op, share in _op_shares().items()}
        parts = {name: (1 - _OP_ODDS) * n / sum(_PARTS.values()) for name, n in _PARTS.items()}
        if self.symptom in LOADS:
            return {"time/work": 0.7, "cache.prefix": 0.3 if self.symptom == "ttft" else 0.05}
        if self.symptom == "nan":  # an op computes it, or reads what nobody wrote
            return ops | {name: share / 3 for name, share in parts.items()}
        if self.symptom == "hang":
            return parts | {"engine.scheduler": 0.5}
        return ops | parts

    @property
    def surroundings(self) -> Sequence[Instrument]:
        """Compare versions, settings and load with the baseline's, where there is one."""
        return [self.named("environment")] if self._baseline is not None else []

    @property
    def first(self) -> Sequence[Instrument]:
        """Nothing: the cheap rungs win by value anyway."""
        return []

    @property
    def instruments(self) -> Sequence[Instrument]:
        """Return what the symptom makes worth a look."""
        loads = [self.named(f"time:{LOADS[self.symptom]}")] if self._compares() else []
        if self.symptom in LOADS:
            return [*loads, self.named("audit:lookups")]
        names = [f"ops:{op}" for op in CONTRACTS]
        names += ["offsets", "segments", *(f"audit:{a}" for a in AUDITS)]
        if self.symptom == "hang":
            names = [f"audit:{a}" for a in AUDITS]
        return [self.named(name) for name in names]

    def _compares(self) -> bool:
        return self._baseline is not None and self.symptom in LOADS

    def named(self, name: str) -> Instrument:
        """Return one instrument by name. Raises ConfigError for an unknown one."""
        kind, _, part = name.partition(":")
        if kind == "ops" and part in CONTRACTS:
            cost = _OP_COST_S.get(part, 0.2)
            return _instrument(name, cost, {f"ops/{part}": 0.9}, lambda: self._op(part))
        if kind == "offsets":
            reach = {f"ops/{op}": 0.1 for op, c in CONTRACTS.items() if has_pools(c)}
            return _instrument(name, _OFFSETS_COST_S, reach, self._offsets)
        if kind == "segments":
            reach = {"parallel": 0.9}
            return _instrument(name, _SEGMENTS_COST_S, reach, lambda: [self._segments()])
        if kind == "audit" and part in AUDITS:
            return _instrument(name, _AUDIT_COST_S, _AUDIT_REACH[part], lambda: self._audit(part))
        if kind == "time" and part in LOADS.values() and self._baseline is not None:
            reach = {"time/work": 0.9}
            return _instrument(name, _LOAD_COST_S, reach, lambda: self._time(part))
        if kind == "environment" and self._baseline is not None:
            return _instrument(name, 0.1, {}, self._environment)
        if kind == "transfer" and part in PREFILLS:
            return _instrument(name, 3.0, {}, lambda: [_starvation(part, self._repro(name))])
        needs = " (it needs --baseline)" if kind in ("time", "environment") else ""
        raise ConfigError(
            f"no such instrument{needs}",
            got=name,
            wanted="ops:OP, offsets, segments, audit:NAME, time:LOAD or environment",
        )

    def refine(self, failure: Finding) -> Sequence[Instrument]:
        """Sharpen a failure of an op's contract: which input was read in fewer bits, if any."""
        op = failure.locus.op
        if failure.probe != "ops" or op not in CONTRACTS:
            return []
        return [_instrument(f"inputs:{op}", 0.5, {f"ops/{op}": 0.5}, lambda: self._inputs(op))]

    def acquits(self, failure: Finding) -> Finding | None:
        """Try to clear the suspect: the reference under the same judge, or other random inputs."""
        kind, _, part = failure.probe.partition(":")
        if kind in ("ops", "inputs"):
            return self._reference_passes(failure)
        if kind == "audit":
            other = Workbench(directory=self.bench.directory, seed=self.bench.seed + _OTHER_SEED)
            return _cleared(failure, audit(part, other, failure.repro))
        if kind == "time":
            return _cleared(failure, self._time(part)[0])
        if kind == "segments":
            return _cleared(failure, self._segments(self.bench.seed + _OTHER_SEED))
        return None

    # Instruments.

    def _op(self, op: str) -> list[Finding]:
        contract, bench = CONTRACTS[op], self.bench
        kernel, device = bench.table.kernels[op], bench.table.facts.device
        work = OpWork(contract, kernel, contract.cases, device=device, seed=bench.seed)
        return [check_op(work, "ops", self._repro(f"ops:{op}"))]

    def _offsets(self) -> list[Finding]:
        repro = self._repro("offsets")
        return [
            check_offsets(contract, self._run(op), seed=self.bench.seed, repro=repro)
            for op, contract in CONTRACTS.items()
            if has_pools(contract)
        ]

    def _segments(self, seed: int | None = None) -> Finding:
        """Judge the chain that this device's states would go through."""
        device = self.bench.table.facts.device
        product, reason = affine.choose_product(device)
        sweep = SegmentSweep(segments=(1, 8, 32), seed=self.bench.seed if seed is None else seed)
        chain = affine.Chain.of(product)
        repro = self._repro("segments")
        return segment_finding(chain, repro, sweep, chosen_because=reason, device=device)

    def _audit(self, name: str) -> list[Finding]:
        return [audit(name, self.bench, self._repro(f"audit:{name}"))]

    def _environment(self) -> list[Finding]:
        before = self._baseline.surroundings if self._baseline else {}
        return [environment_finding(before, capture(), repro=self._repro("environment"))]

    def _time(self, load: str) -> list[Finding]:
        """Profile a load once more, twice where it is close; all profiles of it count together."""
        if self._baseline is None:
            raise AssertionError("a load is compared without a baseline")
        found = self._timed(load, self._baseline.profiles[load])
        if found.effect is not None and _DOUBTFUL[0] < found.effect.value < _DOUBTFUL[1]:
            found = self._timed(load, self._baseline.profiles[load])
        return [found]

    def _timed(self, load: str, before: Profile) -> Finding:
        profile = profile_load(self.bench, load)
        known = self._profiles.get(load)
        self._profiles[load] = profile if known is None else best_of_both(known, profile)
        return growth_finding(
            f"time:{load}",
            before,
            self._profiles[load],
            repro=self._repro(f"time:{load}"),
            excitation={"load": load, "seed": self.bench.seed},
        )

    def _inputs(self, op: str) -> list[Finding]:
        from oxplow.feedback.narrowed import narrowed_input

        found = narrowed_input(
            CONTRACTS[op], self._run(op), seed=self.bench.seed, repro=self._repro(f"ops:{op}")
        )
        return [] if found is None else [found]

    def _reference_passes(self, failure: Finding) -> Finding:
        """The contract's reference must pass where the kernel failed, or the judge is at fault."""
        op = failure.locus.op
        kernel = reference_kernels([CONTRACTS[op]])[0]
        case = next(
            c for c in CONTRACTS[op].cases if c.name == failure.excitation.get("case", c.name)
        )
        ruling = examine(CONTRACTS[op], kernel.name, kernel.run, case, seed=self.bench.seed)
        verdict = Verdict.PASS if ruling.ok else Verdict.FAIL
        told = "passes" if ruling.ok else "fails too"
        return Finding(
            probe=f"toggle:{op}",
            verdict=verdict,
            summary=f"with the reference in its place the case {case.name} {told}",
            locus=failure.locus,
            repro=failure.repro,
            excitation=failure.excitation,
        )

    def _run(self, op: str) -> Callable[..., object]:
        return self.bench.table.kernels[op].run

    def _repro(self, name: str) -> str:
        words = ["oxplow", "diagnose", "--only", name, "--seed", str(self.bench.seed)]
        words += ["--model", str(self.bench.directory)]
        if self._path is not None and name.split(":")[0] in ("time", "environment"):
            words += ["--baseline", str(self._path)]
        return shlex.join(words)


class MetricsToolbox(BenchToolbox):
    """End-to-end figures alone: answers and whole times against the baseline, no parts."""

    @property
    def instruments(self) -> Sequence[Instrument]:
        """Return two comparisons of whole runs."""
        reach = dict.fromkeys(self.odds, 0.5)
        if self.symptom in LOADS:
            return [_instrument("whole-time", _LOAD_COST_S, reach, self._whole_time)]
        return [_instrument("answers", _LOAD_COST_S, reach, self._answers)]

    def refine(self, failure: Finding) -> Sequence[Instrument]:
        """Return nothing: whole figures have no parts."""
        return []

    def acquits(self, failure: Finding) -> Finding | None:
        """Return nothing: there is no part to exchange."""
        return None

    def _likely(self) -> Locus:
        name = max(self.odds.items(), key=lambda pair: pair[1])[0]
        return Locus(component=name.split("/")[0])

    def _answers(self) -> list[Finding]:
        wanted = self._baseline.answers if self._baseline else {}
        got = answers_of(self.bench)
        other = [name for name, ids in wanted.items() if got.get(name) != ids]
        return [self._told("answers", bool(other), f"{len(other)} of {len(wanted)} answers differ")]

    def _whole_time(self) -> list[Finding]:
        load = LOADS[self.symptom]
        before = self._baseline.profiles[load] if self._baseline else None
        if before is None:
            return []
        now = profile_load(self.bench, load, repeats=2)  # under the same profiler as the baseline
        ratio = _whole(now) / _whole(before)
        return [self._told("whole-time", ratio > _SLOWER, f"{ratio - 1:+.0%} time")]

    def _told(self, probe: str, is_bad: bool, summary: str) -> Finding:
        return Finding(
            probe=probe,
            verdict=Verdict.FAIL if is_bad else Verdict.PASS,
            summary=summary,
            locus=self._likely() if is_bad else Locus(),
            repro="oxplow diagnose --arm metrics-only",
        )


def _whole(profile: Profile) -> float:
    return min(profile.totals) + min(profile.waits)


def _cleared(failure: Finding, again: Finding) -> Finding:
    """Read a repetition as an experiment: a suspect that fails again was not cleared."""
    verdict = Verdict.PASS if again.verdict is Verdict.FAIL else Verdict.FAIL
    told = "fails again" if verdict is Verdict.PASS else "does not fail again"
    return replace(
        again,
        probe=f"repeat:{failure.probe}",
        verdict=verdict,
        summary=f"{failure.probe} {told} on other inputs: {again.summary}",
        locus=failure.locus,
        repro=failure.repro,
    )


PREFILLS = {
    "intra": Prefill(),
    "inter": Prefill(intra_node=False),
    "released": Prefill(released=("dispatch_intra_node", "combine_intra_node")),
}
"""Case 2's stand-ins, until the transfer engine is there: as published, its sibling, mended."""


def _starvation(name: str, repro: str) -> Finding:
    return probe_transfer_starvation(PREFILLS[name], repro)


def _instrument(
    name: str, cost_s: float, reach: Mapping[str, float], run: Callable[[], Sequence[Finding]]
) -> Instrument:
    return Instrument(name=name, cost_s=cost_s, reach=reach, run=run)


def _op_shares() -> dict[str, float]:
    """Divide the odds of ops: a family's share goes to its ops in equal parts."""
    members = {family: [op for op in CONTRACTS if _family(op) == family] for family in _FAMILIES}
    shares = {
        op: share / len(members[family])
        for family, share in _FAMILIES.items()
        for op in members[family]
    }
    scale = _OP_ODDS / sum(shares.values())
    return {op: share * scale for op, share in shares.items()}


def _family(op: str) -> str:
    return next((family for family in _FAMILIES if family in op), "linear")
