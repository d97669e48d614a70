"""Number formats: what they cost, how far they round, what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oxplow import quant
from oxplow.errors import ConfigError, ContractError
from oxplow.quant import (
    BF16,
    E4M3_BLOCK,
    E4M3_GROUP,
    E4M3_VECTOR,
    E5M2_TOKEN,
    F32,
    FORMATS,
    INT8_CHANNEL,
    INT8_TOKEN,
    QuantFormat,
    format_named,
    pack,
    round_trip_bound,
    unpack,
)

SCALED = [fmt for fmt in FORMATS.values() if fmt.scaled]
ALL = list(FORMATS.values())


def _named(fmt: QuantFormat) -> str:
    return fmt.name


@pytest.mark.parametrize(
    ("fmt", "shape", "wanted"),
    (
        (BF16, (3, 5), 30),
        (F32, (3, 5), 60),
        (E4M3_BLOCK, (256, 384), 256 * 384 + 2 * 3 * 4),
        (E4M3_BLOCK, (130, 257), 130 * 257 + 2 * 3 * 4),
        (E4M3_GROUP, (1, 512), 528),
        (E4M3_VECTOR, (1, 128), 132),
        (INT8_CHANNEL, (96, 384), 96 * 384 + 96 * 4),
        (INT8_TOKEN, (7, 2, 512), 7 * 2 * 516),
        (INT8_TOKEN, (0, 512), 0),
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_stored_bytes_count_codes_and_scales(
    fmt: QuantFormat, shape: tuple[int, ...], wanted: int
) -> None:
    assert fmt.stored_bytes(shape) == wanted
    codes, scale = pack(torch.ones(shape), fmt)
    held = codes.numel() * codes.element_size()
    held += 0 if scale is None else scale.numel() * scale.element_size()
    assert held == wanted


def test_bytes_per_element_include_the_scales() -> None:
    assert E4M3_BLOCK.bytes_per_element((4096, 4096)) == 1 + 4 / 128**2
    assert INT8_TOKEN.bytes_per_element((1, 8)) == 1.5


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ALL), st.integers(0, 3), st.integers(0, 140), st.integers(1, 270),
    st.floats(-20, 20), st.integers(0, 99),
)  # fmt: skip
def test_a_round_trip_stays_within_its_bound(
    fmt: QuantFormat, batch: int, rows: int, columns: int, log_size: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    shape = (rows, columns) if batch == 0 else (batch, rows, columns)
    spread = torch.exp(3 * torch.randn(shape, generator=g))  # heavy tails: codes of every size
    x = torch.randn(shape, generator=g) * spread * 2.0**log_size
    codes, scale = pack(x, fmt)
    assert codes.shape == x.shape and codes.dtype == fmt.storage
    back = unpack(codes, scale, fmt)
    error = (back.double() - x.double()).abs()
    assert (error <= round_trip_bound(x, scale, fmt)).all()


@pytest.mark.parametrize("fmt", ALL, ids=_named)
def test_the_bound_is_not_slack(fmt: QuantFormat) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = pack(x, fmt)
    error = (unpack(codes, scale, fmt).double() - x.double()).abs()
    bound = round_trip_bound(x, scale, fmt)
    assert fmt is F32 or 0.8 <= float((error / bound).max()) <= 1.0


@pytest.mark.parametrize("fmt", SCALED, ids=_named)
def test_a_second_round_trip_changes_nothing(fmt: QuantFormat) -> None:
    x = torch.randn(130, 140, generator=torch.Generator().manual_seed(1))
    codes, scale = pack(x, fmt)
    values = unpack(codes, scale, fmt)
    again, second = pack(values, fmt)
    if fmt.power_of_two:  # a peak that rounded down to 224 may take the next smaller scale
        assert torch.equal(unpack(again, second, fmt), values)
    else:
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("fmt", SCALED, ids=_named)
def test_zero_tiles_give_zero_and_the_largest_value_the_largest_code(fmt: QuantFormat) -> None:
    codes, scale = pack(torch.zeros(3, 5), fmt)
    assert scale is not None
    assert torch.equal(unpack(codes, scale, fmt), torch.zeros(3, 5))
    assert (scale == 1).all()
    x = torch.tensor([[-3.0, 1.0, 0.5]])
    codes, _ = pack(x, fmt)
    largest = float(codes.float()[0, 0])
    assert -fmt.largest <= largest <= (-fmt.largest / 2 if fmt.power_of_two else -fmt.largest)


@pytest.mark.parametrize("fmt", (INT8_TOKEN, E4M3_GROUP, E5M2_TOKEN), ids=_named)
def test_an_outlier_token_leaves_its_neighbours_alone(fmt: QuantFormat) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    plain, plain_scale = pack(x, fmt)
    loud = x.clone()
    loud[2] *= 1000
    codes, scale = pack(loud, fmt)
    assert scale is not None and plain_scale is not None
    others = [0, 1, 3]
    assert torch.equal(codes.view(torch.uint8)[others], plain.view(torch.uint8)[others])
    assert torch.equal(scale[others], plain_scale[others])


def test_ragged_blocks_share_no_scale_with_their_neighbours() -> None:
    x = torch.ones(130, 200)
    x[128:, 128:] = 1000.0
    _, scale = pack(x, E4M3_BLOCK)
    assert scale is not None
    assert scale.shape == (2, 2)
    assert torch.equal(scale * 448, torch.tensor([[1.0, 1.0], [1.0, 1000.0]]))


def test_power_of_two_scales_are_powers_of_two_and_never_saturate() -> None:
    peaks = torch.cat((torch.logspace(-30, 30, 500), torch.tensor([448.0, 224.0, 449.0])))
    codes, scale = pack(peaks[:, None], E4M3_VECTOR)
    assert scale is not None
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (peaks[:, None] / scale <= 448).all()
    assert (codes.float() > 224 * (1 - 2**-4)).all()  # no scale is twice too large
    assert scale[-3].item() == 1.0


@pytest.mark.parametrize("fmt", SCALED, ids=_named)
@pytest.mark.parametrize("size", (1e-38, 1e-44, 3e38))
def test_extreme_sizes_neither_overflow_nor_divide_by_zero(fmt: QuantFormat, size: float) -> None:
    x = torch.tensor([[size, -size / 3, 0.0]])
    codes, scale = pack(x, fmt)
    back = unpack(codes, scale, fmt)
    assert torch.isfinite(back).all()
    assert ((back.double() - x.double()).abs() <= round_trip_bound(x, scale, fmt)).all()


@pytest.mark.parametrize("fmt", ALL, ids=_named)
@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_is_refused(fmt: QuantFormat, bad: float) -> None:
    with pytest.raises(ContractError, match="cannot store NaN or infinity"):
        pack(torch.tensor([[1.0, bad]]), fmt)


def test_misfits_say_what_was_wanted() -> None:
    codes, scale = pack(torch.ones(3, 4), INT8_TOKEN)
    assert scale is not None
    with pytest.raises(ContractError, match="wanted torch.int8 with scales"):
        unpack(codes, scale[:2], INT8_TOKEN)
    with pytest.raises(ContractError, match="got torch.int8"):
        unpack(codes, scale, E5M2_TOKEN)
    with pytest.raises(ContractError, match="no rows and columns"):
        pack(torch.ones(3), INT8_TOKEN)
    with pytest.raises(ContractError, match="takes no scale"):
        QuantFormat(name="odd", storage=torch.bfloat16)
    with pytest.raises(ContractError, match="a tile of 0"):
        QuantFormat(name="odd", storage=torch.int8, tile_rows=0)
    with pytest.raises(ConfigError, match="e4m3-block"):
        format_named("fp4")


def test_names_are_unique_and_find_their_format() -> None:
    assert [format_named(name).name for name in FORMATS] == list(FORMATS)
    constants = [v for v in vars(quant).values() if isinstance(v, QuantFormat)]
    assert len(constants) == len(FORMATS)
