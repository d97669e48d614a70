"""Deterministic router and experts: a token's bits are its own, whatever else is routed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxplow.contracts.dense import block_scales, normal_codes
from oxplow.contracts.schema import Args
from oxplow.ops.kernels.torch import moe
from oxplow.ops.table import Kernel
from tests.ops.rowwise import assert_rows_keep_bits, promised_here, torch_threads

pytestmark = promised_here

FLOAT, HALF = torch.float32, torch.bfloat16
NUM_ROWS = 19
SIZES = ((16, 4, 384, 96), (5, 2, 67, 33), (40, 8, 32, 20), (3, 3, 130, 48))  # E, k, D, I


def _rows_and_rest(
    op: str, sizes: tuple[int, int, int, int], g: torch.Generator
) -> tuple[dict[str, Tensor], Args]:
    num_experts, top_k, width, inner = sizes
    rows = {"x": torch.randn(NUM_ROWS, width, generator=g)}
    if op == "router":
        rest: Args = {
            "weight": torch.randn(num_experts, width, generator=g) * width**-0.5,
            "bias": 0.1 * torch.randn(num_experts, generator=g),
            "top_k": top_k,
            "scaling": 2.5,
            "renormalise": True,
        }
        return rows, rest
    ids = torch.rand(NUM_ROWS, num_experts, generator=g).argsort(-1)[:, :top_k]
    ids[3] = -1
    ids[5, 0] = -1
    rows |= {"expert_ids": ids, "expert_weights": torch.rand(NUM_ROWS, top_k, generator=g)}
    if op == "experts":
        return rows, {
            "gate_up": torch.randn(num_experts, 2, inner, width, generator=g) * width**-0.5,
            "down": torch.randn(num_experts, width, inner, generator=g) * inner**-0.5,
            "limit": 2.0,
        }
    across, within = -(-width // 128), -(-inner // 128)
    return rows, {
        "gate_up": normal_codes((num_experts, 2, inner, width), g),
        "gate_up_scale": block_scales((num_experts, 2, within, across), 2.0, g),
        "down": normal_codes((num_experts, width, inner), g),
        "down_scale": block_scales((num_experts, across, within), 2.0, g),
        "limit": 2.0,
        "block": 128,
    }


@pytest.mark.parametrize(
    ("dtypes", "threads"),
    (((FLOAT, FLOAT), 1), ((HALF, HALF), 1), ((FLOAT, HALF), 1), ((FLOAT, FLOAT), 2)),
    ids=str,
)
@pytest.mark.parametrize("kernel", [k for k in moe.KERNELS if k.invariant], ids=lambda k: k.op)
def test_a_deterministic_kernel_keeps_the_bits_of_each_token(
    kernel: Kernel, dtypes: tuple[torch.dtype, torch.dtype], threads: int
) -> None:
    g = torch.Generator().manual_seed(threads)
    for sizes in SIZES if threads == 1 else SIZES[:1]:
        rows, rest = _rows_and_rest(kernel.op, sizes, g)
        rows["x"] = rows["x"].to(dtypes[0])
        for name in {"weight", "gate_up", "down"} & set(rest):
            if rest[name].dtype == FLOAT:
                rest[name] = rest[name].to(dtypes[1])
        with torch_threads(threads):
            assert_rows_keep_bits(kernel.run, rows, rest)


@pytest.mark.parametrize("op", ("router", "experts", "experts_fp8"))
def test_every_op_of_the_family_has_a_deterministic_kernel(op: str) -> None:
    assert [k.name for k in moe.KERNELS if k.op == op and k.invariant] == ["torch-invariant"]
