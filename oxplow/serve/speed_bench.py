"""Loads whose time is worth comparing, and the record of a good run to compare with.

Owns the two loads (prompts, answers), their profiles and the file of a baseline. Knows the bench
and the profiler, no policy. Invariant: a load does the same work at each call; a baseline carries
the surroundings in which it was taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oxplow.errors import ConfigError
from oxplow.feedback.environment import capture
from oxplow.feedback.hotspots import Profile, profile_of
from oxplow.serve.workbench import BLOCK, Workbench, ask, run

__all__ = ["GoodRun", "answers_of", "load_of", "profile_load", "take_baseline"]

LOADS: Mapping[str, str] = {"ttft": "prompts", "throughput": "answers", "itl": "answers"}
"""Which load shows a symptom."""

_FORMAT = "oxplow-baseline-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodRun:
    """A good run: its surroundings, a profile per load, and the answers of a fixed set of asks."""

    surroundings: Mapping[str, str | int | float | bool]
    profiles: Mapping[str, Profile]
    answers: Mapping[str, list[int]]

    def save(self, path: Path) -> None:
        """Write the baseline as JSON."""
        row = {
            "format": _FORMAT,
            "surroundings": dict(self.surroundings),
            "profiles": {name: p.row() for name, p in self.profiles.items()},
            "answers": dict(self.answers),
        }
        path.write_text(json.dumps(row), encoding="utf-8")

    @classmethod
    def open(cls, path: Path) -> GoodRun:
        """Read a baseline. Raises ConfigError for any other file."""
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if row["format"] != _FORMAT:
                raise ConfigError(
                    "this baseline has another format",
                    got=row["format"],
                    wanted=_FORMAT,
                    where=str(path),
                )
            profiles = {name: Profile.read(p) for name, p in row["profiles"].items()}
            return cls(surroundings=row["surroundings"], profiles=profiles, answers=row["answers"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"this is no baseline: {error!r}", where=str(path)) from error


def take_baseline(bench: Workbench, *, repeats: int = 4) -> GoodRun:
    """Run every load and the asks once more than enough, and keep what they said."""
    profiles = {name: profile_load(bench, name, repeats=repeats) for name in ("prompts", "answers")}
    return GoodRun(surroundings=capture(), profiles=profiles, answers=answers_of(bench))


def profile_load(bench: Workbench, name: str, *, repeats: int = 3) -> Profile:
    """Profile one load on the kernels that the bench would serve with."""
    kernels = {op: kernel.run for op, kernel in bench.table.kernels.items()}
    return profile_of(load_of(bench, name), kernels, repeats=repeats)


def load_of(bench: Workbench, name: str) -> Callable[[], object]:
    """Return the work of one load: prompts with a common start, or answers at two batch sizes."""
    if name == "prompts":
        head = bench.prompt(8 * BLOCK)
        texts = [head + bench.prompt(40, n) for n in (1, 2, 1)]

        def prompts() -> None:
            core = bench.core(slots=2)
            for n, text in enumerate(texts):
                run(core, [ask(f"r{n}", text, 1)])

        return prompts
    short = [bench.prompt(BLOCK, n) for n in range(4)]

    def answers() -> None:
        run(bench.core(), [ask(f"r{n}", text, 12) for n, text in enumerate(short)])
        run(bench.core(), [ask("alone", short[0], 16)])

    return answers


def answers_of(bench: Workbench) -> dict[str, list[int]]:
    """Return the greedy answers of a fixed set of asks: alone, together, and seen before."""
    texts = [bench.prompt(length, n) for n, length in enumerate((12, 50, 90))]
    core = bench.core()
    told = run(core, [ask(f"r{n}", text, 8) for n, text in enumerate(texts)])
    told |= run(core, [ask("again", texts[2], 8)])
    return {name: answered.token_ids for name, answered in told.items()}
