"""Portable dense kernels: norms, linear layers and the clamped SwiGLU.

Owns plain torch implementations for any device. Knows the contracts' names and shapes, no model.
Invariant: statistics and accumulation in float32, one cast to the input dtype where the contract
allows. Rows over 32768 wide lose row invariance on a CPU of several threads (see `invariant`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from oxplow.ops.kernels.torch.fp8 import dequantised_panels, panel_rows
from oxplow.ops.kernels.torch.invariant import (
    PANEL_ROWS,
    aligned_rows,
    matmul_rows,
    multiply_panel,
    row_invariance,
    sigmoid,
)
from oxplow.ops.table import Facts, Kernel, Support

_FEWEST_COLUMNS = 128  # under it the order in memory made no difference


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise rows with statistics in float32 and multiply by the weight."""
    if x.dtype == weight.dtype:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """Centre and normalise rows in float32, scale and shift there, cast once."""
    wide = (x.float(), weight.float(), bias.float())
    return functional.layer_norm(wide[0], x.shape[-1:], wide[1], wide[2], eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise every head, times weight, times sigmoid(gate), in float32; cast once."""
    return _normalised_heads(x, weight, eps).mul_(gate.float().sigmoid()).to(x.dtype)


def gated_rms_norm_invariant(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Do the same with a sigmoid whose bits do not depend on the element's place."""
    return _normalised_heads(x, weight, eps).mul_(sigmoid(gate.float())).to(x.dtype)


def _normalised_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in the common dtype; widen a narrower weight to float32 in panels of 4 MiB.

    Accelerator libraries may round a half-precision product before they add the bias (seen with
    few rows on an H200, 13 times the law where the two cancel), so a bias there takes the wide way.
    """
    rounds_twice = bias is not None and x.dtype is not torch.float32 and x.device.type != "cpu"
    if x.dtype == weight.dtype and not rounds_twice:
        return functional.linear(x, weight, bias)
    return linear_wide(x, weight, bias)


def columns_where_wide(weight: Tensor) -> Tensor:
    """Lay a wide float32 weight [N, K] on a CPU column by column; leave any other as it is.

    With few rows of x, MKL reads columns 1.4 to 2.6 times as fast once N is 2 K or more (one row of
    8192 x 256: 0.41 against 1.04 ms), and with many rows no slower.
    """
    N, K = weight.shape
    is_wide = N >= 2 * K and K >= _FEWEST_COLUMNS
    if not is_wide or weight.dtype is not torch.float32 or weight.device.type != "cpu":
        return weight
    return weight.t().contiguous().t()


def linear_wide(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in float32 whatever the dtypes; one float32 panel of the weight at a time."""
    wide, rows = x.float(), panel_rows(x.shape[-1])
    if rows >= weight.shape[0]:
        product = wide @ weight.float().t()
    else:
        product = wide.new_empty(x.shape[0], weight.shape[0])
        for start in range(0, weight.shape[0], rows):
            panel = weight[start : start + rows].float()
            torch.mm(wide, panel.t(), out=product[:, start : start + rows])
    return _finish(product, bias, x.dtype)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in float32 with row tiles of a fixed shape (see `invariant`)."""
    return _finish(matmul_rows(x, weight), bias, x.dtype)


def _finish(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is not None:
        product += bias.float()
    return product.to(dtype)


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """Widen one 4 MiB panel of codes after the other and multiply in float32; keep none of them."""
    wide = x.float()
    out = wide.new_empty(x.shape[0], weight.shape[0])
    rows = panel_rows(x.shape[-1], block)
    for span, panel in dequantised_panels(weight, scale, block, rows):
        torch.mm(wide, panel.t(), out=out[:, span])
    return out.to(x.dtype)


def linear_fp8_invariant(x: Tensor, weight: Tensor, scale: Tensor, *, block: int) -> Tensor:
    """Do the same with row tiles of a fixed shape; one float32 panel of PANEL_ROWS rows."""
    rows = aligned_rows(x)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    height = max(1, PANEL_ROWS // block) * block
    for span, panel in dequantised_panels(weight, scale, block, height):
        multiply_panel(rows, panel, out[:, span])
    return out[: x.shape[0]].to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    """Clamp, apply silu to the gate and multiply, in float32; cast once."""
    wide_gate, wide_up = _clamped(gate, up, limit)
    return functional.silu(wide_gate).mul_(wide_up).to(gate.dtype)


def swiglu_invariant(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    """Do the same with a sigmoid whose bits do not depend on the element's place."""
    wide_gate, wide_up = _clamped(gate, up, limit)
    return sigmoid(wide_gate).mul_(wide_gate).mul_(wide_up).to(gate.dtype)


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate.float(), up.float()
    return gate.float().clamp(max=limit), up.float().clamp(-limit, limit)


def slow_half_cpu(facts: Facts) -> Support:
    """Accept half-precision activations on a CPU that has no matrix instructions for them."""
    if facts.device.type != "cpu" or facts.dtype not in (torch.bfloat16, torch.float16):
        return Support(ok=False, reason="only for half precision on a CPU")
    found = torch.cpu.get_capabilities()
    native = [name for name, has in found.items() if has and "bf16" in name]
    if native:
        return Support(ok=False, reason=f"this CPU multiplies bfloat16 itself: {native[0]}")
    return Support(ok=True, reason="no bfloat16 instructions: float32 is 5-7x faster")


KERNELS = (
    Kernel(op="rms_norm", name="torch", run=rms_norm, invariant=True),
    Kernel(op="layer_norm", name="torch", run=layer_norm, invariant=True),
    Kernel(op="gated_rms_norm", name="torch", run=gated_rms_norm),
    Kernel(
        op="gated_rms_norm",
        name="torch-invariant",
        run=gated_rms_norm_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="linear", name="torch", run=linear, layouts={"weight": columns_where_wide}),
    Kernel(op="linear", name="torch-wide", run=linear_wide, supports=slow_half_cpu, rank=1),
    Kernel(
        op="linear",
        name="torch-invariant",
        run=linear_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="linear_fp8", name="torch", run=linear_fp8),
    Kernel(
        op="linear_fp8",
        name="torch-invariant",
        run=linear_fp8_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
    Kernel(op="swiglu", name="torch", run=swiglu),
    Kernel(
        op="swiglu",
        name="torch-invariant",
        run=swiglu_invariant,
        supports=row_invariance,
        invariant=True,
        rank=-1,
    ),
)
