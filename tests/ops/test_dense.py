"""Dense kernels beyond the generated conformance: bounded memory, decoding, drawn shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxplow.contracts import CONTRACTS
from oxplow.contracts.dense import (
    block_scales,
    dequantise_blocks,
    finite_codes,
    normal_codes,
)
from oxplow.contracts.schema import Args, Case, CaseKind
from oxplow.feedback.gate import examine
from oxplow.ops.kernels.torch import dense, fp8
from oxplow.ops.table import Facts

FLOAT, HALF = torch.float32, torch.bfloat16


class LargestResult(TorchDispatchMode):
    """Remember the most bytes that one result of any torch call held."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; views of the stored weight do not count."""
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype.itemsize > 1 and not func.is_view:
            self.num_bytes = max(self.num_bytes, out.numel() * out.element_size())
        return out


def test_every_finite_code_decodes_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    assert len(finite) == 254
    got = fp8.dequantise(finite[None], torch.ones(1, 2), 128)[0]
    assert torch.equal(got.view(torch.int32), finite.float().view(torch.int32))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from((1, 16, 128)), st.integers(0, 99))
def test_dequantised_panels_tile_the_weight(rows: int, width: int, block: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = finite_codes((rows, width), g)
    scale = block_scales((-(-rows // block), -(-width // block)), 4.0, g)
    want = dequantise_blocks(codes.float(), scale, block)
    panels = list(fp8.dequantised_panels(codes, scale, block, 2 * block))
    assert torch.equal(torch.cat([panel for _, panel in panels]), want)
    assert [s.stop for s, _ in panels[:-1]] == [s.start for s, _ in panels[1:]]


def test_leading_axes_of_experts_dequantise_alike() -> None:
    g = torch.Generator().manual_seed(0)
    codes, scale = finite_codes((3, 2, 40, 70), g), block_scales((3, 2, 2, 3), 4.0, g)
    want = dequantise_blocks(codes.float(), scale, 32)
    assert torch.equal(fp8.dequantise(codes, scale, 32), want)


@pytest.mark.parametrize("run", (dense.linear_fp8, dense.linear_fp8_invariant))
def test_fp8_weights_are_widened_by_bounded_panels(run: Any) -> None:
    g = torch.Generator().manual_seed(0)
    width, num_out = 2048, 4096  # 32 MiB if it were widened whole
    codes, scale = normal_codes((num_out, width), g), block_scales((32, 16), 1.0, g)
    x = torch.randn(1, width, generator=g)
    with LargestResult() as seen:
        run(x, codes, scale, block=128)
    assert seen.num_bytes <= 4 * fp8.PANEL_ELEMENTS


def test_bfloat16_weights_are_widened_by_bounded_panels() -> None:
    weight, x = torch.ones(4096, 2048, dtype=HALF), torch.ones(1, 2048)
    with LargestResult() as seen:
        dense.linear(x, weight)
    assert seen.num_bytes <= 4 * fp8.PANEL_ELEMENTS


@pytest.mark.parametrize("dtypes", ((HALF, HALF), (FLOAT, FLOAT), (FLOAT, HALF)), ids=str)
def test_the_wide_linear_conforms_where_selection_does_not_offer_it(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    contract = CONTRACTS["linear"]
    for case in contract.cases:
        finding = examine(
            contract, "torch-wide", dense.linear_wide, case, dtype=dtypes[0], weight=dtypes[1]
        )
        assert finding.ok, str(finding)


def test_the_wide_linear_says_when_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    supports = next(k.supports for k in dense.KERNELS if k.name == "torch-wide")
    half = Facts(device=torch.device("cpu"), dtype=HALF)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    assert supports(half).ok
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert "avx512_bf16" in supports(half).reason and not supports(half).ok
    assert not supports(Facts(device=torch.device("cpu"), dtype=FLOAT)).ok


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 20), st.integers(1, 300), st.integers(1, 300), st.sampled_from((FLOAT, HALF)),
    st.integers(0, 99),
)  # fmt: skip
def test_fp8_linear_conforms_at_drawn_sizes(
    num_tokens: int, width: int, num_out: int, dtype: torch.dtype, seed: int
) -> None:
    def build(g: torch.Generator) -> Args:
        return {
            "x": torch.randn(num_tokens, width, generator=g),
            "weight": finite_codes((num_out, width), g),
            "scale": block_scales((-(-num_out // 128), -(-width // 128)), 6.0, g),
            "block": 128,
        }

    case = Case("drawn", CaseKind.ORDINARY, build)
    for kernel in (k for k in dense.KERNELS if k.op == "linear_fp8"):
        finding = examine(
            CONTRACTS["linear_fp8"], kernel.name, kernel.run, case, dtype=dtype, seed=seed
        )
        assert finding.ok, str(finding)
