"""Time differences go to the part that grew; rounding goes to the input; wide pools are reached."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oxplow.contracts import CONTRACTS
from oxplow.errors import ContractError
from oxplow.feedback.finding import Verdict
from oxplow.feedback.hotspots import (
    Profile,
    attribute_growth,
    best_of_both,
    growth_finding,
    profile_of,
)
from oxplow.feedback.narrowed import narrowed_input
from oxplow.feedback.offsets import check_offsets, has_pools
from oxplow.ops.kernels.torch.mla import latent_write
from oxplow.ops.kernels.torch.moe import router

SAMPLE = ("engine.sampling", "draw", "")
LINEAR, EXPERTS = ("ops", "linear", ""), ("ops", "experts", "")


def _profile(**seconds: float) -> Profile:
    computed = {LINEAR: 0.4, EXPERTS: 0.4, SAMPLE: 0.2} | {
        {"linear": LINEAR, "experts": EXPERTS, "draw": SAMPLE}[k]: v for k, v in seconds.items()
    }
    total = sum(computed.values())
    return Profile(
        totals=(total, total * 1.02), waits=(0.0,), computed=computed, waited={},
        calls=dict.fromkeys(computed, 10),
    )  # fmt: skip


def _judge(before: Profile, after: Profile) -> tuple[Verdict, str]:
    found = growth_finding("time:x", before, after, repro="oxplow x", excitation={})
    return found.verdict, found.locus.op


def test_the_part_that_grew_is_named() -> None:
    assert _judge(_profile(), _profile(experts=0.6)) == (Verdict.FAIL, "experts")
    assert _judge(_profile(), _profile(draw=0.5)) == (Verdict.FAIL, "draw")


def test_a_slower_machine_is_no_growth() -> None:
    slower = {LINEAR: 0.52, EXPERTS: 0.52, SAMPLE: 0.26}
    assert _judge(_profile(), replace(_profile(), computed=slower))[0] is Verdict.PASS


def test_one_percent_is_no_growth() -> None:
    assert _judge(_profile(), _profile(experts=0.404))[0] is Verdict.PASS
    assert attribute_growth(_profile(), _profile()) == ()


def test_waiting_is_told_from_computing() -> None:
    part = ("engine.sampling", "draw", "sleep")
    waiting = replace(_profile(), waits=(0.5,), waited={part: 0.5})
    found = growth_finding("t", _profile(), waiting, repro="oxplow x", excitation={})
    assert found.locus.parameter == "sleep" and "waits" in found.summary


def test_the_best_of_two_profiles_removes_a_disturbance() -> None:
    disturbed, quiet = _profile(experts=0.9), _profile(experts=0.41)
    assert _judge(_profile(), disturbed)[0] is Verdict.FAIL
    assert _judge(_profile(), best_of_both(disturbed, quiet))[0] is Verdict.PASS


def test_a_profile_survives_its_file_form() -> None:
    made = profile_of(lambda: latent_write(*_latents()), {"latent_write": latent_write}, repeats=1)
    assert ("ops", "latent_write", "") in made.computed
    assert Profile.read(made.row()) == made
    with pytest.raises(ContractError):
        profile_of(time.time, {}, repeats=0)


def _latents() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(4, 8), torch.arange(4), torch.zeros(2, 4, 8)


def test_a_rounded_input_is_named() -> None:
    def rounded(x: Tensor, weight: Tensor, bias: Tensor, **settings: object) -> object:
        return router(x, weight, bias.bfloat16().float(), **settings)  # type: ignore[arg-type]

    found = narrowed_input(CONTRACTS["router"], rounded, repro="oxplow x")
    assert found is not None and found.locus.parameter == "bias"
    assert found.excitation["format"] == "bfloat16"
    assert narrowed_input(CONTRACTS["router"], router) is None


def test_a_narrow_offset_is_found_and_an_honest_one_passes() -> None:
    contract = CONTRACTS["latent_write"]

    def narrow(latent: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
        width = cache.shape[2]
        offset = (slot_mapping * width + (1 << 31)) % (1 << 32) - (1 << 31)
        latent_write(latent, offset // width, cache)

    assert check_offsets(contract, latent_write).verdict is Verdict.PASS
    found = check_offsets(contract, narrow, repro="oxplow x")
    assert found.verdict is Verdict.FAIL and found.locus.parameter == "slot_mapping"
    assert has_pools(contract) and not has_pools(CONTRACTS["linear"])
