"""What every probe returns: a verdict, where it points, how large the effect is, how to repeat it.

Owns the record types of evidence. Knows no probe, no model and no engine. Invariant: a Finding is
plain data that survives JSON; `inconclusive` and `invalid` are verdicts of their own and never
count as `pass`; a failing Finding names a locus and a command that shows it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum

from oxplow.errors import ContractError

__all__ = ["Curve", "Effect", "Finding", "Locus", "Verdict"]


class Verdict(StrEnum):
    """What a probe says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"  # the noise is as wide as the effect that was sought
    INVALID = "invalid"  # the probe could not judge: not engaged, under the floor, A/A failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Locus:
    """Where a finding points; an empty field is not known. Depths: component, then op or function,
    then parameter or line.

    `component` is a room of the engine ("ops", "cache.prefix", "engine.scheduler"), `op` an op
    contract or function name, `layer` and `position` count from 0, `code` is "file.py:line",
    `parameter` names the tensor, setting or constant at fault.
    """

    component: str = ""
    op: str = ""
    layer: int | None = None
    position: int | None = None
    rank: int | None = None
    thread: str = ""
    code: str = ""
    parameter: str = ""

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if self._has(f.name)]
        return ", ".join(parts) or "nowhere in particular"

    def _has(self, name: str) -> bool:
        return getattr(self, name) not in ("", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What was measured: `value` with its interval, in `unit`, against `bound` where there is one.

    `unit` is a word such as "bounds" (error over the law's bound), "ratio", "s", "tokens".
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One plot as data: named series of (x, y) points, for reports and for `docs`."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, tuple[tuple[float, float], ...]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer of one probe.

    `excitation` says under which inputs the probe looks (lengths, decay, seeds, load): outside it
    a pass says nothing. `cost_s` is wall time. `repro` is a shell command that repeats the finding.
    `artifacts` are file paths. `evidence` holds small plain values. `suspects` are further loci,
    most likely first. Raises ContractError for a failure without a locus or a command.
    """

    probe: str
    verdict: Verdict
    summary: str
    locus: Locus = Locus()
    effect: Effect | None = None
    excitation: Mapping[str, object] = field(default_factory=dict)
    cost_s: float = 0.0
    repro: str = ""
    artifacts: tuple[str, ...] = ()
    evidence: Mapping[str, object] = field(default_factory=dict)
    suspects: tuple[Locus, ...] = ()
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict is not Verdict.FAIL:
            return
        if self.locus == Locus() or not self.repro:
            raise ContractError(
                f"probe {self.probe}: a failure without locus or repro command",
                got=f"{self.locus}; {self.repro!r}",
                wanted="both",
            )

    @property
    def ok(self) -> bool:
        """True for a pass only."""
        return self.verdict is Verdict.PASS

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        where = "" if self.locus == Locus() else f" [{self.locus}]"
        return f"{self.verdict.value.upper()} {self.probe}{where}: {self.summary}"
