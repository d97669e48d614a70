"""Widening of e4m3 block weights, a bounded panel at a time.

Owns the decoding of stored codes for the portable kernels. Knows no op.
Invariant: the stored weight is only read; at most one float32 panel of it exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PANEL_ELEMENTS = 1 << 20
"""Weights widened at a time: 4 MiB in float32, so that a panel is multiplied while it is cached."""


def panel_rows(width: int, block: int = 1) -> int:
    """Return how many rows of `width` weights make a panel: a multiple of `block`, at least one."""
    return max(1, PANEL_ELEMENTS // max(1, width * block)) * block


def dequantise(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """Return code * scale in float32, a fresh tensor.

    codes [..., N, K] e4m3 without NaN codes, scale [..., ceil(N/block), ceil(K/block)] float32.
    """
    wide, correction = _decode(codes)
    rows, columns = codes.shape[-2:]
    spread = (scale * correction).repeat_interleave(block, -1)[..., :columns]  # [..., NB, K]
    whole = rows // block
    body = wide[..., : whole * block, :].unflatten(-2, (whole, block))
    body.mul_(spread[..., :whole, None, :])
    if whole * block < rows:
        wide[..., whole * block :, :].mul_(spread[..., whole:, :])
    return wide


def dequantised_panels(
    weight: Tensor, scale: Tensor, block: int, rows: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (row range, float32 rows) of weight [N, K]; `rows` a panel, a multiple of `block`."""
    for start in range(0, weight.shape[0], rows):
        span = slice(start, min(start + rows, weight.shape[0]))
        blocks = slice(start // block, -(-span.stop // block))
        yield span, dequantise(weight[span], scale[blocks], block)


def _decode(codes: Tensor) -> tuple[Tensor, float]:
    """Return float32 values and the power of two that is still missing in them.

    torch converts e4m3 element by element on a CPU, 16 times slower than this: a code moved up by
    seven bits is a float16 of the same value times 2**-8, subnormals included.
    """
    if codes.device.type != "cpu":
        return codes.float(), 1.0
    moved = codes.contiguous().view(torch.int8).to(torch.int16).mul_(128)  # the sign fills bit 14
    return moved.bitwise_and_(-0x4080).view(torch.float16).float(), 256.0
