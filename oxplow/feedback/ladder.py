"""The bring-up ladder: rungs from device semantics to whole requests, climbed until one is red.

Owns the order of climbing and its record. Knows no rung's content: a rung is a name and a callable
that returns findings. Invariant: a rung is red when one finding fails, unsure when none fails and
one is inconclusive or invalid; above the first red rung nothing runs, because its answer would say
nothing new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oxplow.errors import OxplowError
from oxplow.feedback.finding import Finding, Locus, Verdict

__all__ = ["Rung", "RungResult", "climb"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of the ladder; `repro` repeats it alone."""

    name: str
    asks: str
    repro: str
    run: Callable[[], Sequence[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """What a rung said: its verdict, the finding that decides it, all findings and its seconds."""

    rung: Rung
    verdict: Verdict
    decisive: Finding | None
    findings: tuple[Finding, ...]
    seconds: float

    def row(self) -> dict[str, object]:
        """Return the machine-readable line."""
        named = self.decisive is not None and self.verdict is Verdict.FAIL
        return {
            "name": self.rung.name,
            "verdict": self.verdict.value,
            "locus": str(self.decisive.locus) if named and self.decisive else None,
            "summary": self.decisive.summary if self.decisive else "",
            "findings": len(self.findings),
            "seconds": round(self.seconds, 3),
            "repro": (self.decisive.repro if self.decisive else "") or self.rung.repro,
        }


def climb(
    rungs: Sequence[Rung],
    *,
    keep_on: bool = False,
    tell: Callable[[RungResult], None] = lambda result: None,
) -> list[RungResult]:
    """Climb until the first red rung (`keep_on`: all of them); `tell` hears each result.

    A rung that raises one of our errors is red: the error is its finding.
    """
    results = []
    for rung in rungs:
        result = _stand_on(rung)
        results.append(result)
        tell(result)
        if result.verdict is Verdict.FAIL and not keep_on:
            break
    return results


def _stand_on(rung: Rung) -> RungResult:
    began = time.perf_counter()
    try:
        findings = tuple(rung.run())
    except OxplowError as error:
        findings = (
            Finding(
                probe=rung.name,
                verdict=Verdict.FAIL,
                summary=f"{type(error).__name__}: {error}",
                locus=Locus(component=rung.name, op=type(error).__name__),
                repro=rung.repro,
            ),
        )
    for verdict in (Verdict.FAIL, Verdict.INVALID, Verdict.INCONCLUSIVE):
        decisive = next((f for f in findings if f.verdict is verdict), None)
        if decisive is not None:
            break
    else:
        verdict, decisive = Verdict.PASS, _closest(findings)
    return RungResult(
        rung=rung,
        verdict=verdict if findings else Verdict.INVALID,
        decisive=decisive,
        findings=findings,
        seconds=time.perf_counter() - began,
    )


def _closest(findings: Sequence[Finding]) -> Finding | None:
    """Return the passing finding that came nearest to its bound."""

    def used(finding: Finding) -> float:
        effect = finding.effect
        if effect is None or not effect.bound:
            return 0.0
        return effect.value / effect.bound

    return max(findings, key=used, default=None)
