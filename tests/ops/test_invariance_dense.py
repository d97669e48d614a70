"""Deterministic dense kernels: a row's bits are its own, whatever stands around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from oxplow.ops.kernels.torch import invariant
from oxplow.ops.kernels.torch.invariant import matmul_rows, row_invariance
from oxplow.ops.table import Facts

CPU = torch.device("cpu")
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 67, 96, 127, 128, 129, 300, 384, 511, 1024, 1536)
OUTPUTS = (1, 2, 3, 5, 8, 9, 11, 12, 16, 17, 31, 64, 67, 96, 129, 384, 512, 513, 1100)


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test on one and on two threads; the former number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit: -0.0 differs from 0.0, NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _layouts(weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    num_out, width = weight.shape
    yield "contiguous", weight
    yield "bfloat16", weight.bfloat16()
    yield "transposed storage", weight.t().contiguous().t()
    wide = torch.full((num_out, 2 * width + 3), float("nan"))
    wide[:, 3 : 3 + width] = weight
    yield "a column slice at an odd offset", wide[:, 3 : 3 + width]
    every_second = torch.full((num_out, 2 * width), float("nan"))
    every_second[:, ::2] = weight
    yield "every second column", every_second[:, ::2]


def test_a_row_keeps_its_bits_at_any_place_beside_anything(threads: int) -> None:
    g = torch.Generator().manual_seed(threads)
    for width in WIDTHS:
        for num_out in OUTPUTS:
            if width * num_out > 2**18:
                continue
            x = torch.randn(19, width, generator=g)
            strange = torch.cat((torch.full((2, width), float("nan")), x[4:9], x[:1] * 1e30))
            for layout, weight in _layouts(torch.randn(num_out, width, generator=g)):
                want = matmul_rows(x, weight)
                what = f"{layout} [{num_out}, {width}]"
                assert same_bits(matmul_rows(x.flip(0), weight).flip(0), want), what
                assert same_bits(matmul_rows(x[7:8], weight), want[7:8]), what
                assert same_bits(matmul_rows(x[3:], weight), want[3:]), what
                assert same_bits(matmul_rows(strange, weight)[2:7], want[4:9]), what


def test_a_product_is_the_product() -> None:
    g = torch.Generator().manual_seed(0)
    for rows, width, num_out in ((0, 5, 3), (1, 67, 1), (9, 96, 1030), (33, 130, 7)):
        x, weight = torch.randn(rows, width, generator=g), torch.randn(num_out, width, generator=g)
        got = matmul_rows(x.bfloat16(), weight.bfloat16())
        want = x.bfloat16().double() @ weight.bfloat16().double().t()
        bound = 4 * 2.0**-24 * width**0.5 * (x.double().abs() @ weight.double().abs().t())
        assert got.dtype == torch.float32
        assert ((got - want).abs() <= bound).all()


def test_the_probe_accepts_this_cpu_and_refuses_a_faulty_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = Facts(device=CPU, dtype=torch.float32, invariant=True)
    assert row_invariance(facts).ok

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()  # one row goes to a matrix-vector path with other bits

    invariant._probe.cache_clear()
    monkeypatch.setattr(invariant, "matmul_rows", plain)
    refused = row_invariance(facts)
    invariant._probe.cache_clear()
    assert not refused.ok
    assert "a row's bits change with" in refused.reason
