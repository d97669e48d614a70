"""The whole gate for a candidate that nobody trusts: judged here, running elsewhere.

Owns the secret seed, the held-out shapes, the truth, the clock, the floor alarm and the verdict.
Knows no engine. Invariant: the candidate's process never holds a truth, a tolerance or the seed;
every shape beyond the contract's own is drawn after the candidate was handed in; times are the
judge's; a time under the floor is a rejection, never a success; the files of the harness are the
same before and after.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from oxplow.contracts.schema import Args, Case, CaseKind, OpContract
from oxplow.feedback.calibrate import Floor, MachineProfile
from oxplow.feedback.gate import Finding, Reason, Stop, Truth, cast_args, errors_of
from oxplow.feedback.isolate import Isolated
from oxplow.feedback.measure import Comparison, Work, compare
from oxplow.feedback.shapes import grown_case, held_out_case

__all__ = ["Judgement", "Terms", "judge"]

_FLOOR_SLACK = 0.8  # a profile made on a busy machine may lie a little high
_WORTHWHILE_FLOOR_S = 1.5e-4  # under this a clock sees nothing
_WORTHWHILE_MESSAGES = 4  # round trips under a floor: fewer hide the work, and the alarm is blind
_PINGS = 9
_TIMED = 8
_TOO_GOOD = 0.5  # of the baseline's time: a person looks at it
_HARNESS = ("calibrate", "fences", "gate", "isolate", "judge", "measure", "shapes", "watch")
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is asked of a candidate.

    `held_out` counts shapes drawn from the secret seed (`seed` None: a new one), over `dtypes` in
    turn. `profile` switches the floor alarm on. `baseline` names the candidate to race, `pairs`
    rounds long. `deadline_s` bounds every call.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    cases: tuple[str, ...] = ()
    held_out: int = 4
    seed: int | None = None
    profile: MachineProfile | None = None
    baseline: str = ""
    pairs: int = 15
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict, and what it rests on.

    `seed` is told after the fact, so that anybody can repeat the examination. `quiet_checked` is
    False where the system does not show a process's threads. `seconds` is the least timed call,
    `floor` what it was held against (None: not timed). `race` compares with the baseline:
    ratio = candidate / baseline. `needs_human` names what a person has to look at.
    """

    finding: Finding
    seed: int
    judged: tuple[str, ...]
    quiet_checked: bool
    seconds: float | None = None
    floor: Floor | None = None
    race: Comparison | None = None
    needs_human: str = ""


@dataclass(slots=True)
class _Progress:
    """How far an examination came: what a stop needs for its verdict."""

    case: str = ""
    dtype: torch.dtype = torch.float32
    worst: float = 0.0
    quiet: bool = True


def judge(contract: OpContract, spec: str, terms: Terms | None = None) -> Judgement:
    """Examine the candidate `spec` (see `isolate.load_candidate`); never raises for its faults."""
    terms = terms or Terms()
    seed = secrets.randbits(62) if terms.seed is None else terms.seed
    rng = random.Random(seed)
    before = _harness_digest()
    plan = _plan(contract, terms, rng)
    progress, judged = _Progress(dtype=terms.dtypes[0]), []
    reason, tensor, detail = Reason.PASSED, "", ""
    seconds: float | None = None
    floor: Floor | None = None
    race: Comparison | None = None
    try:
        with Isolated(contract.name, spec, deadline_s=terms.deadline_s) as child:
            for case, dtype in plan:
                progress.case, progress.dtype = case.name, dtype
                _examine(child, contract, case, dtype, rng, progress)
                judged.append(case.name)
            timed = None if terms.profile is None else _timed_case(contract, terms.profile, child)
            if terms.profile is not None and timed is not None:
                progress.case, progress.dtype = timed.name, terms.dtypes[0]
                seconds, floor = _time(child, contract, timed, terms, rng)
                judged.append(timed.name)
            if terms.baseline:
                race = _race(child, contract, timed or _largest(contract), terms, rng)
    except Stop as stop:
        reason, tensor, detail = stop.reason, stop.tensor, stop.detail
    if _harness_digest() != before:
        reason, tensor, detail = Reason.TAMPERED, "", "changed files of the harness"
    finding = Finding(
        op=contract.name, kernel=spec, case=progress.case, dtype=progress.dtype, seed=seed,
        reason=reason, tensor=tensor, detail=detail, worst=progress.worst,
    )  # fmt: skip
    result = Judgement(
        finding=finding, seed=seed, judged=tuple(judged), quiet_checked=progress.quiet,
        seconds=seconds, floor=floor, race=race,
    )  # fmt: skip
    return replace(result, needs_human=_alarm(race))


def _plan(contract: OpContract, terms: Terms, rng: random.Random) -> list[tuple[Case, torch.dtype]]:
    """Return the contract's own cases, then the held-out ones, in every dtype by turns."""
    own = [contract.case(name) for name in terms.cases] if terms.cases else list(contract.cases)
    plan = [(case, dtype) for dtype in terms.dtypes for case in own]
    sources = [c for c in contract.cases if c.kind is not CaseKind.EDGE]
    rng.shuffle(sources)
    found = 0
    for source in sources * 2:
        if found == terms.held_out:
            break
        case = held_out_case(contract, source, rng.getrandbits(62))
        if case is not None:
            plan.append((case, terms.dtypes[found % len(terms.dtypes)]))
            found += 1
    return plan


def _truth(contract: OpContract, case: Case, dtype: torch.dtype, seed: int) -> Truth:
    args = case.build(torch.Generator().manual_seed(seed))
    return Truth(contract, cast_args(contract, args, dtype))


def _examine(
    child: Isolated,
    contract: OpContract,
    case: Case,
    dtype: torch.dtype,
    rng: random.Random,
    progress: _Progress,
) -> None:
    """Run the gate's own sequence on one case; nothing may go on after the first call."""
    one, other = (_truth(contract, case, dtype, rng.getrandbits(62)) for _ in range(2))
    is_first = True

    def call(args: Args, how: str) -> dict[str, Tensor]:
        nonlocal is_first
        got = child.call(args, how)
        if is_first:
            progress.quiet = child.check_quiet() and progress.quiet
            is_first = False
        return got

    for error in errors_of(call, one, other):
        progress.worst = max(progress.worst, error)


def _timed_case(contract: OpContract, profile: MachineProfile, child: Isolated) -> Case | None:
    """Return an ordinary case grown until its floor stands out from the messages."""
    least_s = max(_WORTHWHILE_FLOOR_S, _WORTHWHILE_MESSAGES * _message_seconds(child))
    for case in contract.cases:
        if case.kind is CaseKind.ORDINARY:
            grown = grown_case(
                contract,
                case,
                lambda a: profile.floor(contract.cost(a)).seconds >= least_s,
            )
            if grown is not None:
                return grown
    return None


def _message_seconds(child: Isolated) -> float:
    """Return the median of a message and its answer to a child that slept, as timed calls find it.

    A child that is awake answers in half the time.
    """
    taken = []
    for _ in range(_PINGS):
        child.check_quiet()
        taken.append(child.ping())
    return sorted(taken)[_PINGS // 2]


def _largest(contract: OpContract) -> Case:
    ordinary = [c for c in contract.cases if c.kind is CaseKind.ORDINARY]
    built = [(contract.cost(c.build(torch.Generator().manual_seed(0))).bytes, c) for c in ordinary]
    return max(built, key=lambda pair: pair[0])[1]


def _time(
    child: Isolated, contract: OpContract, case: Case, terms: Terms, rng: random.Random
) -> tuple[float, Floor]:
    """Time fresh inputs by the judge's clock; check a random two of the very calls that counted.

    The message's own cost is left inside: a time is then an upper bound, and the alarm never false.
    """
    if terms.profile is None:
        raise AssertionError("the floor needs a profile")
    checked = set(rng.sample(range(_TIMED), 2))
    best, floor = float("inf"), Floor(seconds=0.0, bound_by="")
    for number in range(_TIMED):
        seed = rng.getrandbits(62)
        args = cast_args(contract, case.build(torch.Generator().manual_seed(seed)), terms.dtypes[0])
        child.keep(number, args)
        child.check_quiet()  # what is computed before it is asked for shows here
        best = min(best, child.timed(number))
        left = child.fetch(number)
        floor = terms.profile.floor(contract.cost(args))
        if number in checked:
            Truth(contract, args).judge(left)
    child.check_quiet()
    if best < _FLOOR_SLACK * floor.seconds:
        detail = (
            f"{best * 1e6:.0f} us, but the {floor.bound_by} alone take"
            f" {floor.seconds * 1e6:.0f} us at the best rate measured here"
        )
        raise Stop(Reason.FLOOR, "", detail)
    return best, floor


def _race(
    child: Isolated, contract: OpContract, case: Case, terms: Terms, rng: random.Random
) -> Comparison:
    """Time candidate against baseline, each in its process, on the same fresh inputs."""
    secret = rng.getrandbits(60)

    def side(runner: Isolated) -> Work:
        def once(seed: int) -> float:
            drawn = torch.Generator().manual_seed(secret + seed)
            runner.keep(0, cast_args(contract, case.build(drawn), terms.dtypes[0]))
            return runner.timed(0)

        return once

    with Isolated(contract.name, terms.baseline, deadline_s=terms.deadline_s) as baseline:
        return compare(
            ("baseline", side(baseline)),
            ("candidate", side(child)),
            pairs=terms.pairs,
            seed=rng.getrandbits(30),
        )


def _alarm(race: Comparison | None) -> str:
    if race is None or race.ratio.high >= _TOO_GOOD:
        return ""
    return f"too good: {1 / race.ratio.ratio:.1f} times as fast as the baseline"


def _harness_digest() -> str:
    """Return one hash over the files that decide a verdict."""
    digest = hashlib.sha256()
    paths = [*sorted((_PACKAGE / "contracts").glob("*.py"))]
    paths += [_PACKAGE / "feedback" / f"{name}.py" for name in _HARNESS]
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
