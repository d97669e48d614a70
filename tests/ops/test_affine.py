"""Affine summaries of KDA runs: any cut gives the same state; products are what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxplow.contracts.kda import KDA_PREFILL
from oxplow.errors import ContractError
from oxplow.ops.affine import IEEE, TF32, TF32X3, Chain, Form, choose_product, fold, summarise


def _inputs(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "k": normal(tokens, 3, 16),
        "v": normal(tokens, 3, 8),
        "g": -(torch.rand(tokens, 3, 16, generator=g, dtype=torch.float64) ** 4),
        "beta": torch.rand(tokens, 3, generator=g, dtype=torch.float64),
    }


def _truth(x: dict[str, Tensor], state: Tensor) -> Tensor:
    """Run the contract's reference: [H, K, V]."""
    tokens = len(x["k"])
    held = state.transpose(1, 2)[None].clone()
    told = KDA_PREFILL.reference(
        q=x["k"], **x, state=held, state_slots=torch.tensor([0]), has_state=torch.tensor([True]),
        cu_seqlens=torch.tensor([0, tokens]), lower_bound=None,
    )  # fmt: skip
    return told["state"][0].transpose(1, 2)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("cuts", [(150,), (1, 150), (37, 101, 150), (64, 64, 128, 150), (149, 150)])
def test_any_cut_gives_the_state_of_the_recurrence(cuts: tuple[int, ...], form: Form) -> None:
    x = _inputs(150)
    state = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    chain = Chain.of(IEEE, form)
    parts = [
        summarise(**{n: v[a:b] for n, v in x.items()}, chain=chain)
        for a, b in zip((0, *cuts), cuts, strict=False)
    ]
    error = (fold(parts, state, chain) - _truth(x, state)).norm() / state.norm()
    assert error < 1e-10  # float64: linear-attention.md 6.2 (a)


def test_strong_decay_overflows_nothing() -> None:
    x = _inputs(130)
    x["g"] = x["g"] - 90.0
    chain = Chain.of(IEEE)
    m, n = (s := summarise(**{k: v.float() for k, v in x.items()}, chain=chain)).m, s.n
    assert bool(m.isfinite().all())
    assert bool(n.isfinite().all())


def test_products_keep_their_declared_precision() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=g) for _ in range(2))
    truth, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    errors = {p.name: float(((p.run(a, b) - truth).abs() / scale).max()) for p in
              (IEEE, TF32X3, TF32)}  # fmt: skip
    assert errors["ieee"] <= 8 * IEEE.roundoff
    assert errors["tf32x3"] <= 4 * TF32X3.roundoff
    assert TF32.roundoff / 8 <= errors["tf32"] <= 2 * TF32.roundoff


def test_a_device_without_tf32_gets_plain_products_and_a_reason() -> None:
    product, reason = choose_product(torch.device("cpu"))
    assert product is IEEE
    assert "no TF32" in reason


def test_shapes_that_do_not_fit_are_told() -> None:
    x = _inputs(8)
    with pytest.raises(ContractError, match="do not fit"):
        summarise(x["k"], x["v"][:4], x["g"], x["beta"], Chain.of(IEEE))
