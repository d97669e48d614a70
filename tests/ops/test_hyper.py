"""Hyper-connections: the scaling form of Sinkhorn equals stepwise division, extremes included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxplow.contracts.hyper import MHC_COLLAPSE, mhc_collapse_reference
from oxplow.contracts.laws import UNIT_ROUNDOFF
from oxplow.feedback.gate import cast_args
from oxplow.ops.kernels.torch import hyper, hyper_host

BALANCERS = (hyper._balance, hyper._balance_invariant)


def _normalised(C: Tensor, eps: float, iterations: int) -> Tensor:
    """Divide by column and row sums one after the other, as model.md 2 writes it."""
    C = C / (C.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        C = C / (C.sum(2, keepdim=True) + eps)
        C = C / (C.sum(1, keepdim=True) + eps)
    return C


matrices = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "streams": st.integers(2, 5),
        "spread": st.sampled_from([0.5, 3.0, 12.0, 40.0]),
        "eps": st.sampled_from([1e-6, 1e-4, 1e-2]),
        "iterations": st.integers(1, 20),
        "one_hot": st.booleans(),
    }
)


def _drawn(m: dict[str, float]) -> Tensor:
    """Softmax rows plus eps, float64 [6, n, n]; one_hot: every logit is +-spread."""
    g = torch.Generator().manual_seed(int(m["seed"]))
    n = int(m["streams"])
    logits = torch.randn(6, n, n, generator=g, dtype=torch.float64)
    logits = logits.sign() * m["spread"] if m["one_hot"] else logits * m["spread"]
    return torch.softmax(logits, -1) + m["eps"]


@pytest.mark.parametrize("balance", BALANCERS)
@given(m=matrices)
@settings(max_examples=60, deadline=None)
def test_the_scaling_form_is_the_stepwise_form(balance, m) -> None:
    A = _drawn(m)
    want = _normalised(A, m["eps"], m["iterations"])
    got = balance(A.clone(), m["eps"], m["iterations"])
    assert ((got - want).abs() / want).max() < 1e6 * UNIT_ROUNDOFF[torch.float64]


@pytest.mark.parametrize("balance", BALANCERS)
@given(m=matrices)
@settings(max_examples=60, deadline=None)
def test_in_float32_it_stays_as_close_as_the_stepwise_form(balance, m) -> None:
    A = _drawn(m).float()
    want = _normalised(A.double(), m["eps"], m["iterations"])
    stepwise = _normalised(A, m["eps"], m["iterations"]).double()
    got = balance(A.clone(), m["eps"], m["iterations"]).double()
    # every one of the 2 * iterations - 1 steps rounds an entry about n times
    steps = (2 * m["iterations"] - 1) * m["streams"]
    allowed = 8 * ((stepwise - want).abs() / want).max() + steps * UNIT_ROUNDOFF[torch.float32]
    assert ((got - want).abs() / want).max() <= allowed


@given(m=matrices)
@settings(max_examples=60, deadline=None)
def test_plain_numbers_scale_four_by_four_stepwise(m) -> None:
    A = _drawn(m | {"streams": 4})
    want = _normalised(A, m["eps"], m["iterations"]).flatten(1)
    rows = [hyper_host.balance_four(a, m["eps"], m["iterations"]) for a in A.flatten(1).tolist()]
    got = torch.tensor(rows, dtype=torch.float64)
    assert ((got - want).abs() / want).max() < 1e6 * UNIT_ROUNDOFF[torch.float64]


@pytest.mark.parametrize(
    ("change", "value"), [("base", -800.0), ("streams", 0.0), ("streams", float("nan"))]
)
def test_numbers_that_python_refuses_go_the_general_way(change: str, value: float) -> None:
    args = MHC_COLLAPSE.case("one_token_odd_width").build(torch.Generator().manual_seed(6))
    args |= {change: torch.full_like(args[change], value), "norm_eps": 0.0}
    told = zip(hyper_host.mhc_collapse_host(**args), hyper.mhc_collapse(**args), strict=True)
    for got, want in told:
        torch.testing.assert_close(got, want, equal_nan=True)


def test_twenty_iterations_balance_rows_and_columns() -> None:
    args = MHC_COLLAPSE.case("prefill").build(torch.Generator().manual_seed(3))
    args["base"], args["scale"] = args["base"] * 0.3, args["scale"] * 0.3
    _, post, mix = hyper.mhc_collapse(**args)
    ones = torch.ones_like(post)
    # the last step is a column step: its sums stop short of one by mix_eps
    torch.testing.assert_close(mix.sum(1), ones - args["mix_eps"], rtol=0, atol=1e-6)
    torch.testing.assert_close(mix.sum(2), ones, rtol=0, atol=1e-5)


def test_bfloat16_streams_keep_float32_coefficients() -> None:
    args = MHC_COLLAPSE.case("decode").build(torch.Generator().manual_seed(4))
    low = cast_args(MHC_COLLAPSE, args, torch.bfloat16)
    wide = {k: v.float() if isinstance(v, Tensor) else v for k, v in low.items()}
    x, post, mix = hyper.mhc_collapse(**low)
    same_x, same_post, same_mix = hyper.mhc_collapse(**wide)
    assert torch.equal(post, same_post)
    assert torch.equal(mix, same_mix)
    assert torch.equal(x, same_x.bfloat16())


def test_equal_streams_collapse_and_expand_to_themselves_times_the_weights() -> None:
    """Start of the network: four copies of the embedding stay four multiples of one vector."""
    args = MHC_COLLAPSE.case("decode").build(torch.Generator().manual_seed(5))
    embedding = args["streams"][:, :1].expand_as(args["streams"]).contiguous()
    args["streams"] = embedding
    x, post, mix = hyper.mhc_collapse(**args)
    pre = mhc_collapse_reference(**args)["x"] / embedding[:, 0]
    torch.testing.assert_close(x, pre[:, :1] * embedding[:, 0])
    out = hyper.mhc_expand(embedding, torch.zeros_like(x), post, mix)
    torch.testing.assert_close(out, embedding * mix.sum(1).unsqueeze(-1))
