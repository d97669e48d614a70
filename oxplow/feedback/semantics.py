"""Rung 0: what this device does with numbers, found by asking it, not by believing a data sheet.

Owns the questions and the device profile. Knows torch, no op of ours. Invariant: a question has one
answer that a float64 computation on the host decides; an answer that our kernels rely on and that
is wrong fails, one that they only must know of is written into the profile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oxplow.contracts.laws import UNIT_ROUNDOFF
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict

__all__ = ["DeviceProfile", "probe_semantics"]

_SIZE = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The answers of one device, by question, as plain values."""

    device: str
    torch_version: str
    answers: dict[str, object]

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {"device": self.device, "torch": self.torch_version, **self.answers}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a question found: the value for the profile, whether kernels may rely on it, words."""

    value: object
    ok: bool
    told: str
    parameter: str


def probe_semantics(device: torch.device, repro: str) -> tuple[DeviceProfile, list[Finding]]:
    """Ask every question; return the profile and one finding for each question."""
    answers: dict[str, object] = {}
    findings = []
    for name, question in _QUESTIONS.items():
        began = time.perf_counter()
        try:
            answer = question(device)
        except (RuntimeError, NotImplementedError) as error:  # a device may lack a dtype
            answer = _Answer(f"not available: {error}", True, "not available here", name)
        answers[name] = answer.value
        verdict = Verdict.PASS if answer.ok else Verdict.FAIL
        value = answer.value if isinstance(answer.value, float | int) else float(answer.ok)
        findings.append(
            Finding(
                probe=f"device:{name}",
                verdict=verdict,
                summary=answer.told,
                locus=Locus(component="device", op=name, parameter=answer.parameter),
                effect=Effect(name=name, value=float(value), unit="answer"),
                excitation={"device": str(device)},
                cost_s=time.perf_counter() - began,
                repro=repro,
            )
        )
    profile = DeviceProfile(
        device=str(device), torch_version=torch.__version__, answers=dict(answers)
    )
    return profile, findings


def _normal(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _dot_precision(device: torch.device) -> _Answer:
    """Name the precision of float32 products by their error: TF32 and bf16 keep fewer bits."""
    a, b = _normal(device, _SIZE, _SIZE), _normal(device, _SIZE, _SIZE, seed=1)
    truth = a.double().cpu() @ b.double().cpu()
    scale = a.double().cpu().abs() @ b.double().cpu().abs()
    error = float((((a @ b).double().cpu() - truth).abs() / scale).max())
    bits = -math.log2(max(error, 2.0**-52))
    ok = error <= 4 * UNIT_ROUNDOFF[torch.float32] * math.sqrt(_SIZE)
    kind = "float32" if ok else "TF32 or float16" if error < 2.0**-9 else "bfloat16"
    told = f"float32 products keep {bits:.1f} bits: {kind}"
    return _Answer(kind, ok, told, "float32 matmul precision")


def _rounding(device: torch.device) -> _Answer:
    """Casts to bf16 must round to nearest, ties to even."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], device=device)
    got = ties.to(torch.bfloat16).double().cpu().tolist()
    ok = got == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]
    told = "casts round to nearest even" if ok else f"casts of ties gave {got}"
    return _Answer("nearest even" if ok else "other", ok, told, "cast to bfloat16")


def _denormals(device: torch.device) -> _Answer:
    """Tell whether small numbers survive a product; the decay of a state may reach them."""
    tiny = torch.tensor([2.0**-140], device=device)
    kept = float((tiny * 2).cpu()) == 2.0**-139
    told = "denormals are kept" if kept else "denormals are flushed to zero: decays end earlier"
    return _Answer("kept" if kept else "flushed", True, told, "denormals")


def _nan_in_max(device: torch.device) -> _Answer:
    """A NaN must reach max, min and clamp: the poison checks rely on it."""
    x = torch.tensor([1.0, float("nan"), 2.0], device=device)
    results = {
        "max": x.max(),
        "min": x.min(),
        "maximum": torch.maximum(x, torch.ones_like(x))[1],
        "clamp": x.clamp(0, 1)[1],
    }
    lost = [name for name, value in results.items() if not bool(value.isnan().cpu())]
    told = "NaN passes through max, min and clamp" if not lost else f"{', '.join(lost)} lose a NaN"
    return _Answer("passes" if not lost else "lost", not lost, told, ", ".join(lost) or "NaN")


def _int8(device: torch.device) -> _Answer:
    """Tell how a float that does not fit becomes an int8; quantisers must clamp themselves."""
    got = torch.tensor([300.0, -300.0], device=device).to(torch.int8).cpu().tolist()
    how = "saturates" if got == [127, -128] else f"wraps or is undefined: {got}"
    return _Answer(how, True, f"float to int8 {how}; our quantisers clamp first", "int8 cast")


def _fp8(device: torch.device) -> _Answer:
    """Tell what becomes of a value over the largest e4m3 number."""
    got = float(torch.tensor([1000.0], device=device).to(torch.float8_e4m3fn).float().cpu())
    how = "saturates" if got == 448.0 else "gives NaN" if math.isnan(got) else f"gives {got}"
    return _Answer(how, True, f"float to e4m3 {how}; our quantisers clamp first", "e4m3 cast")


def _repeats(device: torch.device) -> _Answer:
    """Sums, products, scatter-adds and cumulative sums must repeat bit for bit."""
    x = _normal(device, 4096)
    wide = _normal(device, 64, 512, seed=2)
    index = torch.randint(0, 16, (4096,), generator=torch.Generator().manual_seed(3)).to(device)

    works: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: x.sum(),
        "matmul": lambda: wide @ wide.T,
        "index_add": lambda: torch.zeros(16, device=device).index_add_(0, index, x),
        "cumsum": lambda: x.cumsum(0),
        "softmax": lambda: wide.softmax(-1),
    }
    other = []
    for name, work in works.items():
        first = work().cpu()
        if any(not torch.equal(first, work().cpu()) for _ in range(8)):
            other.append(name)
    relied = [n for n in other if n != "index_add"]
    told = "reductions repeat bit for bit" if not other else f"not repeatable: {', '.join(other)}"
    return _Answer(told, not relied, told, ", ".join(other) or "reductions")


def _copies(device: torch.device) -> _Answer:
    """A copy must see all work queued before it, and work after it must not reach it."""
    wrong = 0
    for round_ in range(4):
        x = torch.zeros(1 << 16, device=device)
        x.add_(round_ + 1.0)
        held = x.to("cpu", copy=True)
        x.fill_(-1.0)
        wrong += int(not bool((held == round_ + 1.0).all()))
    told = "copies are ordered with the work around them" if not wrong else f"{wrong} of 4 copies"
    return _Answer("ordered" if not wrong else "not ordered", not wrong, told, "copy to host")


def _index_width(device: torch.device) -> _Answer:
    """Sums of many int32 must not wrap: offsets of large pools exceed 2**31."""
    many = torch.full((4,), 2**30, dtype=torch.int32, device=device)
    ok = int(many.sum().cpu()) == 2**32
    told = "integer sums widen to 64 bits" if ok else "integer sums wrap at 32 bits"
    return _Answer("64 bits" if ok else "32 bits", ok, told, "int32 sum")


def _ties(device: torch.device) -> _Answer:
    """Tell whether a stable sort keeps equal values in order: picks with ties rely on it."""
    x = torch.zeros(1024, device=device)
    order = torch.sort(x, stable=True, descending=True).indices.cpu()
    ok = torch.equal(order, torch.arange(1024))
    told = "a stable sort keeps ties in order" if ok else "a stable sort reorders ties"
    return _Answer("in order" if ok else "reordered", ok, told, "stable sort")


_QUESTIONS: dict[str, Callable[[torch.device], _Answer]] = {
    "dot_precision": _dot_precision,
    "rounding": _rounding,
    "denormals": _denormals,
    "nan_in_max": _nan_in_max,
    "int8_cast": _int8,
    "fp8_cast": _fp8,
    "repeatability": _repeats,
    "copy_order": _copies,
    "index_width": _index_width,
    "sort_ties": _ties,
}
