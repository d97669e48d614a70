"""Contracts of manifold-constrained hyper-connections: collapse the streams, expand them again.

Owns meaning only: references that follow model.md 2 line by line, cases and the law. Knows no
kernel. Invariant: the coefficient path is float32 or wider whatever the activations are; every
Sinkhorn step divides by (sum + mix_eps), and the norm alone uses norm_eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxplow.contracts.laws import Close
from oxplow.contracts.schema import Args, Case, CaseKind, Constraint, Cost, OpContract, Role, tensor

AXES = {
    "T": "tokens",
    "n": "residual streams",
    "D": "width of one stream",
    "M": "coefficients of one site: n to collapse, n to expand, n * n to mix",
}


class _Coefficients(NamedTuple):
    logits: Tensor  # [T, M], before sigmoid and softmax
    pre: Tensor  # [T, n]
    post: Tensor  # [T, n]
    mix: Tensor  # [T, n, n], first index the input stream


def _coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> _Coefficients:
    T, n, D = streams.shape
    z = streams.reshape(T, n * D)
    z = z / ((z * z).sum(-1, keepdim=True) / (n * D) + norm_eps).sqrt()
    per_coefficient = torch.cat([scale[0].repeat(n), scale[1].repeat(n), scale[2].repeat(n * n)])
    logits = z @ fn.T * per_coefficient + base
    pre = 1 / (1 + torch.exp(-logits[:, :n])) + mix_eps
    post = 2 / (1 + torch.exp(-logits[:, n : 2 * n]))
    C = torch.softmax(logits[:, 2 * n :].reshape(T, n, n), dim=2) + mix_eps
    C = C / (C.sum(1, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(2, keepdim=True) + mix_eps)
        C = C / (C.sum(1, keepdim=True) + mix_eps)
    return _Coefficients(logits, pre, post, C)


def mhc_collapse_reference(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> dict[str, Tensor]:
    """Normalise the mixing matrix step by step, then add the weighted streams one by one."""
    c = _coefficients(streams, fn, base, scale, norm_eps, mix_eps, iterations)
    x = torch.zeros_like(streams[:, 0])
    for stream in range(streams.shape[1]):
        x = x + c.pre[:, stream, None] * streams[:, stream]
    return {"x": x, "post": c.post, "mix": c.mix}


def mhc_expand_reference(
    streams: Tensor, y: Tensor, post: Tensor, mix: Tensor
) -> dict[str, Tensor]:
    """Write stream j as post[j] * y plus the sum over input streams i of mix[i, j] * X[i]."""
    out = torch.zeros_like(streams)
    for target in range(streams.shape[1]):
        out[:, target] = post[:, target, None] * y
        for origin in range(streams.shape[1]):
            out[:, target] += mix[:, origin, target, None] * streams[:, origin]
    return {"out": out}


class _Magnitudes(NamedTuple):
    x: Tensor
    post: Tensor
    mix: Tensor


def _magnitudes(args: Mapping[str, Any]) -> _Magnitudes:
    """First-order size of rounding errors: |fn||z| of the dot bound, carried through each function.

    sigmoid scales an error of its input by s(1-s); softmax and Sinkhorn never enlarge the largest
    relative error of a matrix's entries (they are non-expansive in Hilbert's metric).
    """
    streams = args["streams"].double()
    T, n, D = streams.shape
    scale, base = args["scale"].double(), args["base"].double()
    c = _coefficients(
        streams, args["fn"].double(), base, scale,
        args["norm_eps"], args["mix_eps"], args["iterations"],
    )  # fmt: skip
    z = streams.reshape(T, n * D)
    z = z / (z.square().mean(-1, keepdim=True) + args["norm_eps"]).sqrt()
    steep = torch.cat([scale[0].repeat(n), scale[1].repeat(n), scale[2].repeat(n * n)]).abs()
    size = z.abs() @ args["fn"].double().abs().T * steep + base.abs()
    slope = torch.sigmoid(c.logits) * torch.sigmoid(-c.logits)
    pre = c.pre + slope[:, :n] * size[:, :n]
    post = c.post + 2 * slope[:, n : 2 * n] * size[:, n : 2 * n]
    mix = c.mix * (1 + size[:, 2 * n :].amax(-1))[:, None, None]
    return _Magnitudes((pre[:, :, None] * streams.abs()).sum(1), post, mix)


def _width(args: Mapping[str, Any]) -> int:
    _, n, D = args["streams"].shape
    return int(n * D)


def _collapse_cost(args: Args) -> Cost:
    streams, fn = args["streams"], args["fn"]
    assert isinstance(streams, Tensor)
    assert isinstance(fn, Tensor)
    iterations = int(args["iterations"])
    T, n, D = streams.shape
    M = fn.shape[0]
    moved = (streams.numel() + T * D) * streams.element_size() + fn.numel() * fn.element_size()
    small = 4 * (M + 3 + T * n + T * n * n)
    # product, square sum, weighted sum; then 2 * iterations - 1 normalisations of n * n entries
    flops = 2 * T * n * D * (M + 2) + 2 * (2 * iterations - 1) * T * n * n
    return Cost(bytes=moved + small, flops=flops)


def _expand_cost(args: Args) -> Cost:
    streams = args["streams"]
    assert isinstance(streams, Tensor)
    T, n, D = streams.shape
    moved = (2 * T * n * D + T * D) * streams.element_size() + 4 * (T * n + T * n * n)
    return Cost(bytes=moved, flops=2 * T * n * D * (n + 1))


def _collapse_case(
    g: torch.Generator,
    num_tokens: int,
    n: int = 4,
    width: int = 32,
    size: float = 1.0,
    steep: float = 1.0,
    mix_eps: float = 1e-6,
    iterations: int = 20,
) -> Args:
    M = n * (2 + n)
    return {
        "streams": torch.randn(num_tokens, n, width, generator=g) * size,
        "fn": torch.randn(M, n * width, generator=g) / (n * width) ** 0.5,
        "base": torch.randn(M, generator=g),
        "scale": torch.tensor([1.3, 0.7, 2.1]) * steep,  # three values: a swap shows
        "norm_eps": 1e-5,
        "mix_eps": mix_eps,
        "iterations": iterations,
    }


def _with_mix_base(args: Args, base: Tensor) -> Args:
    """Replace the part of base that the mixing logits get; [n, n]."""
    old = args["base"]
    assert isinstance(old, Tensor)
    args["base"] = torch.cat([old[: 2 * base.shape[0]], base.reshape(-1)])
    return args


def _unwanted_columns_case(g: torch.Generator) -> Args:
    base = torch.full((4, 4), -40.0)
    base[:3, 1] = 40.0
    base[3, 0] = 40.0
    # few iterations: Sinkhorn's limit forgets the scale of a column, its first steps do not
    return _with_mix_base(_collapse_case(g, 5, steep=0.2, iterations=2), base)


def _triangle_case(g: torch.Generator) -> Args:
    base = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -40.0)
    return _with_mix_base(_collapse_case(g, 5, steep=0.2), base)


def _expand_case(
    g: torch.Generator, num_tokens: int, n: int = 4, width: int = 32, residual: float = 1.0
) -> Args:
    mix = torch.rand(num_tokens, n, n, generator=g)
    return {
        "streams": torch.randn(num_tokens, n, width, generator=g) * residual,
        "y": torch.randn(num_tokens, width, generator=g),
        "post": 2 * torch.rand(num_tokens, n, generator=g),
        "mix": mix / mix.sum(1, keepdim=True),
    }


def _fits_streams(args: Args) -> bool:
    streams, fn = args["streams"], args["fn"]
    assert isinstance(streams, Tensor)
    assert isinstance(fn, Tensor)
    _, n, D = streams.shape
    return fn.shape == (n * (2 + n), n * D)


def _fits_fn(args: Args) -> bool:
    fn, base, scale = args["fn"], args["base"], args["scale"]
    assert isinstance(fn, Tensor)
    assert isinstance(base, Tensor)
    assert isinstance(scale, Tensor)
    return base.shape == fn.shape[:1] and scale.shape == (3,)


MHC_COLLAPSE = OpContract(
    name="mhc_collapse",
    summary="Coefficients of one site from its streams, and the weighted sum of the streams",
    source="model.md 2",
    axes=AXES,
    inputs={
        "streams": tensor(Role.ACT, "T n D"),
        "fn": tensor(Role.WEIGHT, "M n*D"),
        "base": tensor(Role.F32, "M"),
        "scale": tensor(Role.F32, "3"),
    },
    scalars={
        "norm_eps": "added to the mean square of the flattened streams, inside the root",
        "mix_eps": "added to pre, to the softmax, and to every Sinkhorn sum (hc_eps)",
        "iterations": "column steps of Sinkhorn; one row step fewer",
    },
    outputs={
        "x": tensor(Role.ACT, "T D"),
        "post": tensor(Role.F32, "T n"),
        "mix": tensor(Role.F32, "T n n"),
    },
    reference=mhc_collapse_reference,
    constraints=(
        Constraint("fn has n * (2 + n) rows of n * D", _fits_streams),
        Constraint("base has one entry per row of fn, scale has three", _fits_fn),
        Constraint("at least one iteration", lambda a: int(a["iterations"]) >= 1),
    ),
    cases=(
        Case("decode", CaseKind.ORDINARY, lambda g: _collapse_case(g, 3)),
        Case("prefill", CaseKind.ORDINARY, lambda g: _collapse_case(g, 37, width=48)),
        Case("no_tokens", CaseKind.EDGE, lambda g: _collapse_case(g, 0)),
        Case("one_token_odd_width", CaseKind.EDGE, lambda g: _collapse_case(g, 1, width=7)),
        Case("two_streams", CaseKind.EDGE, lambda g: _collapse_case(g, 4, n=2, width=9)),
        Case("one_iteration", CaseKind.EDGE, lambda g: _collapse_case(g, 4, iterations=1)),
        Case(
            "two_iterations",
            CaseKind.EXCITATION,
            lambda g: _collapse_case(g, 6, steep=2.0, iterations=2),
            note="far from converged: a step too few, rows before columns, softmax over columns",
        ),
        Case(
            "tiny_streams",
            CaseKind.EXCITATION,
            lambda g: _collapse_case(g, 4, size=1e-3),
            note="norm_eps decides: mix_eps inside the norm, or eps outside the root",
        ),
        Case(
            "coarse_mix_eps",
            CaseKind.EXCITATION,
            lambda g: _collapse_case(g, 4, mix_eps=1e-2),
            note="mix_eps left out of pre, of the softmax or of a Sinkhorn sum",
        ),
        Case(
            "unwanted_columns",
            CaseKind.EXCITATION,
            _unwanted_columns_case,
            note="logits +-40: two columns hold mix_eps only, so the eps of their sums counts",
        ),
        Case(
            "triangle",
            CaseKind.EXCITATION,
            _triangle_case,
            note="no total support: Sinkhorn converges like 1/k, so 19 steps differ from 20",
        ),
    ),
    checks={
        "x": Close(length=_width, magnitude=lambda a: _magnitudes(a).x),
        "post": Close(length=_width, magnitude=lambda a: _magnitudes(a).post),
        "mix": Close(length=_width, magnitude=lambda a: _magnitudes(a).mix),
    },
    cost=_collapse_cost,
)


def _expand_magnitude(args: Mapping[str, Any]) -> Tensor:
    wide = {name: value.double().abs() for name, value in args.items()}
    return mhc_expand_reference(**wide)["out"]


MHC_EXPAND = OpContract(
    name="mhc_expand",
    summary="New streams: the sub-block's output spread by post, plus the mixed old streams",
    source="model.md 2",
    axes=AXES,
    inputs={
        "streams": tensor(Role.ACT, "T n D"),
        "y": tensor(Role.ACT, "T D"),
        "post": tensor(Role.F32, "T n"),
        "mix": tensor(Role.F32, "T n n"),
    },
    outputs={"out": tensor(Role.ACT, "T n D")},
    reference=mhc_expand_reference,
    cases=(
        Case("decode", CaseKind.ORDINARY, lambda g: _expand_case(g, 3)),
        Case("prefill", CaseKind.ORDINARY, lambda g: _expand_case(g, 33, width=48)),
        Case("no_tokens", CaseKind.EDGE, lambda g: _expand_case(g, 0)),
        Case("one_token_odd_width", CaseKind.EDGE, lambda g: _expand_case(g, 1, width=7)),
        Case("two_streams", CaseKind.EDGE, lambda g: _expand_case(g, 5, n=2, width=9)),
        Case(
            "large_residual",
            CaseKind.EXCITATION,
            lambda g: _expand_case(g, 4, residual=30.0),
            note="an asymmetric mix under large streams: mix not transposed, or rounded to bf16",
        ),
    ),
    checks={"out": Close(length=lambda a: a["mix"].shape[-1] + 1, magnitude=_expand_magnitude)},
    cost=_expand_cost,
)

CONTRACTS = (MHC_COLLAPSE, MHC_EXPAND)
