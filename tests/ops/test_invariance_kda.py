"""Deterministic KDA kernels: a row's bits are its own, alone, in company, and under any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS, kda_cases
from oxplow.contracts.schema import Args
from oxplow.ops.kernels.torch import kda
from oxplow.ops.table import Facts, select
from tests.ops.rowwise import assert_rows_keep_bits, same_bits, torch_threads

SIZES = ((3, 16, 24), (1, 13, 7), (2, 33, 5), (6, 64, 64), (2, 1, 1))
DTYPES = (torch.float32, torch.bfloat16)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _act(args: Args, dtype: torch.dtype, names: tuple[str, ...]) -> Args:
    return {n: v.to(dtype) if n in names else v for n, v in args.items()}


def _with_pool(run: Any, pool: str) -> Any:
    """Return `run` with one pool entry for each row given, returning the entries afterwards."""

    def rowwise(**args: Any) -> tuple[Tensor, Tensor]:
        entries = args[pool].clone()
        slots = torch.arange(len(entries)).flip(0)
        pooled = entries.flip(0)  # row i owns slot N-1-i: a batch in no helpful order
        out = run(**{**args, pool: pooled, "state_slots": slots})
        return out, pooled.flip(0)

    return rowwise


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_row_keeps_its_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    with torch_threads(threads):
        for sizes in SIZES:
            args = kda_cases.rows(_generator(), rows=9, sizes=sizes, in_order=True)
            args = _act(args, dtype, ("q", "k", "v"))
            rows = {n: args[n] for n in ("q", "k", "v", "g", "beta")}
            rows["state"] = torch.randn(9, *args["state"].shape[1:], generator=_generator(1))
            assert_rows_keep_bits(_with_pool(kda.kda_decode, "state"), rows, {})


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolved_row_keeps_its_bits_in_any_company(dtype: torch.dtype, threads: int) -> None:
    g = _generator(2)
    with torch_threads(threads):
        for channels, width in ((40, 4), (67, 3), (1, 2), (1152, 4)):
            rows = {
                "x": torch.randn(9, channels, generator=g).to(dtype),
                "window": torch.randn(9, channels, width - 1, generator=g).to(dtype),
            }
            weight = torch.randn(channels, width, generator=g)
            run = _with_pool(kda.short_conv_decode, "window")
            assert_rows_keep_bits(run, rows, {"weight": weight})


@pytest.mark.parametrize("bound", (-5.0, None))
def test_a_gate_row_keeps_its_bits_in_any_company(bound: float | None) -> None:
    g = _generator(3)
    for heads, depth in ((3, 20), (1, 7), (6, 64), (1, 1)):
        rows = {"f": 4 * torch.randn(9, heads, depth, generator=g)}
        shared = {
            "a_log": torch.randn(heads, generator=g),
            "dt_bias": torch.randn(heads, depth, generator=g),
            "lower_bound": bound,
        }
        assert_rows_keep_bits(kda.kda_gate, rows, shared)


def _stepped(run: Any, args: Args, pool: str, per_token: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Give every sequence to the decode kernel token by token, all that are not done at a time."""
    entries, cu = args[pool].clone(), args["cu_seqlens"].tolist()
    out: dict[int, Tensor] = {}
    for i, slot in enumerate(args["state_slots"].tolist()):
        if not args["has_state"][i] and slot >= 0 and cu[i + 1] > cu[i]:
            entries[slot] = 0  # a fresh sequence starts from zeros
    for t in range(max(b - a for a, b in zip(cu[:-1], cu[1:], strict=True))):
        live = [i for i in range(len(cu) - 1) if cu[i] + t < cu[i + 1]]
        at = [cu[i] + t for i in live]
        shared = {n: args[n] for n in ("weight",) if n in args}
        slots = args["state_slots"][live]
        tokens = {n: args[n][at] for n in per_token}
        result = run(**tokens, **shared, **{pool: entries}, state_slots=slots)
        out.update(zip(at, result, strict=True))
    return torch.stack([out[t] for t in range(cu[-1])]), entries


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ("packed_lengths", "padding_between", "odd_sizes", "bursts"))
def test_prefill_in_steps_has_the_bits_of_decode(case: str, dtype: torch.dtype) -> None:
    args = CONTRACTS["kda_prefill"].case(case).build(_generator(4))
    args = _act(args, dtype, ("q", "k", "v"))
    want, entries = _stepped(kda.kda_decode, args, "state", ("q", "k", "v", "g", "beta"))
    assert same_bits(kda.kda_prefill_stepwise(**args), want)
    assert same_bits(args["state"], entries)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ("packed_lengths", "padding_between", "two_taps_odd_channels"))
def test_convolution_has_the_bits_of_its_decode(case: str, dtype: torch.dtype) -> None:
    args = CONTRACTS["short_conv"].case(case).build(_generator(5))
    args = _act(args, dtype, ("x", "window"))
    want, entries = _stepped(kda.short_conv_decode, args, "window", ("x",))
    assert same_bits(kda.short_conv(**args), want)
    assert same_bits(args["window"], entries)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("cuts", ((1,), (2, 3), (64,), (5, 5, 37), (1, 2, 3, 4, 5, 6)))
def test_any_split_of_a_prompt_gives_the_same_bits(cuts: tuple[int, ...], threads: int) -> None:
    g = _generator(6)
    args = kda_cases.prompts(g, lengths=(80,), fresh=(0,), sizes=(3, 20, 12))
    conv = CONTRACTS["short_conv"].case("one_prompt").build(g)
    conv["x"] = torch.randn(80, 40, generator=g)
    conv["cu_seqlens"] = torch.tensor([0, 80])
    with torch_threads(threads):
        for run, whole, pool, per_token in (
            (kda.kda_prefill_stepwise, args, "state", ("q", "k", "v", "g", "beta")),
            (kda.short_conv, conv, "window", ("x",)),
        ):
            entries = whole[pool].clone()
            want = run(**{**whole, pool: entries})
            mine, begin, parts = whole[pool].clone(), 0, []
            for end in (*cuts, 80):
                piece = {n: v[begin:end] if n in per_token else v for n, v in whole.items()}
                piece["cu_seqlens"] = torch.tensor([0, end - begin])
                piece["has_state"] = torch.tensor([begin > 0])
                parts.append(run(**{**piece, pool: mine}))
                begin = end
            assert same_bits(torch.cat(parts), want)
            assert same_bits(mine, entries)


def test_neighbours_in_a_call_do_not_change_a_bit() -> None:
    for run, pool, per_token, args in (
        (
            kda.kda_prefill_stepwise,
            "state",
            ("q", "k", "v", "g", "beta"),
            CONTRACTS["kda_prefill"].case("continued").build(_generator(7)),
        ),
        (
            kda.short_conv,
            "window",
            ("x",),
            CONTRACTS["short_conv"].case("continued").build(_generator(7)),
        ),
    ):
        together, cu = args[pool].clone(), args["cu_seqlens"].tolist()
        want = run(**{**args, pool: together})
        for i, slot in enumerate(args["state_slots"].tolist()):
            here = slice(cu[i], cu[i + 1])
            alone = {n: v[here] if n in per_token else v for n, v in args.items()}
            alone |= {n: args[n][i : i + 1] for n in ("state_slots", "has_state")}
            alone |= {pool: args[pool].clone(), "cu_seqlens": torch.tensor([0, cu[i + 1] - cu[i]])}
            assert same_bits(run(**alone), want[here])
            assert same_bits(alone[pool][slot], together[slot])


def test_deterministic_mode_picks_the_stepwise_prefill() -> None:
    facts = Facts(device=torch.device("cpu"), dtype=torch.float32, invariant=True)
    family = [k.op for k in kda.KERNELS]
    table = select(kda.KERNELS, dict.fromkeys(family), facts)
    assert table.kernels["kda_prefill"].run is kda.kda_prefill_stepwise
    assert all(kernel.invariant for kernel in table.kernels.values())
