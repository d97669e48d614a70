"""Number formats of stored tensors: what a code means, what it costs, how far it rounds.

Owns the `QuantFormat` record, the formats that Oxplow knows, and a reference pack and unpack with
their error law. Knows neither which tensors are stored how nor any fast kernel.
Invariant: `unpack(pack(x))` stands within `round_trip_bound` of x, element by element, and a tile's
codes depend on that tile alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from oxplow.contracts.laws import UNIT_ROUNDOFF
from oxplow.errors import ConfigError, ContractError

SCALE_BYTES = 4
"""Every scale is a float32 multiplier: value = code * scale."""

_LARGEST: Mapping[torch.dtype, float] = {
    torch.int8: 127.0,  # symmetric: -128 is never written
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """How a tensor [..., R, C] is stored.

    `tile_rows` and `tile_columns` tell how many rows and columns share one scale; None takes the
    whole axis. Tiles at the end of an axis may be ragged. A format without a scale (`scaled` False)
    is a plain cast. `power_of_two` rounds scales up to powers of two, which multiply exactly.
    """

    name: str
    storage: torch.dtype
    scaled: bool = True
    tile_rows: int | None = 1
    tile_columns: int | None = None
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if self.scaled and self.storage not in _LARGEST:
            raise ContractError(
                f"format {self.name}: {self.storage} takes no scale",
                wanted=sorted(map(str, _LARGEST)),
            )
        for size in (self.tile_rows, self.tile_columns):
            if size is not None and size < 1:
                raise ContractError(f"format {self.name}: a tile of {size}", wanted=">= 1 or None")

    @property
    def largest(self) -> float:
        """Return the largest code of a scaled format."""
        return _LARGEST[self.storage]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of `shape` [..., R, C]; () without scales."""
        if not self.scaled:
            return ()
        if len(shape) < 2:
            raise ContractError(
                f"format {self.name}: no rows and columns", got=shape, wanted="[..., R, C]"
            )
        tiles = (self.tile_rows, self.tile_columns)
        counts = (
            min(size, 1) if tile is None else -(-size // tile)
            for size, tile in zip(shape[-2:], tiles, strict=True)
        )
        return (*shape[:-2], *counts)

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of codes and scales of a tensor of `shape`."""
        codes = math.prod(shape) * self.storage.itemsize
        return codes + (math.prod(self.scale_shape(shape)) * SCALE_BYTES if self.scaled else 0)

    def bytes_per_element(self, shape: tuple[int, ...]) -> float:
        """Return `stored_bytes` over the number of elements, which must not be 0."""
        return self.stored_bytes(shape) / math.prod(shape)


F32 = QuantFormat(name="f32", storage=torch.float32, scaled=False)
BF16 = QuantFormat(name="bf16", storage=torch.bfloat16, scaled=False)
E4M3_BLOCK = QuantFormat(
    name="e4m3-block", storage=torch.float8_e4m3fn, tile_rows=128, tile_columns=128
)
"""Weights of the released checkpoint: 128 x 128 blocks (model.md 11)."""
E4M3_GROUP = QuantFormat(name="e4m3-group", storage=torch.float8_e4m3fn, tile_columns=128)
"""Activations and latent rows: 128 columns of one token share a scale (model.md 11)."""
E4M3_VECTOR = QuantFormat(name="e4m3-vector", storage=torch.float8_e4m3fn, power_of_two=True)
"""Pooled index keys: one power-of-two scale a vector, 132 bytes for 128 values (model.md 6)."""
E5M2_TOKEN = QuantFormat(name="e5m2-token", storage=torch.float8_e5m2)
"""One scale a row; two bits of mantissa, for values of very unlike size within a row."""
INT8_CHANNEL = QuantFormat(name="int8-channel", storage=torch.int8)
"""Weights [N, K]: one scale an output channel."""
INT8_TOKEN = QuantFormat(name="int8-token", storage=torch.int8)
"""Activations and cache rows [T, C]: one scale a token."""

FORMATS: Mapping[str, QuantFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            F32,
            BF16,
            E4M3_BLOCK,
            E4M3_GROUP,
            E4M3_VECTOR,
            E5M2_TOKEN,
            INT8_CHANNEL,
            INT8_TOKEN,
        )
    }
)
"""Every format by name."""


def format_named(name: str) -> QuantFormat:
    """Return the format called `name`; raises ConfigError with the known names."""
    if name not in FORMATS:
        raise ConfigError("no such number format", got=name, wanted=", ".join(sorted(FORMATS)))
    return FORMATS[name]


def pack(x: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor | None]:
    """Return codes of the shape of x [..., R, C], and scales (None without).

    Rounds to nearest, ties to even; a tile of zeros gets scale 1. Raises ContractError for values
    that are not finite.
    """
    if not bool(torch.isfinite(x).all()):
        raise ContractError(f"format {fmt.name}: cannot store NaN or infinity", got=tuple(x.shape))
    if not fmt.scaled:
        return x.to(fmt.storage), None
    scale = _scales(x.float(), fmt)
    codes = (x.float() / _spread(scale, x.shape, fmt)).clamp(-fmt.largest, fmt.largest)
    if not fmt.storage.is_floating_point:
        codes = codes.round()
    return codes.to(fmt.storage), scale


def unpack(codes: Tensor, scale: Tensor | None, fmt: QuantFormat) -> Tensor:
    """Return the float32 values of `codes`; raises ContractError when the scales do not fit."""
    got = () if scale is None else tuple(scale.shape)
    wanted = fmt.scale_shape(tuple(codes.shape))
    if got != wanted or codes.dtype != fmt.storage:
        raise ContractError(
            f"format {fmt.name}: codes and scales do not fit",
            got=f"{codes.dtype} {tuple(codes.shape)} with scales {got}",
            wanted=f"{fmt.storage} with scales {wanted}",
        )
    return codes.float() if scale is None else codes.float() * _spread(scale, codes.shape, fmt)


def round_trip_bound(x: Tensor, scale: Tensor | None, fmt: QuantFormat) -> Tensor:
    """Return how far `unpack(pack(x))` may stand from x, float64 of the shape of x.

    Floating codes: half a step of the code's size, or half a subnormal step; integers: half a
    step. Both times the scale, and two float32 roundings of the division and the product.
    """
    size = x.double().abs()
    unit = UNIT_ROUNDOFF[torch.float32]
    step = torch.zeros_like(size)
    if scale is not None:
        step = _spread(scale.double(), x.shape, fmt)
    if not fmt.storage.is_floating_point:
        return step * 0.5 + 2 * unit * size
    if fmt.storage is torch.float32:
        return torch.zeros_like(size)
    info = torch.finfo(fmt.storage)
    smallest = info.smallest_normal * info.eps  # the step between subnormals
    halves = 0.5 * smallest * (step if scale is not None else torch.ones_like(size))
    return UNIT_ROUNDOFF[fmt.storage] * size + halves + 2 * unit * size


def _scales(x: Tensor, fmt: QuantFormat) -> Tensor:
    peak = _tile_peaks(x, fmt)
    scale = peak / fmt.largest
    if fmt.power_of_two:
        mantissa, exponent = torch.frexp(scale)
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # already a power of two
        scale = torch.ldexp(torch.ones_like(scale), exponent)
    scale = scale.clamp_min(torch.finfo(torch.float32).smallest_normal)
    return torch.where(peak == 0, torch.ones_like(scale), scale)


def _tile_peaks(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Return the largest magnitude of every tile, in the shape of the scales."""
    shape = fmt.scale_shape(tuple(x.shape))
    if x.numel() == 0:
        return x.new_zeros(shape)
    rows, columns = x.shape[-2:]
    high, wide = fmt.tile_rows or rows, fmt.tile_columns or columns
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % wide, 0, -rows % high))
    tiles = padded.unflatten(-2, (-1, high)).unflatten(-1, (-1, wide))  # [..., NR, high, NC, wide]
    return tiles.amax((-3, -1))


def _spread(scale: Tensor, shape: tuple[int, ...], fmt: QuantFormat) -> Tensor:
    """Return each element's scale, in the shape of the tensor."""
    rows, columns = shape[-2:]
    high, wide = fmt.tile_rows or max(rows, 1), fmt.tile_columns or max(columns, 1)
    every = scale.repeat_interleave(high, -2).repeat_interleave(wide, -1)
    return every[..., :rows, :columns]
