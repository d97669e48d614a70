"""Rung 0: each wrong answer of a device is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oxplow.feedback import semantics
from oxplow.feedback.finding import Verdict

CPU = torch.device("cpu")


def _failing() -> set[str]:
    _, findings = semantics.probe_semantics(CPU, "oxplow check --only device")
    return {f.probe.partition(":")[2] for f in findings if f.verdict is Verdict.FAIL}


def test_this_device_is_fit_and_its_profile_is_plain() -> None:
    profile, findings = semantics.probe_semantics(CPU, "oxplow check --only device")
    assert not _failing()
    assert {f.probe.partition(":")[2] for f in findings} <= set(profile.row())
    assert profile.row()["dot_precision"] == "float32"


def _truncating(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is not torch.float32:
            return real(a, b)
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
        return real(a, b)

    return matmul


def test_tf32_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__matmul__", _truncating(torch.Tensor.__matmul__))
    assert _failing() == {"dot_precision"}


def test_lost_nans_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.maximum
    monkeypatch.setattr(torch, "maximum", lambda a, b: real(a.nan_to_num(), b))
    assert _failing() == {"nan_in_max"}


def test_unrepeatable_sums_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = torch.Tensor.cumsum, iter(range(10**6))

    def cumsum(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return real(x, *args) + (next(count) % 2) * 1e-6

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    assert _failing() == {"repeatability"}


def test_copies_that_come_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.to

    def late(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return x if named.pop("copy", False) else real(x, *args, **named)

    monkeypatch.setattr(torch.Tensor, "to", late)
    assert _failing() == {"copy_order"}
