"""The KDA family: references against other formulations, and properties that cases cannot show."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxplow.contracts import CONTRACTS, kda_cases
from oxplow.contracts.kda import kda_gate_reference, kda_prefill_reference
from oxplow.contracts.laws import Evidence
from oxplow.contracts.schema import Args
from oxplow.contracts.short_conv import short_conv_reference
from oxplow.contracts.slots import PACKED
from oxplow.feedback.gate import examine, reference_values
from oxplow.ops.kernels.torch import kda, kda_chunk
from tests.ops.rowwise import same_bits

F64 = torch.float64
PREFILL = CONTRACTS["kda_prefill"]
KERNELS = (kda_chunk.kda_prefill_chunked, kda.kda_prefill_stepwise, kda.kda_prefill)


def _draw(seed: int, **recipe: Any) -> Args:
    return kda_cases.prompts(torch.Generator().manual_seed(seed), **recipe)


def _copy(args: Args) -> Args:
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in args.items()}


def _wide(args: Args) -> Args:
    return {
        n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for n, v in args.items()
    }


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _assert_law(args: Args, got: dict[str, Tensor]) -> None:
    """Judge outputs that were put together from several calls as if one call had made them."""
    truth = reference_values(PREFILL, args, F64)
    baseline = reference_values(PREFILL, args, torch.float32)
    for name, value in got.items():
        evidence = Evidence(got=value, truth=truth[name], baseline=baseline[name], args=args)
        verdict = PREFILL.checks[name].judge(evidence)
        assert verdict.ok, f"{name}: {verdict.reason}"


# the references against other formulations


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def test_reference_equals_the_product_of_affine_maps() -> None:
    """S_t = A_t S_{t-1} + k_t^T beta_t v_t with A_t = (I - beta_t k_t^T k_t) Diag(exp g_t)."""
    args = _wide(_draw(0, lengths=(23,), sizes=(2, 5, 7)))
    slot, v, g, beta = int(args["state_slots"]), args["v"], args["g"], args["beta"]
    q, k = _unit(args["q"]) / math.sqrt(5), _unit(args["k"])
    start = args["state"][slot].clone()  # [H, V, K]
    got = kda_prefill_reference(**args)
    for h in range(2):
        total = torch.eye(5, dtype=F64)
        added = torch.zeros(5, 7, dtype=F64)
        for t in range(23):
            key = k[t, h][:, None]  # [K, 1]
            step = (torch.eye(5, dtype=F64) - beta[t, h] * key @ key.T) @ g[t, h].exp().diag()
            total, added = step @ total, step @ added + beta[t, h] * key * v[t, h]
            memory = total @ start[h].T + added
            assert _distance(got["o"][t, h], q[t, h] @ memory) <= 1e-12
        assert _distance(got["state"][slot, h].T, memory) <= 1e-12


def test_reference_equals_the_triangular_system_of_the_whole_sequence() -> None:
    """The WY form without chunks: all pair decays as exp of differences, one solve."""
    size = 40
    args = _wide(_draw(1, lengths=(size,), sizes=(3, 8, 6)))
    slot, beta = int(args["state_slots"]), args["beta"].T[..., None]  # [H, T, 1]
    q, k, v, g = (args[n].transpose(0, 1) for n in "qkvg")
    q, k = _unit(q) / math.sqrt(8), _unit(k)
    sums = g.cumsum(1)
    pair = (sums[:, :, None] - sums[:, None]).clamp_max(0).exp()  # [H, T, T, K]
    lower = torch.einsum("hid,hijd,hjd->hij", k, pair, k).tril(-1) * beta
    start = args["state"][slot].mT.clone()  # [H, K, V]
    right = beta * (v - (k * sums.exp()) @ start)
    eye = torch.eye(size, dtype=F64)
    u = torch.linalg.solve(eye + lower, right)
    scores = torch.einsum("hid,hijd,hjd->hij", q, pair, k).tril()
    o = (q * sums.exp()) @ start + scores @ u
    last = sums[:, -1:].mT.exp() * start + (k * (sums[:, -1:] - sums).exp()).mT @ u
    got = kda_prefill_reference(**args)
    assert _distance(got["o"].transpose(0, 1), o) <= 1e-12
    assert _distance(got["state"][slot].mT, last) <= 1e-12


@pytest.mark.parametrize("bound", (-5.0, -2.0, None))
def test_gate_reference_equals_a_scalar_loop(bound: float | None) -> None:
    case = CONTRACTS["kda_gate"].case("extremes")
    args = _wide({**case.build(torch.Generator().manual_seed(3)), "lower_bound": bound})
    g = kda_gate_reference(**args)["g"]
    f, a_log, bias = args["f"].tolist(), args["a_log"].tolist(), args["dt_bias"].tolist()
    for t, h, c in ((t, h, c) for t in range(10) for h in range(4) for c in range(6)):
        raw, rate = f[t][h][c] + bias[h][c], math.exp(a_log[h])
        if bound is None:
            want = -rate * (max(raw, 0.0) + math.log1p(math.exp(-abs(raw))))
        else:
            want = bound / (1 + math.exp(-rate * raw))
            assert bound <= float(g[t, h, c]) <= 0
        assert math.isclose(float(g[t, h, c]), want, rel_tol=1e-12)


def test_a_larger_gate_input_forgets_more() -> None:
    f = torch.linspace(-20, 20, 401)[:, None, None].expand(-1, 3, 2)
    for bound in (-5.0, None):
        g = kda.kda_gate(f, torch.tensor([-2.0, 0.0, 2.0]), torch.ones(3, 2), lower_bound=bound)
        assert (g.diff(dim=0) <= 0).all()
        assert (g <= 0).all()
        assert bound is None or (g >= bound).all()


def test_conv_reference_equals_a_grouped_convolution() -> None:
    case = CONTRACTS["short_conv"].case("continued")
    args = _wide(case.build(torch.Generator().manual_seed(4)))
    windows, cu = args["window"].clone(), args["cu_seqlens"].tolist()
    got = short_conv_reference(**args)
    for i, slot in enumerate(args["state_slots"].tolist()):
        kept = windows[slot] if args["has_state"][i] else torch.zeros_like(windows[slot])
        history = torch.cat((kept, args["x"][cu[i] : cu[i + 1]].T), 1)  # [C, W-1 + length]
        sums = torch.conv1d(history[None], args["weight"][:, None], groups=len(history))[0].T
        assert _distance(got["y"][cu[i] : cu[i + 1]], torch.nn.functional.silu(sums)) <= 1e-12
        assert torch.equal(got["window"][slot], history[:, -3:])


# properties of the prefill kernels


def _in_pieces(run: Any, args: Args, cuts: list[int]) -> dict[str, Tensor]:
    """Run one sequence in calls that end at `cuts`; every later call continues from its state."""
    args, outputs, begin = _copy(args), [], 0
    per_token = ("q", "k", "v", "g", "beta")
    for end in (*cuts, len(args["q"])):
        piece = {n: v[begin:end] if n in per_token else v for n, v in args.items()}
        piece["cu_seqlens"] = torch.tensor([0, end - begin])
        outputs.append(run(**piece))
        if end > begin:
            args["has_state"] = torch.ones(1, dtype=torch.bool)
        begin = end
    return {"o": torch.cat(outputs), "state": args["state"]}


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(1, 150),
    cuts=st.lists(st.integers(0, 150), max_size=4),
    fresh=st.booleans(),
    gate=st.sampled_from((kda_cases.typical, kda_cases.weak, kda_cases.bursts)),
    seed=st.integers(0, 2**20),
)
def test_any_split_of_a_prompt_obeys_the_law_of_the_whole(
    length: int, cuts: list[int], fresh: bool, gate: Any, seed: int
) -> None:
    fresh_rows = (0,) if fresh else ()
    args = _draw(seed, lengths=(length,), fresh=fresh_rows, gate=gate, sizes=(2, 9, 12))
    cuts = sorted(min(cut, length) for cut in cuts)
    for run in KERNELS:
        _assert_law(args, _in_pieces(run, args, cuts))


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 2**20),
)
def test_the_order_of_sequences_does_not_matter(lengths: list[int], order: Any, seed: int) -> None:
    fresh = tuple(i for i in range(len(lengths)) if i % 3 == 1)
    args = _draw(seed, lengths=lengths, fresh=fresh, sizes=(2, 8, 6))
    rows = list(range(len(lengths)))
    order.shuffle(rows)
    starts = args["cu_seqlens"].tolist()
    moved = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in rows])
    shuffled = {n: args[n][moved] for n in ("q", "k", "v", "g", "beta")}
    shuffled |= {n: args[n][rows] for n in ("state_slots", "has_state")}
    shuffled["cu_seqlens"] = torch.tensor([0, *(lengths[i] for i in rows)]).cumsum(0)
    for run in KERNELS:
        state = args["state"].clone()
        o = run(**shuffled, state=state, lower_bound=-5.0)
        back = torch.empty_like(o)
        back[moved] = o
        _assert_law(args, {"o": back, "state": state})


@pytest.mark.parametrize("chunks", (1, 2, 3, 5))
def test_groups_of_chunks_cut_a_batch_anywhere(chunks: int) -> None:
    """A budget of a few chunks ends groups inside positions, between sequences."""
    heads, depth, width, size = 2, 8, 6, kda_chunk.CHUNK
    budget = chunks * 4 * heads * size * (10 * depth + 5 * width + 5 * size)
    args = _draw(5, lengths=(200, 64, 130, 1, 65), fresh=(1,), sizes=(heads, depth, width))
    with patch.dict(kda_chunk._BUDGET, cpu=budget):
        finding = examine(
            PREFILL, "small groups", kda_chunk.kda_prefill_chunked, _case(args), seed=0
        )
    assert finding.ok, str(finding)


@pytest.mark.parametrize("case", PREFILL.cases, ids=lambda c: c.name)
def test_the_chunked_form_holds_where_the_kernel_would_take_steps(case: Any) -> None:
    finding = examine(PREFILL, "chunked", kda_chunk.kda_prefill_chunked, case, seed=2)
    assert finding.ok, str(finding)


def _case(args: Args) -> Any:
    return kda_cases.Case("drawn", kda_cases.CaseKind.EDGE, lambda _: _copy(args))


@pytest.mark.parametrize("run", KERNELS)
def test_packed_sequences_equal_separate_ones_and_leave_the_rest(run: Any) -> None:
    args = _draw(6, lengths=PACKED, fresh=(0, 4, 7), padding=(3,))
    together = _copy(args)
    o = run(**together)
    apart, cu = args["state"].clone(), args["cu_seqlens"].tolist()
    for i in range(len(PACKED)):
        here = slice(cu[i], cu[i + 1])
        alone = {n: args[n][here] for n in ("q", "k", "v", "g", "beta")}
        alone |= {n: args[n][i : i + 1] for n in ("state_slots", "has_state")}
        alone |= {"state": apart, "cu_seqlens": torch.tensor([0, PACKED[i]])}
        torch.testing.assert_close(run(**alone, lower_bound=-5.0), o[here], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together["state"], apart, rtol=1e-5, atol=1e-6, equal_nan=True)
    used = {s for s, n in zip(args["state_slots"].tolist(), PACKED, strict=True) if s >= 0 and n}
    idle = [s for s in range(len(apart)) if s not in used]
    assert same_bits(together["state"][idle], args["state"][idle])


@pytest.mark.parametrize("run", KERNELS)
def test_nan_in_one_sequence_stays_there(run: Any) -> None:
    args = _draw(7, lengths=(70, 20, 66))
    clean, dirty = _copy(args), _copy(args)
    dirty["v"][75, 1, 3] = float("nan")
    dirty["q"][80] = float("nan")
    want, got = run(**clean), run(**dirty)
    others = torch.ones(156, dtype=torch.bool)
    others[70:90] = False
    assert same_bits(got[others], want[others])
    slots = args["state_slots"][[0, 2]]
    assert same_bits(dirty["state"][slots], clean["state"][slots])


# layouts and branches


@pytest.mark.parametrize("name", ("kda_prefill", "kda_decode"))
def test_views_of_larger_tensors_serve_as_inputs(name: str) -> None:
    """q, k, v as slices of one projection, the state as one layer of a pool of all layers."""
    case = CONTRACTS[name].case("square_state")
    args = case.build(torch.Generator().manual_seed(8))
    args.setdefault("lower_bound", None)
    if name == "kda_decode":
        del args["lower_bound"]
    want = _copy(args)
    o = getattr(kda, name)(**want)
    joined = torch.cat([args[n].flatten(1) for n in "qkv"], 1)
    views = [x.view(args["q"].shape) for x in joined.split(args["q"][0].numel(), 1)]
    pool = args["state"][:, None].repeat(1, 3, 1, 1, 1)
    strided = {**_copy(args), **dict(zip("qkv", views, strict=True)), "state": pool[:, 1]}
    strided["g"] = args["g"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["beta"] = args["beta"].T.contiguous().T
    assert same_bits(getattr(kda, name)(**strided), o)
    assert same_bits(pool[:, 1], want["state"])
    assert same_bits(pool[:, 0], args["state"])


@pytest.mark.parametrize("case", ("padding_rows", "padding_only", "decode"))
def test_the_branch_without_host_reads_gives_the_same_bits(case: str) -> None:
    """Elsewhere than on the CPU the slots are not looked at; that branch runs on the CPU here."""
    args = CONTRACTS["kda_decode"].case(case).build(torch.Generator().manual_seed(9))
    known, blind = args["state"].clone(), args["state"].clone()
    token = (args["q"], args["k"], args["v"], args["g"].exp(), args["beta"])
    want = kda._advance_known(known, args["state_slots"].tolist(), *token)
    got = kda._advance_blind(blind, args["state_slots"], *token)
    assert same_bits(got, want)
    assert same_bits(blind, known)

    args = CONTRACTS["short_conv_decode"].case(case).build(torch.Generator().manual_seed(9))
    other = _copy(args)
    y = kda.short_conv_decode(**args)
    with patch.object(kda, "_known_live", lambda slots: False):
        assert same_bits(kda.short_conv_decode(**other), y)
    assert same_bits(other["window"], args["window"])


def test_a_folded_sum_is_the_sum() -> None:
    g = torch.Generator().manual_seed(10)
    for length in (1, 2, 3, 7, 16, 67, 128):
        x = torch.randn(4, 3, length, generator=g)
        bound = 2.0**-24 * (length - 1) * x.abs().sum(-1)
        assert ((kda._folded(x.clone()) - x.double().sum(-1)).abs() <= bound).all()


def test_tiles_of_rows_and_heads_do_not_change_a_bit() -> None:
    recipe = partial(kda_cases.rows, rows=7, padding=(2,))
    args = recipe(torch.Generator().manual_seed(11))
    whole = _copy(args)
    o = kda.kda_decode(**whole)
    for elements in (1, 16 * 24, 2 * 16 * 24, 7 * 16 * 24):
        tiled = _copy(args)
        with patch.dict(kda._STATE_TILE, cpu=elements):
            assert same_bits(kda.kda_decode(**tiled), o)
        assert same_bits(tiled["state"], whole["state"])
