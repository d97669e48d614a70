"""Deterministic dense kernels: a row's bits are its own, whatever stands around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.contracts.dense import block_scales, normal_codes
from oxplow.contracts.schema import Args, Role
from oxplow.ops.kernels.torch import dense, invariant
from oxplow.ops.kernels.torch.invariant import matmul_rows, row_invariance
from oxplow.ops.table import Facts, Kernel
from tests.ops.rowwise import assert_rows_keep_bits, promised_here, same_bits, torch_threads

pytestmark = promised_here

CPU = torch.device("cpu")
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 67, 96, 127, 128, 129, 300, 384, 511, 1024, 1536)
OUTPUTS = (1, 2, 3, 5, 8, 9, 11, 12, 16, 17, 31, 64, 67, 96, 129, 384, 512, 513, 1100)
FLOAT, HALF = torch.float32, torch.bfloat16
NUM_ROWS = 19


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


@pytest.mark.parametrize("threads", (1, 2))
def test_a_product_keeps_its_bits_at_any_place_beside_anything(threads: int) -> None:
    g = torch.Generator().manual_seed(threads)
    sizes = [(k, n) for k in WIDTHS for n in OUTPUTS if k * n <= 2**18]
    if threads > 1:
        sizes = sizes[::4]  # two busy cores make two-thread barriers dear
    with torch_threads(threads):
        for width, num_out in sizes:
            x = torch.randn(NUM_ROWS, width, generator=g)
            strange = torch.cat((torch.full((2, width), torch.nan), x[4:9], x[:1] * 1e30))
            for layout, weight in _layouts(torch.randn(num_out, width, generator=g)):
                want = matmul_rows(x, weight)
                what = f"{layout} [{num_out}, {width}]"
                assert same_bits(matmul_rows(x.flip(0), weight).flip(0), want), what
                assert same_bits(matmul_rows(x[7:8], weight), want[7:8]), what
                assert same_bits(matmul_rows(x[3:], weight), want[3:]), what
                assert same_bits(matmul_rows(strange, weight)[2:7], want[4:9]), what


def test_a_row_invariant_product_is_the_product() -> None:
    g = torch.Generator().manual_seed(0)
    for rows, width, num_out in ((0, 5, 3), (1, 67, 1), (9, 96, 1030), (33, 130, 7)):
        x, weight = torch.randn(rows, width, generator=g), torch.randn(num_out, width, generator=g)
        got = matmul_rows(x.bfloat16(), weight.bfloat16())
        want = x.bfloat16().double() @ weight.bfloat16().double().t()
        bound = 4 * 2.0**-24 * width**0.5 * (x.double().abs() @ weight.double().abs().t())
        assert got.dtype == torch.float32
        assert ((got - want).abs() <= bound).all()


def _product_by_row_count(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t() + (0.0 if len(x) > 1 else 1e-3)  # as a matrix-vector path would


def _sigmoid_with_another_tail(x: Tensor) -> Tensor:
    y = x.sigmoid()
    y[-1] *= 1 + 2**-20  # as scalar code for the last elements would
    return y


@pytest.mark.parametrize(
    ("name", "faulty"),
    (("matmul_rows", _product_by_row_count), ("sigmoid", _sigmoid_with_another_tail)),
)
def test_the_probe_accepts_this_cpu_and_refuses_a_faulty_form(
    name: str, faulty: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts(device=CPU, dtype=torch.float32, invariant=True)
    assert row_invariance(facts).ok
    invariant._probe.cache_clear()
    monkeypatch.setattr(invariant, name, faulty)
    refused = row_invariance(facts)
    invariant._probe.cache_clear()
    assert not refused.ok
    assert "bits change with" in refused.reason


def _rows_and_rest(op: str, width: int, g: torch.Generator) -> tuple[dict[str, Tensor], Args]:
    def draw(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=g)

    match op:
        case "rms_norm":
            return {"x": draw(NUM_ROWS, width)}, {"weight": draw(width), "eps": 1e-5}
        case "layer_norm":
            rest: Args = {"weight": draw(width), "bias": draw(width), "eps": 1e-6}
            return {"x": draw(NUM_ROWS, width)}, rest
        case "gated_rms_norm":
            rows = {"x": draw(NUM_ROWS, 3, width), "gate": draw(NUM_ROWS, 3, width)}
            return rows, {"weight": draw(width), "eps": 1e-5}
        case "linear":
            return {"x": draw(NUM_ROWS, width)}, {"weight": draw(70, width), "bias": draw(70)}
        case "linear_fp8":
            scale = block_scales((5, -(-width // 128)), 3.0, g)
            codes = normal_codes((600, width), g)
            return {"x": draw(NUM_ROWS, width)}, {"weight": codes, "scale": scale, "block": 128}
        case "swiglu":
            rows = {"gate": draw(NUM_ROWS, width), "up": draw(NUM_ROWS, width)}
            return rows, {"limit": 2.0}
    raise AssertionError(f"no rows for {op}: write them here")


@pytest.mark.parametrize(
    ("dtypes", "threads"),
    (((FLOAT, FLOAT), 1), ((HALF, HALF), 1), ((FLOAT, HALF), 1), ((FLOAT, FLOAT), 2)),
    ids=str,
)
@pytest.mark.parametrize(
    "kernel", [k for k in dense.KERNELS if k.invariant], ids=lambda k: f"{k.op}-{k.name}"
)
def test_a_deterministic_kernel_keeps_the_bits_of_each_row(
    kernel: Kernel, dtypes: tuple[torch.dtype, torch.dtype], threads: int
) -> None:
    inputs = CONTRACTS[kernel.op].inputs
    g = torch.Generator().manual_seed(threads)
    for width in (1, 20, 48, 67, 96, 128, 384, 1000) if threads == 1 else (67, 384):
        rows, rest = _rows_and_rest(kernel.op, width, g)
        rest = {
            name: value.to(dtypes[1])
            if name in inputs and inputs[name].role is Role.WEIGHT and isinstance(value, Tensor)
            else value
            for name, value in rest.items()
        }
        with torch_threads(threads):
            assert_rows_keep_bits(
                kernel.run, {name: value.to(dtypes[0]) for name, value in rows.items()}, rest
            )


def test_fast_kernels_are_rightly_not_called_deterministic() -> None:
    """If this fails on some machine, only the flags are too careful there; no promise is broken."""
    g = torch.Generator().manual_seed(0)
    changed = []
    for kernel in (k for k in dense.KERNELS if not k.invariant):
        for width in (20, 67, 384):
            rows, rest = _rows_and_rest(kernel.op, width, g)
            try:
                assert_rows_keep_bits(kernel.run, rows, rest)
            except AssertionError:
                changed.append(kernel.op)
    if not {"linear", "swiglu"} <= set(changed):
        pytest.skip(f"the fast kernels happen to be invariant here, except {sorted(set(changed))}")
