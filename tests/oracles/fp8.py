"""Quantise weights in 128x128 blocks of e4m3, the way the released checkpoint stores them.

Owns the block arithmetic on the oracle's side. Must not know which tensors are quantised.
Invariant: scales are powers of two, so dequantise(quantise(x)) is a fixed point and the reference
model can run on the exact numbers that the files hold.
"""

import torch
from torch import Tensor

BLOCK = 128
MAX_CODE = 448.0

__all__ = ["BLOCK", "dequantise", "quantise", "round_to_fp8"]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes [rows, columns] and fp32 scales, one for each (ragged) 128x128 block."""
    rows, columns = weight.shape
    blocks_down, blocks_across = -(-rows // BLOCK), -(-columns // BLOCK)
    scales = torch.empty(blocks_down, blocks_across)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(blocks_down):
        for j in range(blocks_across):
            area = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            peak = weight[area].abs().max().clamp_min(1e-8)
            scales[i, j] = torch.exp2(torch.ceil(torch.log2(peak / MAX_CODE)))
            codes[area] = (weight[area] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Return code * scale of its block, in fp32."""
    rows, columns = codes.shape
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[:rows, :columns]


def round_to_fp8(weight: Tensor) -> Tensor:
    """Return the fp32 numbers that stay when `weight` is stored as FP8 blocks."""
    return dequantise(*quantise(weight))
