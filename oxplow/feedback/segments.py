"""Partition equivalence of the KDA state over segments, and which product is to blame.

Owns the excitation (memory regimes, number of segments), the comparison with a float64 recurrence
and the toggle over products. Knows `ops.affine`, no rank and no model. Invariant: the truth walks
token by token in float64 and shares no code with the summaries; the bound follows from the
precision that the chain declares, and a regime that cannot show the fault is told as blind.

The law: n chained products of float32 class add errors of one sign at worst, so a state may differ
by 4 * u * (sqrt(K) + n) of its size; u is 2**-24 for plain products and 2**-21 for split ones.
A chain that declares less than float32 is judged as split ones are (linear-attention.md 6.1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.ops.affine import CHUNK, IEEE, TF32X3, Chain, fold, summarise

__all__ = ["REGIMES", "Run", "SegmentSweep", "segment_finding"]

_FACTOR = 4.0
_L2_EPS = 1e-6
_SITES = ("chain_m", "chain_n", "fold")


@dataclass(frozen=True, slots=True)
class Run:
    """One sequence: k, g [T, H, K], v [T, H, V], beta [T, H], and the state before it [H, K, V]."""

    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    def on(self, device: torch.device, dtype: torch.dtype) -> Run:
        """Return the run elsewhere and in another width."""
        return Run(*(x.to(device, dtype) for x in (self.k, self.v, self.g, self.beta, self.state)))


def _long(tokens: int, heads: int, width: int, g: torch.Generator) -> Run:
    """Almost nothing is forgotten and little is written: errors of the chain stay visible."""
    return _run(tokens, heads, width, g, decay=1e-5, beta=0.02, rank=width)


def _subspace(tokens: int, heads: int, width: int, g: torch.Generator) -> Run:
    """Keys leave most directions alone: what lies there passes every product unchanged."""
    return _run(tokens, heads, width, g, decay=1e-5, beta=0.5, rank=width // 4)


def _fast(tokens: int, heads: int, width: int, g: torch.Generator) -> Run:
    """Memory of a few tokens: whatever a chain does to the past is forgotten."""
    return _run(tokens, heads, width, g, decay=0.5, beta=0.5, rank=width)


def _run(
    tokens: int, heads: int, width: int, g: torch.Generator, *, decay: float, beta: float, rank: int
) -> Run:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    basis = torch.linalg.qr(normal(heads, width, rank)).Q  # [H, K, rank]
    keys = torch.einsum("thr,hkr->thk", normal(tokens, heads, rank), basis)
    return Run(
        k=keys,
        v=normal(tokens, heads, width),
        g=-decay * (0.5 + torch.rand(tokens, heads, width, generator=g, dtype=torch.float64)),
        beta=torch.full((tokens, heads), beta, dtype=torch.float64),
        state=normal(heads, width, width),
    )


REGIMES: Mapping[str, Callable[[int, int, int, torch.Generator], Run]] = {
    "long memory": _long,
    "subspace": _subspace,
    "fast decay": _fast,
}
"""Excitations by name; only the first two can show an inexact product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSweep:
    """What to try: segment counts, tokens of one segment, heads, head width, seed."""

    segments: Sequence[int] = (1, 2, 4, 8, 16, 32)
    tokens: int = CHUNK
    heads: int = 2
    width: int = 32
    seed: int = 0


def segment_finding(
    chain: Chain,
    repro: str,
    sweep: SegmentSweep | None = None,
    *,
    chosen_because: str = "",
    device: torch.device | None = None,
) -> Finding:
    """Cut sequences into segments, fold their summaries, compare with the recurrence.

    A failing chain is taken apart: each place of a product alone gets the suspect product, the
    others plain ones; those that fail alone are named.
    """
    sweep, began = sweep or SegmentSweep(), time.perf_counter()
    place = device or torch.device("cpu")
    errors = {name: _errors(name, chain, sweep, place) for name in REGIMES}
    curves = _curves(errors, chain, sweep)
    worst = max(
        ((e / _bound(chain, n, sweep), name, n)
         for name, row in errors.items() for n, e in zip(sweep.segments, row, strict=True)),
    )  # fmt: skip
    base = Finding(
        probe="segments",
        verdict=Verdict.PASS,
        summary=f"{_names(chain)}: at most {worst[0]:.3g} of the bound, in {worst[1]},"
        f" {worst[2]} segments{'; ' + chosen_because if chosen_because else ''}",
        effect=Effect(name="error of the state", value=worst[0], unit="bounds", bound=1.0),
        excitation={
            "segments": list(sweep.segments),
            "tokens_each": sweep.tokens,
            "regimes": list(REGIMES),
            "blind": "fast decay: the past is forgotten before its error shows",
            "seed": sweep.seed,
        },
        evidence={"errors": {name: list(row) for name, row in errors.items()}},
        curves=curves,
        repro=repro,
        cost_s=time.perf_counter() - began,
    )
    if worst[0] <= 1.0:
        return base
    guilty = _guilty(chain, sweep, worst[1], worst[2], place)
    row = errors[worst[1]]
    told = (
        f"{', '.join(guilty)} in {_names(chain)}: the state is off by {max(row):.3g}, growing from"
        f" {row[0]:.2g} at {sweep.segments[0]} to {row[-1]:.2g} at {sweep.segments[-1]} segments"
        f" under {worst[1]}; fast decay shows {max(errors['fast decay']):.2g}"
    )
    return replace(
        base,
        verdict=Verdict.FAIL,
        summary=told,
        locus=Locus(component="parallel", op="kda_affine", parameter=", ".join(guilty)),
        evidence={**base.evidence, "guilty_products": guilty},
        cost_s=time.perf_counter() - began,
    )


def _errors(name: str, chain: Chain, sweep: SegmentSweep, place: torch.device) -> tuple[float, ...]:
    return tuple(_error(name, chain, sweep, n, place) for n in sweep.segments)


def _error(name: str, chain: Chain, sweep: SegmentSweep, n: int, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(sweep.seed * 1000 + n)
    made = REGIMES[name](n * sweep.tokens, sweep.heads, sweep.width, generator)
    run = made.on(device, torch.float32)
    truth = _walk(run.on(torch.device("cpu"), torch.float64))
    summaries = []
    for i in range(n):
        rows = slice(i * sweep.tokens, (i + 1) * sweep.tokens)
        summaries.append(summarise(run.k[rows], run.v[rows], run.g[rows], run.beta[rows], chain))
    got = fold(summaries, run.state, chain).double().cpu()
    return float((got - truth).norm() / truth.norm())


def _walk(run: Run) -> Tensor:
    """Return the last state by the recurrence: forget, read, correct, write."""
    state = run.state.clone()
    for k, v, g, beta in zip(run.k, run.v, run.g, run.beta, strict=True):
        key = k / torch.sqrt((k * k).sum(-1, keepdim=True) + _L2_EPS)
        state = state * g.exp()[..., None]
        correction = beta[:, None] * (v - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[..., None] * correction[:, None]
    return state


def _bound(chain: Chain, segments: int, sweep: SegmentSweep) -> float:
    chunks = math.ceil(sweep.tokens / CHUNK)
    products = segments * (chunks + 1)
    worst = max(getattr(chain, site).roundoff for site in _SITES)
    unit = min(max(worst, IEEE.roundoff), TF32X3.roundoff)
    return _FACTOR * unit * (math.sqrt(sweep.width) + products)


def _guilty(
    chain: Chain, sweep: SegmentSweep, name: str, segments: int, device: torch.device
) -> list[str]:
    plain = Chain.of(IEEE, chain.form)
    guilty = []
    for site in _SITES:
        alone = replace(plain, **{site: getattr(chain, site)})
        if _error(name, alone, sweep, segments, device) > _bound(chain, segments, sweep):
            guilty.append(f"{site} ({getattr(chain, site).name})")
    return guilty or ["the chunk's own triangle"]


def _names(chain: Chain) -> str:
    used = list(dict.fromkeys(getattr(chain, site).name for site in _SITES))
    return f"{'/'.join(used)} products in {chain.form.value} form"


def _curves(
    errors: Mapping[str, tuple[float, ...]], chain: Chain, sweep: SegmentSweep
) -> tuple[Curve, ...]:
    series = {
        name: tuple((float(n), max(e, 1e-12)) for n, e in zip(sweep.segments, row, strict=True))
        for name, row in errors.items()
    }
    allowed = tuple((float(n), _bound(chain, n, sweep)) for n in sweep.segments)
    return (
        Curve(
            title=f"Error of the KDA state: {_names(chain)}",
            x_label="segments",
            y_label="relative error against float64",
            series={**series, "allowed": allowed},
            log_x=True,
            log_y=True,
        ),
    )
