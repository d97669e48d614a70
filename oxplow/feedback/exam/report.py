"""From items to figures, and from two runs to what changed between them.

Owns which figures there are, their names, and the pairing of two results. Prints nothing.
Invariant: every figure states how many items it rests on; two runs are compared only on items that
both were asked, and the number of the others is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oxplow.errors import ConfigError
from oxplow.feedback.exam.intervals import (
    Interval,
    mcnemar,
    paired_share,
    ratio_interval,
    wilson,
)
from oxplow.feedback.exam.outcomes import DraftRun, ExamResult, Outcome, TextWindow
from oxplow.feedback.exam.runner import PICTURE_CHANCE

__all__ = ["Change", "Flips", "changes", "figures", "flips", "share", "table", "unpaired"]

_LN2 = math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Items of one part in two runs: right in both orders, `lost` and `gained` from A to B.

    `p` is the exact McNemar probability of flips this lopsided from equal runs; `change` the
    difference of the shares.
    """

    part: str
    num_items: int
    right_a: int
    right_b: int
    lost: int
    gained: int
    p: float
    change: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure of paired windows in two runs and the difference B - A with its interval."""

    name: str
    num_windows: int
    a: float
    b: float
    difference: Interval


def share(outcomes: Sequence[Outcome], *, valid: bool = False) -> Interval:
    """Return the share of right (or of valid) answers. Raises ConfigError without any."""
    count = sum(o.is_valid if valid else o.is_right for o in outcomes)
    return wilson(count, len(outcomes))


def figures(result: ExamResult) -> dict[str, Any]:
    """Return the run's figures as plain data: the headline ones, then the parts in detail."""
    by_part = {part: [o for o in result.outcomes if o.part == part] for part in result.parts()}
    lengths = [part for part in by_part if part.startswith("needle_")]
    told: dict[str, Any] = {
        "bits_per_byte": {w: _digits(_bits(result, w).value) for w in _kinds(result)},
        "needle": {p.removeprefix("needle_"): _digits(share(by_part[p]).value) for p in lengths},
    }
    for part in ("tool_call", "json", "picture"):
        told[part] = _digits(share(by_part[part]).value) if part in by_part else None
    told["mtp_acceptance"] = _accepted(result.drafts) or _accepted(result.windows)
    told["mtp"] = _draft_figures(result)
    told["parts"] = {part: _detail(found) for part, found in by_part.items()}
    told["bits_interval"] = {w: _ends(_bits(result, w)) for w in _kinds(result)}
    if "picture_swapped" in by_part:
        swapped = share(by_part["picture_swapped"])
        told["picture_swapped"] = {
            "share": _digits(swapped.value),
            "chance": _digits(PICTURE_CHANCE),
            "at_chance": swapped.low <= PICTURE_CHANCE <= swapped.high,
        }
    told["cached_share"] = _digits(result.cached_tokens / max(1, result.prompt_tokens))
    told["failures"], told["skipped"] = result.failures, dict(result.skipped)
    told["held_out"] = dict(result.sources)
    told["part_seconds"] = dict(result.seconds)
    told["seconds"] = _digits(sum(result.seconds.values()))
    return told


def table(result: ExamResult) -> list[tuple[str, str, str, str]]:
    """Return rows for a person: figure, value, 95% interval, what it rests on."""
    rows = []
    for kind in _kinds(result):
        found, count = _bits(result, kind), len(_windows(result, kind))
        size = sum(w.num_bytes for w in _windows(result, kind))
        source = ", ".join(result.sources.get(kind, ()))
        note = f"{count} windows, {size} bytes of {source}"
        rows.append((f"bits per byte, {kind}", f"{found.value:.4f}", _span(found, 4), note))
    for part in result.parts():
        items = [o for o in result.outcomes if o.part == part]
        rows.append((part, *_percents(share(items)), f"{len(items)} items{_groups(items)}"))
        if part == "json":
            rows.append(
                ("json, valid", *_percents(share(items, valid=True)), f"{len(items)} items")
            )
    for name, counts in _draft_figures(result).items():
        note = f"{counts['drafted']} guesses"
        rows.append((f"MTP, {name}", f"{100 * counts['accepted']:.1f}%", "", note))
    rows += [(part, "skipped", "", reason) for part, reason in result.skipped.items()]
    return rows


def flips(a: ExamResult, b: ExamResult) -> list[Flips]:
    """Pair the items of two runs. Raises ConfigError where they share none."""
    left, right = ({(o.part, o.item): o for o in r.outcomes} for r in (a, b))
    common = [key for key in left if key in right]
    if not common and (left or right):
        raise ConfigError(
            "the two runs share no item",
            got=f"{len(left)} and {len(right)} items",
            wanted="runs of the same plan on models with the same tokenizer",
        )
    found = []
    for part in dict.fromkeys(part for part, _ in common):
        pairs = [(left[k].is_right, right[k].is_right) for k in common if k[0] == part]
        lost = sum(was and not now for was, now in pairs)
        gained = sum(now and not was for was, now in pairs)
        found.append(
            Flips(
                part=part,
                num_items=len(pairs),
                right_a=sum(was for was, _ in pairs),
                right_b=sum(now for _, now in pairs),
                lost=lost,
                gained=gained,
                p=mcnemar(lost, gained),
                change=paired_share(lost, gained, len(pairs)),
            )
        )
    return found


def changes(a: ExamResult, b: ExamResult) -> list[Change]:
    """Pair the text windows of two runs: bits per byte, and acceptance of the draft block."""
    found = []
    for kind in _kinds(a):
        left, right = ({w.item: w for w in _windows(r, kind)} for r in (a, b))
        pairs = [(left[i], right[i]) for i in left if i in right]
        if not pairs:
            continue
        size = [float(x.num_bytes) for x, _ in pairs]
        bits = [((x.nats / _LN2), (y.nats / _LN2)) for x, y in pairs]
        found.append(_change(f"bits per byte, {kind}", bits, size))
        drafted = [float(x.drafted) for x, _ in pairs]
        if sum(drafted):
            accepted = [(float(x.accepted), float(y.accepted)) for x, y in pairs]
            found.append(_change(f"MTP, teacher-forced {kind}", accepted, drafted))
    return found


def unpaired(a: ExamResult, b: ExamResult) -> int:
    """Return how many items and windows only one of the two runs has."""
    left, right = (
        {(o.part, o.item) for o in r.outcomes} | {(w.part, w.item) for w in r.windows}
        for r in (a, b)
    )
    return len(left ^ right)


def _change(name: str, pairs: Sequence[tuple[float, float]], bottoms: Sequence[float]) -> Change:
    total = sum(bottoms)
    return Change(
        name=name,
        num_windows=len(pairs),
        a=sum(x for x, _ in pairs) / total,
        b=sum(y for _, y in pairs) / total,
        difference=ratio_interval([y - x for x, y in pairs], bottoms),
    )


def _kinds(result: ExamResult) -> list[str]:
    return list(dict.fromkeys(w.part for w in result.windows))


def _windows(result: ExamResult, kind: str) -> list[TextWindow]:
    return [w for w in result.windows if w.part == kind]


def _bits(result: ExamResult, kind: str) -> Interval:
    windows = _windows(result, kind)
    return ratio_interval([w.nats / _LN2 for w in windows], [float(w.num_bytes) for w in windows])


def _accepted(runs: Sequence[TextWindow] | Sequence[DraftRun]) -> float | None:
    drafted = sum(r.drafted for r in runs)
    return _digits(sum(r.accepted for r in runs) / drafted) if drafted else None


def _draft_figures(result: ExamResult) -> dict[str, dict[str, Any]]:
    """Return acceptance by way and kind: on given text, and on the model's own greedy text."""
    told: dict[str, dict[str, Any]] = {}
    for kind in _kinds(result):
        windows = [w for w in result.windows if w.part == kind]
        if sum(w.drafted for w in windows):
            drafted = sum(w.drafted for w in windows)
            told[f"teacher_forced_{kind}"] = {"accepted": _accepted(windows), "drafted": drafted}
    for kind in dict.fromkeys(d.part for d in result.drafts):
        runs = [d for d in result.drafts if d.part == kind]
        told[f"self_generated_{kind}"] = {
            "accepted": _accepted(runs),
            "drafted": sum(d.drafted for d in runs),
            "distinct": _digits(sum(d.distinct for d in runs) / len(runs)),
        }
    return told


def _detail(found: Sequence[Outcome]) -> dict[str, Any]:
    whole = share(found)
    told: dict[str, Any] = {
        "items": len(found),
        "right": sum(o.is_right for o in found),
        "share": _digits(whole.value),
        "interval": _ends(whole),
    }
    valid = sum(o.is_valid for o in found)
    if valid != told["right"]:
        told["valid"] = valid
    groups = dict.fromkeys(o.group for o in found if o.group)
    if len(groups) > 1:
        told["groups"] = {
            g: _digits(share([o for o in found if o.group == g]).value) for g in groups
        }
    return told


def _groups(found: Sequence[Outcome]) -> str:
    """Say the share of each group, such as the quarters of depth."""
    groups = sorted({o.group for o in found if o.group})
    if len(groups) < 2:
        return ""
    told = (f"{g} {100 * share([o for o in found if o.group == g]).value:.0f}%" for g in groups)
    return ": " + ", ".join(told)


def _percents(found: Interval) -> tuple[str, str]:
    return f"{100 * found.value:.1f}%", f"{100 * found.low:.1f} to {100 * found.high:.1f}%"


def _span(found: Interval, digits: int) -> str:
    return "" if math.isnan(found.low) else f"{found.low:.{digits}f} to {found.high:.{digits}f}"


def _digits(value: float) -> float:
    return round(value, 4)


def _ends(found: Interval) -> list[float] | None:
    return None if math.isnan(found.low) else [_digits(found.low), _digits(found.high)]
