"""A request draws the same token alone, in any batch or tile, under any vocabulary split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxplow.contracts.sampling import _case
from oxplow.contracts.schema import Args
from oxplow.ops.kernels.torch import sampling

ROWS, VOCABULARY = 60, 997


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run a test on one and on two threads; the former number comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _mixed(vocabulary: int = VOCABULARY) -> Args:
    """Every kind of row, and ties: logits are rounded to a coarse grid."""
    g = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(ROWS, vocabulary, generator=g) * 2).mul(8).round().div(8)
    return _case(
        g, logits, [1.0, 0.0, 0.7], [0, 0, 20, 3, 0], [1.0, 0.9, 1.0, 0.5], [0.0, 0.05, 0.0]
    )


def _some(args: Args, rows: Tensor | slice) -> Tensor:
    return sampling.sample(**{name: value[rows].contiguous() for name, value in args.items()})


def test_alone_and_in_batches_of_every_size(threads: int) -> None:
    args = _mixed()
    together = sampling.sample(**args)
    for size in (1, 2, 3, 7, 16, 33):
        for start in range(0, ROWS, size):
            rows = slice(start, start + size)
            assert torch.equal(_some(args, rows), together[rows]), f"{size} rows from {start}"


def test_in_any_order(threads: int) -> None:
    args = _mixed()
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(_some(args, order), sampling.sample(**args)[order])


@pytest.mark.parametrize("tile", [1, 100, 4099, 50_000])
def test_in_tiles_of_every_size(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = _mixed()
    whole = sampling.sample(**args)
    monkeypatch.setattr(sampling, "_TILE", tile)
    monkeypatch.setattr(sampling, "_SORTED", tile)
    assert torch.equal(sampling.sample(**args), whole)


def test_a_row_draws_the_same_with_and_without_a_sort() -> None:
    """Cuts that cut nothing take the other path to the same token."""
    args = _mixed()
    args |= {"temperature": args["temperature"].clamp_min(0.5), "top_k": args["top_k"] * 0}
    args["top_p"] = torch.ones(ROWS)
    plain = sampling.sample(**args)
    rows = sampling._Rows(
        logits=args["logits"].clone(),
        temperature=args["temperature"][:, None],
        top_k=torch.full((ROWS, 1), VOCABULARY),
        top_p=torch.ones(ROWS, 1),
        floor=(args["logits"].amax(1) / args["temperature"] + args["min_p"].log())[:, None],
        keys=sampling.row_keys(args["seeds"], args["positions"])[:, None],
    )
    assert torch.equal(sampling._draw_from_cut(rows), plain)


@given(cuts=st.lists(st.integers(1, VOCABULARY - 1), max_size=7, unique=True))
@settings(max_examples=25, deadline=None)
def test_under_any_split_of_the_vocabulary(cuts: list[int]) -> None:
    """Each shard hands over its best score and token; the best score, then the lowest id, wins."""
    args = _mixed()
    args |= {"temperature": args["temperature"].clamp_min(0.5), "top_k": args["top_k"] * 0}
    args |= {"top_p": torch.ones(ROWS), "min_p": torch.zeros(ROWS)}
    keys = sampling.row_keys(args["seeds"], args["positions"])[:, None]
    borders = [0, *sorted(cuts), VOCABULARY]
    shards = [
        sampling.best_of_shard(
            args["logits"][:, a:b].contiguous(),
            args["temperature"][:, None],
            torch.full((ROWS, 1), float("-inf")),
            keys,
            first_token=a,
        )
        for a, b in zip(borders[:-1], borders[1:], strict=True)
    ]
    scores, tokens = (torch.stack(parts) for parts in zip(*shards, strict=True))
    tokens = tokens.masked_fill(scores != scores.amax(0), VOCABULARY).amin(0)
    assert torch.equal(tokens, sampling.sample(**args))


def test_noise_bits_do_not_depend_on_the_place(threads: int) -> None:
    """torch's own vector loops give other bits in their tails for some functions: not for these."""
    keys = sampling.row_keys(torch.arange(5), torch.arange(5))[:, None]
    whole = sampling.log_exponential(keys, torch.arange(40_003))
    for first in (0, 1, 13, 39_990):
        for width in (1, 3, 8, 13):
            part = sampling.log_exponential(keys[2:3], torch.arange(first, first + width))
            assert torch.equal(part, whole[2:3, first : first + width])


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_equal_scores_go_to_the_lowest_id_across_tiles(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits under equal noise, in tiles of seven tokens."""
    monkeypatch.setattr(sampling, "_TILE", 7)
    monkeypatch.setattr(sampling, "log_exponential", lambda keys, ids: torch.zeros(ids.shape[-1]))
    args = _case(torch.Generator().manual_seed(2), torch.ones(1, 50), [1.0], top_p=[top_p])
    args["logits"][0, :3] = 0.5
    assert sampling.sample(**args).tolist() == [3]
