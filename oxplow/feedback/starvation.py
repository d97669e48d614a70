"""Case 2: a transfer thread starved by a native call that keeps the interpreter lock.

Owns a stand-in for prefill with a layer-wise transfer (compute thread with expert dispatch and
combine, transfer thread in Python) and the probe that finds the holder. The real transfer engine
takes the stand-in's place when it lands. Invariant: the probe is told the calls' names, never which
one keeps the lock; its verdict needs the delay, the audit and the toggle to agree.

The two bindings of one library function differ in one thing: `ctypes.PyDLL` keeps the lock during
the call, `ctypes.CDLL` gives it up. That is the whole contrast between the intra-node call and its
inter-node sibling, so no compiler is needed.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.threads import Canary, HoldTime, Place, audit_calls

__all__ = ["Lanes", "Load", "Prefill", "probe_transfer_starvation"]

_GAP = 0.20  # of prefill: what users noticed
_CLOSED = 0.05  # wall time against prefill alone, after the toggle

_keeps_lock = ctypes.PyDLL(None)
_gives_lock_up = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A prefill of `layers`, each `layer_s` long, half in dispatch and half in combine; each of the
    `components` of a layer (state, conv window, latent, index keys) is a transfer of `transfer_s`.
    """

    layers: int = 80
    layer_s: float = 0.010
    components: int = 4
    transfer_s: float = 0.0018

    @property
    def half_us(self) -> int:
        """Microseconds of one of the two calls of a layer."""
        return int(self.layer_s / 2 * 1e6)


@dataclass(slots=True)
class Lanes:
    """Stamps of one run in monotonic seconds: (begin, end) of layers, and per layer when its
    transfer was ready, submitted and complete.
    """

    began: float = 0.0
    ended: float = 0.0
    layers: list[tuple[float, float]] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    submitted: list[float] = field(default_factory=list)
    completed: list[float] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """From the start to the last byte."""
        return self.ended - self.began

    @property
    def exposed_s(self) -> float:
        """Time from the end of the last layer to the last byte: nothing hides it."""
        return max(0.0, self.ended - self.layers[-1][1])

    @property
    def late_s(self) -> list[float]:
        """How long each transfer was ready before it was submitted."""
        return [s - r for s, r in zip(self.submitted, self.ready, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The stand-in: native calls by name; `dispatch` and `combine` run on the compute thread."""

    load: Load = field(default_factory=Load)
    intra_node: bool = True
    released: tuple[str, ...] = ()

    def calls(self) -> Mapping[str, Callable[[], object]]:
        """Return every native call once, with its usual length."""
        half, copy = self.load.half_us, int(self.load.transfer_s * 1e6)
        intra = _gives_lock_up if "dispatch_intra_node" in self.released else _keeps_lock
        combine = _gives_lock_up if "combine_intra_node" in self.released else _keeps_lock
        return {
            "dispatch_intra_node": lambda: intra.usleep(half),
            "combine_intra_node": lambda: combine.usleep(half),
            "dispatch_inter_node": lambda: _gives_lock_up.usleep(half),
            "combine_inter_node": lambda: _gives_lock_up.usleep(half),
            "transfer_component": lambda: _gives_lock_up.usleep(copy),
        }

    def run(self, *, transfer: bool) -> Lanes:
        """Run once, with or without the transfer; return the lanes."""
        calls, lanes = self.calls(), Lanes()
        where = "intra" if self.intra_node else "inter"
        dispatch, combine = calls[f"dispatch_{where}_node"], calls[f"combine_{where}_node"]
        waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def compute() -> None:
            for layer in range(self.load.layers):
                began = time.monotonic()
                dispatch()
                combine()
                lanes.layers.append((began, time.monotonic()))
                lanes.ready.append(time.monotonic())
                waiting.put(layer)
            waiting.put(None)

        def send() -> None:
            copy = calls["transfer_component"]
            while waiting.get() is not None:
                lanes.submitted.append(time.monotonic())
                for _ in range(self.load.components):
                    copy()
                lanes.completed.append(time.monotonic())

        threads = [threading.Thread(target=compute, name="compute")]
        if transfer:
            threads.append(threading.Thread(target=send, name="transfer"))
        lanes.began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lanes.ended = time.monotonic()
        return lanes


def probe_transfer_starvation(target: Prefill, repro: str) -> Finding:
    """Compare prefill with transfer with prefill alone; where a gap opens, find who makes it.

    1. Both arms under the same load. 2. A canary beside the slow arm names the line that stood
    there while the lock was kept. 3. Every native call is measured alone, siblings side by side.
    4. The holder is exchanged for one that gives the lock up: the gap must close, or nobody is
    convicted.
    """
    began = time.monotonic()
    alone = target.run(transfer=False)
    with Canary(watches=("compute", "transfer")) as canary:
        both = target.run(transfer=True)
    gap = both.wall_s / alone.wall_s - 1
    base = Finding(
        probe="transfer-starvation",
        verdict=Verdict.PASS,
        summary=f"prefill with transfer takes {1 + gap:.3f} of prefill alone",
        effect=Effect(name="gap", value=gap, unit="of prefill", bound=_GAP, n=target.load.layers),
        excitation={
            "layers": target.load.layers,
            "layer_s": target.load.layer_s,
            "components": target.load.components,
            "transfer_s": target.load.transfer_s,
        },
        evidence=_evidence(alone, both, canary),
        curves=(_lanes("transfer beside prefill", both),),
        repro=repro,
    )
    if gap <= _GAP:
        return replace(base, cost_s=time.monotonic() - began)
    found = _convict(target, base, canary, alone)
    return replace(found, cost_s=time.monotonic() - began)


def _convict(target: Prefill, base: Finding, canary: Canary, alone: Lanes) -> Finding:
    audit = audit_calls(target.calls())
    holders = [h for h in audit if h.holds and _is_used(target, h.name)]
    blamed = canary.blame()
    evidence = {
        **base.evidence,
        "holds": {h.name: {"took_s": h.took_s, "held_s": h.held_s} for h in audit},
        "stood_there": [(str(place), round(s, 4)) for place, s in blamed[:4]],
    }
    seen = _at_work(target, holders, blamed)
    if seen is None:
        told = f"{base.summary}: no native call that keeps the lock was seen at work"
        return replace(base, verdict=Verdict.INCONCLUSIVE, summary=told, evidence=evidence)
    first, place = seen
    mended = replace(target, released=tuple(h.name for h in holders))
    after = mended.run(transfer=True)
    wall, exposed = after.wall_s / alone.wall_s - 1, after.exposed_s / alone.wall_s
    evidence["toggle"] = {"released": list(mended.released), "gap": wall, "exposed": exposed}
    base = replace(base, evidence=evidence, curves=(*base.curves, _lanes("lock given up", after)))
    if wall > _CLOSED:
        told = f"{base.summary}: giving the lock up leaves a gap of {wall:.1%}, so it is not that"
        return replace(base, verdict=Verdict.INCONCLUSIVE, summary=told)
    others = [h for h in holders if h is not first]
    return replace(
        base,
        verdict=Verdict.FAIL,
        summary=_told(base, place, first, audit, wall),
        locus=Locus(
            component="runtime",
            op=first.name,
            thread=place.thread,
            code=f"{place.file.rpartition('/')[2]}:{place.line}",
            parameter="interpreter lock",
        ),
        suspects=tuple(Locus(component="runtime", op=h.name, thread=place.thread) for h in others),
    )


def _at_work(
    target: Prefill, holders: list[HoldTime], blamed: list[tuple[Place, float]]
) -> tuple[HoldTime, Place] | None:
    """Return the holder that the canary saw longest, and where; a victim's place is no holder's."""
    seen: list[tuple[float, HoldTime, Place]] = []
    for holder in holders:
        code = target.calls()[holder.name].__code__
        lines = {line for _, _, line in code.co_lines()}
        for place, seconds in blamed:
            if place.file == code.co_filename and place.line in lines:
                seen.append((seconds, holder, place))
    return max(seen, key=lambda found: found[0])[1:] if seen else None


def _told(base: Finding, place: Place, first: HoldTime, audit: list[HoldTime], wall: float) -> str:
    sibling = first.name.replace("intra", "inter")
    other = next((h for h in audit if h.name == sibling and h.name != first.name), None)
    contrast = "" if other is None else f" (its sibling {sibling}: {other.held_s * 1e3:.1f} ms)"
    return (
        f"{base.summary}; {first.name} on thread {place.thread} keeps the interpreter lock"
        f" for {first.held_s * 1e3:.1f} of {first.took_s * 1e3:.1f} ms{contrast}, so the transfer"
        f" thread submits late; with the lock given up the gap is {wall:.1%}"
    )


def _is_used(target: Prefill, name: str) -> bool:
    return ("intra" in name) == target.intra_node


def _evidence(alone: Lanes, both: Lanes, canary: Canary) -> dict[str, object]:
    late = sorted(both.late_s)
    return {
        "alone_s": alone.wall_s,
        "with_transfer_s": both.wall_s,
        "exposed_share": both.exposed_s / alone.wall_s,
        "submit_late_ms_p50": 1e3 * late[len(late) // 2],
        "submit_late_ms_max": 1e3 * late[-1],
        "canary_worst_ms": 1e3 * canary.worst_s,
        "canary_wakings": canary.wakings,
    }


def _lanes(title: str, lanes: Lanes) -> Curve:
    def since(stamps: list[float]) -> tuple[tuple[float, float], ...]:
        return tuple((float(i), 1e3 * (s - lanes.began)) for i, s in enumerate(stamps))

    return Curve(
        title=title,
        x_label="layer",
        y_label="ms since the start",
        series={
            "computed": since([end for _, end in lanes.layers]),
            "submitted": since(lanes.submitted),
            "complete": since(lanes.completed),
        },
    )
