"""Sampling: the draws follow the softmax, the noise is white, and the cuts are the stated sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxplow.contracts.sampling import Row, gumbel, mix64, noise_bits, noise_rounding
from oxplow.ops.kernels.torch import sampling

INT64 = st.integers(-(2**63), 2**63 - 1)


def _normal_quantile_of_chi_square(statistic: float, freedom: int) -> float:
    """Return a chi-square statistic in standard deviations (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def _chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return the standard deviations of counts against expected numbers; small cells are pooled."""
    large = expected >= 5
    counts = torch.cat([counts[large], counts[~large].sum(0, keepdim=True)])
    expected = torch.cat([expected[large], expected[~large].sum(0, keepdim=True)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected).square() / expected).sum().item()
    return _normal_quantile_of_chi_square(statistic, len(counts) - 1)


def _draws(logits: Tensor, positions: Tensor, seed: int = 1, **cuts: float) -> Tensor:
    """Draw once at every position from one row of logits, at temperature 0.8 unless told."""
    rows = len(positions)

    def filled(name: str, default: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), cuts.get(name, default), dtype=dtype)

    return sampling.sample(
        logits.expand(rows, -1),
        filled("temperature", 0.8),
        filled("top_k", 0, torch.int64),
        filled("top_p", 1.0),
        filled("min_p", 0.0),
        torch.full((rows,), seed),
        positions,
    )


def _bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    return sampling.noise_bits(sampling.row_keys(seeds, positions).unsqueeze(1), tokens)


def test_the_mixer_is_splitmix64() -> None:
    """Published first outputs for state 0: mix64(n * golden)."""
    golden = 0x9E3779B97F4A7C15
    want = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(n * golden % 2**64) for n in (1, 2, 3)] == want
    states = torch.tensor([sampling._signed(n * golden % 2**64) for n in (1, 2, 3)])
    assert [x % 2**64 for x in sampling._mix(states).tolist()] == want


@given(seed=INT64, position=st.integers(0, 2**40), token=st.integers(0, 2**20))
@example(seed=239, position=28070, token=239)  # u next to 1, where float32 holds 1 - u badly
@settings(max_examples=200, deadline=None)
def test_both_writings_of_the_noise_agree(seed: int, position: int, token: int) -> None:
    row = torch.tensor([seed]), torch.tensor([position])
    tokens = torch.tensor([token])
    assert _bits(*row, tokens).item() == noise_bits(seed, position, token)
    noise = -sampling.log_exponential(sampling.row_keys(*row).unsqueeze(1), tokens).item()
    wanted, rounding = gumbel(seed, position, token), noise_rounding(seed, position, token)
    assert abs(noise - wanted) <= rounding


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr(sampling, "noise_bits", lambda keys, tokens: ends)
    assert bool(sampling.log_exponential(ends, ends).isfinite().all())


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_twenty_thousand_draws_follow_the_softmax(cuts: dict[str, float]) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(0)) * 1.5
    row = Row(
        logits[0].tolist(), 0.8, int(cuts.get("top_k", 0)), cuts.get("top_p", 1.0),
        cuts.get("min_p", 0.0), 0, 0,
    )  # fmt: skip
    kept = row.kept()
    share = torch.zeros(60, dtype=torch.float64)
    share[kept] = torch.softmax(logits[0, kept].double() / 0.8, 0)
    for seed in (1, 2):
        tokens = _draws(logits, torch.arange(20_000), seed, **cuts)
        counts = torch.bincount(tokens, minlength=60).double()
        assert not counts[share == 0].any()
        assert abs(_chi_square(counts, share * 20_000)) < 4


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_neighbouring_draws_are_independent(axis: str) -> None:
    """Count pairs of tokens at steps n and n + 1: the table is the product of the shares."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    steps = torch.arange(40_001)
    still = torch.zeros_like(steps)
    ones, off = torch.ones(len(steps)), torch.zeros(len(steps), dtype=torch.int64)
    seeds, positions = (steps, still) if axis == "seed" else (still, steps)
    tokens = sampling.sample(
        logits.expand(len(steps), -1), ones, off, ones, ones * 0, seeds, positions
    )
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double()
    share = torch.softmax(logits[0].double(), 0)
    assert abs(_chi_square(pairs, (share.outer(share) * 40_000).flatten())) < 4


def _grids() -> dict[str, Tensor]:
    """Return 2**18 hashed words along each of the three counters, uniform in [0, 1)."""
    steps, few = torch.arange(2**14), torch.arange(16)
    return {
        "tokens": _bits(few, few, steps),
        "positions": _bits(steps * 0 + 7, steps, few).T.contiguous(),
        "seeds": _bits(steps, steps * 0 + 7, few).T.contiguous(),
    }


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_noise_is_white_along(axis: str) -> None:
    words = _grids()[axis]  # [16, 2**14], neighbours along the counter in the last axis
    count = words.numel()
    for bit in range(32):
        ones = (words >> bit & 1).sum().item()
        assert abs(ones - count / 2) < 5 * (count / 4) ** 0.5, f"bit {bit}"
        flips = ((words[:, 1:] ^ words[:, :-1]) >> bit & 1).sum().item()
        pairs = count - 16
        assert abs(flips - pairs / 2) < 5 * (pairs / 4) ** 0.5, f"bit {bit} of neighbours"
    for shift in (0, 12, 24):
        bytes_ = torch.bincount((words >> shift & 255).flatten(), minlength=256).double()
        assert abs(_chi_square(bytes_, torch.full((256,), count / 256))) < 4
    top = words >> 28
    pairs = torch.bincount((top[:, :-1] * 16 + top[:, 1:]).flatten(), minlength=256).double()
    assert abs(_chi_square(pairs, torch.full((256,), pairs.sum().item() / 256))) < 4


@pytest.mark.parametrize("which", [0, 1, 2], ids=["seed", "position", "token"])
def test_one_flipped_input_bit_flips_half_of_the_noise(which: int) -> None:
    g = torch.Generator().manual_seed(which)
    inputs = [torch.randint(0, 2**20, (2048,), generator=g) for _ in range(3)]

    def words() -> Tensor:
        keys = sampling.row_keys(inputs[0], inputs[1]).unsqueeze(1)
        return sampling.noise_bits(keys, inputs[2].unsqueeze(1))[:, 0]

    before, kept = words(), inputs[which]
    for bit in range(0, 20, 3):
        inputs[which] = kept ^ (1 << bit)
        changed = words() ^ before
        share = torch.stack([(changed >> b & 1).float().mean() for b in range(32)])
        assert (share - 0.5).abs().max() < 6 * 0.5 / 2048**0.5


@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
@settings(max_examples=40, deadline=None)
def test_draws_never_leave_the_kept_set_and_reach_its_best(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed))
    kept = set(Row(logits[0].tolist(), temperature, top_k, top_p, min_p, 0, 0).kept(1e-5, 1e-5))
    tokens = _draws(
        logits,
        torch.arange(300),
        seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    assert set(tokens.tolist()) <= kept
    assert logits[0].argmax().item() in tokens


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, kept in ((0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2})):
        tokens = _draws(logits, torch.arange(400), temperature=1.0, top_p=top_p)
        assert set(tokens.tolist()) == kept


def test_one_nan_row_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    args = [torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3)]
    seeds = torch.tensor([1, 2, 3])
    clean = sampling.sample(logits, *args, seeds, seeds)
    logits[1, 20] = math.nan
    assert sampling.sample(logits, *args, seeds, seeds).tolist() == [
        clean[0].item(),
        -1,
        clean[2].item(),
    ]


def test_no_sort_where_no_row_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("sorted without need")

    monkeypatch.setattr(sampling, "_draw_sorted", refuse)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(6))
    _draws(logits, torch.arange(5), min_p=0.1)
    _draws(logits, torch.arange(5), temperature=0.0, top_k=3, top_p=0.5)
    _draws(logits, torch.arange(5), top_k=40)
    with pytest.raises(AssertionError, match="without need"):
        _draws(logits, torch.arange(5), top_p=0.5)
