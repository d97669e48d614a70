"""Which commit, and which hunk of it, changed what a probe measures: a bisection that may abstain.

Owns the search and its statistics. Knows git only through `commits`. Invariant: versions are
measured in interleaved rounds, the good one twice in each (what equal versions show); nothing is
blamed unless the effect stands outside that, at the ends of the range and at every step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oxplow.errors import ConfigError
from oxplow.feedback.commits import (
    Checkouts,
    Hunk,
    between,
    describe,
    function_at,
    hunks_of,
    run_probe,
)
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

__all__ = ["Range", "bisect"]

_BOOTSTRAPS = 1000
_MOST_HUNKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What is searched: commits of `repo` after `good` up to `bad`, by the probe `command`.

    `rounds` is how often each version is measured before a first judgement, `most_rounds` how
    often at most; `timeout_s` bounds one run of the probe.
    """

    repo: Path
    good: str
    bad: str
    command: str
    rounds: int = 4
    most_rounds: int = 16
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """How a version stands between the ends: `share` 0 is like the good one, 1 like the bad one."""

    side: str  # "good", "bad", "unclear" or "broken"
    share: float = 0.0


class _Search:
    def __init__(self, asked: Range, checkouts: Checkouts, tell: Callable[[str], None]) -> None:
        self.asked, self.checkouts, self.tell = asked, checkouts, tell
        self._rng = random.Random(asked.seed)
        self.runs = 0

    def measure(self, folders: dict[str, Path], taken: dict[str, list[float]]) -> bool:
        """Run one round of all versions in random order; False where one gave no number."""
        names = list(folders)
        self._rng.shuffle(names)
        values: dict[str, float] = {}
        for name in names:
            self.runs += 1
            value = run_probe(self.asked.command, folders[name], self.asked.timeout_s)
            if value is None:
                return False
            values[name] = value
        for name, value in values.items():
            taken[name].append(value)
        return True

    def interval(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the 99% bootstrap interval of the median."""
        draws = sorted(
            statistics.median(self._rng.choices(values, k=len(values))) for _ in range(_BOOTSTRAPS)
        )
        return draws[_BOOTSTRAPS // 200], draws[-1 - _BOOTSTRAPS // 200]

    def ends(self, good: str, bad: str) -> tuple[float, float, float, float, float]:
        """Return the effect with its interval and that of equal versions; raises for no number."""
        first, last = self._tree(good), self._tree(bad)
        folders = {"good": first, "bad": last, "again": first}
        taken: dict[str, list[float]] = {name: [] for name in folders}
        for number in range(self.asked.most_rounds):
            if not self.measure(folders, taken):
                raise ConfigError(
                    "the probe gives no number at an end of the range",
                    got=self.asked.command,
                    wanted="a last line of JSON, or an exit code",
                )
            if number + 1 < self.asked.rounds:
                continue
            effect = self.interval(_minus(taken["bad"], taken["good"]))
            equal = self.interval(_minus(taken["again"], taken["good"]))
            if effect[0] > equal[1] or effect[1] < equal[0]:
                break
        middle = statistics.median(_minus(taken["bad"], taken["good"]))
        return middle, *effect, *equal

    def judge(self, good: str, bad: str, path: Path | None) -> _Answer:
        """Say on which side a version stands, by rounds with both ends beside it."""
        if path is None:
            return _Answer(side="broken")
        folders = {"good": self._tree(good), "bad": self._tree(bad), "it": path}
        taken: dict[str, list[float]] = {name: [] for name in folders}
        share = 0.0
        for number in range(self.asked.most_rounds):
            if not self.measure(folders, taken):
                return _Answer(side="broken")
            if number + 1 < self.asked.rounds:
                continue
            to_good, to_bad = (_minus(taken["it"], taken[end]) for end in ("good", "bad"))
            whole = statistics.median(_minus(taken["bad"], taken["good"])) or 1.0
            share = statistics.median(to_good) / whole
            # twice the distance to the middle, positive on the side of the bad end
            ways = [(a + b) / whole for a, b in zip(to_good, to_bad, strict=True)]
            low, high = self.interval(ways)
            if low > 0 or high < 0:
                return _Answer(side="bad" if low > 0 else "good", share=share)
        return _Answer(side="unclear", share=share)

    def _tree(self, commit: str) -> Path:
        path = self.checkouts.at(commit)
        if path is None:
            raise AssertionError(f"{commit}: a whole commit always has a worktree")
        return path


def bisect(asked: Range, tell: Callable[[str], None] = lambda _: None) -> Finding:
    """Find the commit and the hunk that moved the probe's number; `tell` hears each step.

    Inconclusive where equal versions differ as much as the ends do, or where a step stays unclear.
    Raises ConfigError for a wrong range, or a probe that gives no number at its ends.
    """
    began = time.perf_counter()
    commits = between(asked.repo, asked.good, asked.bad)
    repro = f"oxplow diagnose --between {asked.good} {asked.bad} --probe {_quoted(asked.command)}"
    with Checkouts(asked.repo) as checkouts:
        search = _Search(asked, checkouts, tell)
        middle, low, high, equal_low, equal_high = search.ends(commits[0], commits[-1])
        effect = Effect(
            name="bad - good", value=middle, unit="of the probe", low=low, high=high,
            bound=max(abs(equal_low), abs(equal_high)), n=asked.rounds,
        )  # fmt: skip
        tell(f"{len(commits) - 1} commits; {middle:+.4g} [{low:.4g}, {high:.4g}] at the end")

        def answer(verdict: Verdict, summary: str, locus: Locus = Locus()) -> Finding:  # noqa: B008
            return Finding(
                probe="bisect", verdict=verdict, summary=summary, locus=locus, effect=effect,
                excitation={"command": asked.command, "commits": len(commits) - 1},
                evidence={"runs": search.runs, "equal": [equal_low, equal_high]},
                cost_s=time.perf_counter() - began, repro=repro,
            )  # fmt: skip

        if low <= equal_high and high >= equal_low:
            spread = f"[{equal_low:.4g}, {equal_high:.4g}]"
            return answer(
                Verdict.INCONCLUSIVE,
                f"the ends differ by {middle:+.4g}, equal versions by {spread}: no effect to trace",
            )
        last_good, first_bad = _narrow(search, commits)
        if commits.index(first_bad) - commits.index(last_good) > 1:
            told = (
                f"after {describe(asked.repo, last_good)}, up to {describe(asked.repo, first_bad)}"
            )
            return answer(Verdict.INCONCLUSIVE, f"between them no version could be judged: {told}")
        hunk, note = _hunk(search, commits[0], commits[-1], first_bad)
        told = f"{describe(asked.repo, first_bad)} moved it by {middle:+.4g}; {note}"
        return answer(Verdict.FAIL, told, _locus(checkouts, first_bad, hunk))


def _narrow(search: _Search, commits: list[str]) -> tuple[str, str]:
    """Halve the range; versions that cannot be judged are passed over, as far as others can."""
    low, high = 0, len(commits) - 1
    skipped: set[int] = set()
    while True:
        open_ = [i for i in range(low + 1, high) if i not in skipped]
        if not open_:
            return commits[low], commits[high]
        at = min(open_, key=lambda i: abs(2 * i - low - high))
        found = search.judge(commits[0], commits[-1], search.checkouts.at(commits[at]))
        search.tell(f"{describe(search.asked.repo, commits[at])}: {found.side} ({found.share:.0%})")
        if found.side == "bad":
            high = at
        elif found.side == "good":
            low = at
        else:
            skipped.add(at)


def _hunk(search: _Search, good: str, bad: str, commit: str) -> tuple[Hunk | None, str]:
    """Return the hunk without which the commit is like the good end, and a note for people."""
    hunks = hunks_of(search.asked.repo, commit)
    if len(hunks) == 1:
        return hunks[0], f"its one hunk is {hunks[0]}"
    for hunk in hunks[:_MOST_HUNKS]:
        found = search.judge(good, bad, search.checkouts.at(commit, without=hunk))
        search.tell(f"without {hunk}: {found.side}")
        if found.side == "good":
            return hunk, f"without the hunk at {hunk} it is gone"
    return None, f"no one of its {len(hunks)} hunks does it alone"


def _locus(checkouts: Checkouts, commit: str, hunk: Hunk | None) -> Locus:
    if hunk is None:
        return Locus(component="repository", parameter=commit[:12])
    folder = checkouts.at(commit)
    inside = "" if folder is None else function_at(folder / hunk.path, hunk.line)
    parts = Path(hunk.path).with_suffix("").parts
    room = ".".join(parts[1:]) if parts[0] == "oxplow" and len(parts) > 1 else hunk.path
    component = "ops" if room.startswith("ops.") else room
    return Locus(component=component, op=inside, code=str(hunk), parameter=commit[:12])


def _minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _quoted(command: str) -> str:
    return "'" + command.replace("'", "'\\''") + "'"
