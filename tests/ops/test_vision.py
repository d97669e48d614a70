"""Vision ops: relative positions, borders between images, bounded scores, 2 x 2 merge order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv2d, gelu, layer_norm, silu
from torch.utils._python_dispatch import TorchDispatchMode

from oxplow.contracts.vision import (
    VISION_ATTENTION,
    VISION_MERGE,
    _attention_case,
    merge_order_coords,
    vision_attention_reference,
)
from oxplow.ops.kernels.torch import vision

Attention = Callable[..., Tensor]
both = pytest.mark.parametrize("attend", [vision.vision_attention, vision.vision_attention_alone])


class _Largest(TorchDispatchMode):
    """Remember the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@both
@given(seed=st.integers(0, 99), down=st.integers(0, 60), right=st.integers(0, 60))
@settings(max_examples=20, deadline=None)
def test_moving_a_picture_changes_nothing(
    attend: Attention, seed: int, down: int, right: int
) -> None:
    """Only distances between patches count."""
    args = _attention_case(_generator(seed), ((4, 6), (2, 8)), head_dim=16)
    moved = {**args, "coords": args["coords"] + torch.tensor([down, right])}
    torch.testing.assert_close(attend(**moved), attend(**args), rtol=1e-4, atol=2e-5)


@both
def test_a_turned_picture_is_another_picture(attend: Attention) -> None:
    args = _attention_case(_generator(0), ((4, 6),))
    turned = {**args, "coords": args["coords"].flip(1)}
    assert (attend(**turned) - attend(**args)).abs().max() > 0.01


@both
@given(sizes=st.lists(st.sampled_from([0, 1, 2, 5, 12]), min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_any_row_of_image_sizes_is_each_image_alone(attend: Attention, sizes: list[int]) -> None:
    args = _attention_case(_generator(len(sizes)), [(1, size) for size in sizes])
    out, first = attend(**args), 0
    for size in sizes:
        rows = slice(first, first := first + size)
        alone = {n: args[n][rows] for n in ("q", "k", "v", "coords")}
        want = vision_attention_reference(
            **alone, cu_seqlens=torch.tensor([0, size]), theta=args["theta"]
        )
        torch.testing.assert_close(out[rows], want["o"], rtol=1e-5, atol=1e-5)


def test_equal_neighbours_share_a_call() -> None:
    assert vision._runs(torch.tensor([0, 4, 8, 8, 8, 9, 13])) == [(4, 2), (0, 2), (1, 1), (4, 1)]


@both
def test_tiles_of_queries_give_the_same_result(
    attend: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _attention_case(_generator(1), ((4, 6), (4, 6), (2, 4)))
    whole = attend(**args)
    monkeypatch.setattr(vision, "_SCORES", 500)  # 10 rows of two images, 31 of the last one
    torch.testing.assert_close(attend(**args), whole, rtol=1e-6, atol=1e-6)


@both
def test_the_largest_picture_never_writes_its_scores_out(attend: Attention) -> None:
    """8,000 tokens are 32,000 patches: one head's scores alone would be 4 GiB."""
    height, width = 160, 200
    g = _generator(2)
    q, k, v = (torch.randn(height * width, 1, 4, generator=g) for _ in range(3))
    with _Largest() as largest:
        out = attend(
            q,
            k,
            v,
            merge_order_coords(height, width),
            torch.tensor([0, height * width]),
            theta=10000.0,
        )
    assert bool(out.isfinite().all())
    assert largest.numel <= 2 * q.numel()


@pytest.mark.parametrize("merge", [vision.vision_merge, vision.vision_merge_invariant])
def test_the_merger_is_a_convolution_over_the_picture(merge: Callable[..., Tensor]) -> None:
    """Lay patches on their grid, convolve with stride 2, and compare behind identical stages."""
    args = VISION_MERGE.case("image").build(_generator(3))
    height, width = 4, 6
    coords = merge_order_coords(height, width)
    grid = torch.zeros(height, width, args["x"].shape[1])
    grid[coords[:, 0], coords[:, 1]] = args["x"]
    h = conv2d(grid.permute(2, 0, 1), args["conv_weight"], args["conv_bias"], stride=2)
    h = h.flatten(1).T @ args["proj"].T
    e = gelu(layer_norm(h, h.shape[-1:], args["norm_weight"], args["norm_bias"], args["norm_eps"]))
    limit = args["limit"]
    inner = silu((e @ args["gate"].T).clamp(max=limit)) * (e @ args["up"].T).clamp(-limit, limit)
    torch.testing.assert_close(merge(**args), inner @ args["down"].T, rtol=1e-4, atol=1e-5)


def test_coords_follow_the_merge_blocks() -> None:
    coords = merge_order_coords(4, 4).tolist()
    assert coords[:4] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert coords[4] == [0, 2]
    assert coords[8] == [2, 0]


def test_costs_count_each_pair_of_patches_once() -> None:
    args = VISION_ATTENTION.case("images_of_three_sizes").build(_generator(4))
    pairs = 24**2 + 4**2 + 32**2
    assert VISION_ATTENTION.cost(args).flops == 4 * pairs * 2 * 16 + 12 * 60 * 2 * 16
