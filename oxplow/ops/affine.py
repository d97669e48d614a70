"""KDA over a run of tokens as an affine map of the state: what context parallelism folds.

Owns the summary (M, N) of a run, its two forms, the fold over runs and the precision of their
products. Knows no rank and no transport: who exchanges summaries calls this. Invariant: products
of states never go through plain TF32, whatever the caller's global flags say; every function
works in the dtype of its inputs, so float64 in gives the truth.

S_out = M S_in + N with S [K, V] per head (linear-attention.md 6). One chunk, rows i, G the running
sum of g, D = Diag(exp G_C), Kg = K o exp(G_C - G):
    A[i,j] = beta_i sum_d k_i k_j exp(G_i - G_j) for j < i,  T = (I + A)^-1
    U = T beta V,  W = T beta (K o exp G)
    residual form:  N <- D N + Kg^T (U - W N),   M <- D M - Kg^T (W M)
    dense form:     N <- M_c N + Kg^T U,         M <- M_c M,   M_c = D - Kg^T W
A matrix unit that keeps 10 mantissa bits drops the low bits of its operands. In the dense form the
identity part of M and the whole state pass through it each chunk: a false decay of 2**-11, linear
in the number of chunks. In the residual form only corrections do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce

import torch
from torch import Tensor

from oxplow.errors import ContractError

__all__ = [
    "CHUNK",
    "IEEE",
    "PRODUCTS",
    "TF32",
    "TF32X3",
    "Chain",
    "Form",
    "Product",
    "Summary",
    "choose_product",
    "fold",
    "summarise",
]

CHUNK = 64
"""Tokens of a chunk."""

_DROPPED = 13  # mantissa bits of a float32 that a TF32 operand has not
_L2_EPS = 1e-6
_TF32_CAPABILITY = (8, 0)


class Form(StrEnum):
    """How a chunk's map is applied to what came before."""

    RESIDUAL = "residual"
    DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A way to multiply [..., m, k] by [..., k, n]. `roundoff` is the unit error that it declares
    for float32 inputs.
    """

    name: str
    roundoff: float
    run: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The products of the three places where states are multiplied."""

    chain_m: Product
    chain_n: Product
    fold: Product
    form: Form = Form.RESIDUAL

    @classmethod
    def of(cls, product: Product, form: Form = Form.RESIDUAL) -> Chain:
        """Use one product everywhere."""
        return cls(chain_m=product, chain_n=product, fold=product, form=form)


@dataclass(frozen=True, slots=True)
class Summary:
    """The map of a run: `m` [H, K, K], `n` [H, K, V], `chunks` that were chained."""

    m: Tensor
    n: Tensor
    chunks: int


def choose_product(device: torch.device) -> tuple[Product, str]:
    """Return the product that state chains use on `device`, and why.

    Three TF32 products where the matrix units have them (NVIDIA from compute capability 8.0), plain
    float32 elsewhere: other devices reject or ignore TF32.
    """
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability >= _TF32_CAPABILITY:
            return TF32X3, f"compute capability {capability[0]}.{capability[1]} has TF32 units"
        return IEEE, f"compute capability {capability[0]}.{capability[1]} has no TF32 units"
    return IEEE, f"{device.type} has no TF32 units: plain float32 products"


def summarise(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chain: Chain, *, chunk: int = CHUNK
) -> Summary:
    """Return the map of a run of tokens.

    k, g [T, H, K] (k is normalised here), v [T, H, V], beta [T, H]; T may be 0. Raises
    ContractError for shapes that do not fit.
    """
    if k.shape != g.shape or v.shape[:2] != k.shape[:2] or beta.shape != k.shape[:2]:
        raise ContractError(
            "a run's tensors do not fit",
            got=[tuple(x.shape) for x in (k, v, g, beta)],
            wanted="[T,H,K], [T,H,V], [T,H,K], [T,H]",
        )
    heads, width = k.shape[1:]
    m = torch.eye(width, dtype=k.dtype, device=k.device).expand(heads, -1, -1).clone()
    n = k.new_zeros(heads, width, v.shape[-1])
    chunks = 0
    for start in range(0, k.shape[0], chunk):
        rows = slice(start, start + chunk)
        parts = (x[rows].transpose(0, 1) for x in (k, v, g, beta))
        m, n = _after_chunk(m, n, _Chunk.of(*parts), chain)
        chunks += 1
    return Summary(m, n, chunks)


def fold(summaries: Sequence[Summary], state: Tensor, chain: Chain) -> Tensor:
    """Return the state [H, K, V] after all runs in order, from `state` before the first."""
    run = chain.fold.run
    return reduce(lambda held, s: run(s.m, held) + s.n, summaries, state)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a chunk does to the state: `decay` [H, K], `w` [H, C, K], `u` [H, C, V], `kg` [H, C, K]
    transposed to [H, K, C].
    """

    decay: Tensor
    w: Tensor
    u: Tensor
    kg: Tensor

    @classmethod
    def of(cls, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Chunk:
        """Solve one chunk's triangle; all of it stays in the dtype of the inputs."""
        k = k / torch.sqrt((k * k).sum(-1, keepdim=True) + _L2_EPS)
        total = g.cumsum(1)  # [H, C, K], falling
        rows = k.shape[1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=k.device).tril(-1)
        spans = (total[:, :, None] - total[:, None]).masked_fill(
            ~later[None, :, :, None], -math.inf
        )
        pairs = (k[:, :, None] * k[:, None] * spans.exp()).sum(-1) * beta[..., None]
        eye = torch.eye(rows, dtype=k.dtype, device=k.device)
        right = torch.cat([v, k * total.exp()], -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(eye + pairs, right, upper=False, unitriangular=True)
        last = total[:, -1]
        kg = (k * (last[:, None] - total).exp()).transpose(1, 2)
        return cls(last.exp(), solved[..., v.shape[-1] :], solved[..., : v.shape[-1]], kg)


def _after_chunk(m: Tensor, n: Tensor, c: _Chunk, chain: Chain) -> tuple[Tensor, Tensor]:
    mul_m, mul_n = chain.chain_m.run, chain.chain_n.run
    if chain.form is Form.DENSE:
        dense = torch.diag_embed(c.decay) - IEEE.run(c.kg, c.w)
        return mul_m(dense, m), mul_n(dense, n) + IEEE.run(c.kg, c.u)
    decay = c.decay[..., None]
    return (
        decay * m - mul_m(c.kg, mul_m(c.w, m)),
        decay * n + mul_n(c.kg, c.u - mul_n(c.w, n)),
    )


# Products.


@contextmanager
def _matrix_units(tf32: bool) -> Iterator[None]:
    """Set TF32 here only: a caller's global flag must not reach a state."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _ieee(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type != "cuda":
        return a @ b
    with _matrix_units(tf32=False):
        return a @ b


def _truncated(x: Tensor) -> Tensor:
    """Drop the bits that a TF32 operand has not; other dtypes pass."""
    if x.dtype is not torch.float32:
        return x
    mask = -1 << _DROPPED
    return (x.contiguous().view(torch.int32) & mask).view(torch.float32)


def _tf32(a: Tensor, b: Tensor) -> Tensor:
    """Use the matrix unit where there is one, else cut the operands as it would."""
    if a.device.type != "cuda":
        return _ieee(_truncated(a), _truncated(b))
    with _matrix_units(tf32=True):
        return a @ b


def _tf32x3(a: Tensor, b: Tensor) -> Tensor:
    """Three products of halves: all but low times low, smallest first."""
    if a.dtype is not torch.float32:
        return _ieee(a, b)
    high_a, high_b = _truncated(a), _truncated(b)
    low_a, low_b = _truncated(a - high_a), _truncated(b - high_b)
    return _tf32(low_a, high_b) + _tf32(high_a, low_b) + _tf32(high_a, high_b)


IEEE = Product(name="ieee", roundoff=2.0**-24, run=_ieee)
"""Float32 products with float32 sums."""

TF32 = Product(name="tf32", roundoff=2.0**-11, run=_tf32)
"""Operands cut to 10 mantissa bits, float32 sums, as a matrix unit does it. Never chosen: it is
here to be found."""

TF32X3 = Product(name="tf32x3", roundoff=2.0**-21, run=_tf32x3)
"""Each operand split in two TF32 halves; what is left out is low times low and the halves' own
cut."""

PRODUCTS = (IEEE, TF32X3, TF32)
"""Every product, the ones to be used first."""
