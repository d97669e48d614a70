"""The machine profile: plausible rates, floors that use them, a file that names its machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oxplow.contracts.schema import Cost
from oxplow.errors import ConfigError
from oxplow.feedback.calibrate import (
    MachineProfile,
    calibrate,
    fingerprint,
    load_profile,
    profile_path,
    save_profile,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def profile() -> MachineProfile:
    return calibrate(CPU, 1, budget_s=0.5)


def test_every_rate_is_positive_and_says_where_it_is_from(profile: MachineProfile) -> None:
    assert profile.flops_s["float32"] > 1e8
    assert all(rate > 1e7 for _, rate in (*profile.read_bytes_s, *profile.copy_bytes_s))
    assert 0 < profile.timer_s < 1e-4 < 1e9 * profile.dispatch_s
    assert profile.control.low <= profile.control.high
    assert profile.fingerprint == fingerprint(CPU, 1) != fingerprint(CPU, 2)
    assert "measured on" in profile.origin() and profile.age_s < 600


def test_the_floor_is_the_largest_of_bytes_flops_and_the_call(profile: MachineProfile) -> None:
    known = replace(
        profile,
        read_bytes_s=((1000, 100.0), (10_000, 50.0)),
        copy_bytes_s=((1000, 80.0), (10_000, 60.0)),
        flops_s={"float32": 10.0},
        dispatch_s=0.5,
    )
    assert known.floor(Cost(bytes=1000, flops=0)).seconds == pytest.approx(10.0)
    large = known.floor(Cost(bytes=20_000, flops=0))
    assert (large.bound_by, large.seconds) == ("bytes", pytest.approx(20_000 / 60))
    assert known.floor(Cost(bytes=8, flops=200)).bound_by == "flops"
    assert known.floor(Cost(bytes=0, flops=0)).bound_by == "launch"


def test_a_kept_profile_is_read_back_and_another_machine_gets_none(
    profile: MachineProfile, tmp_path: Path
) -> None:
    path = save_profile(profile, tmp_path)
    assert load_profile(tmp_path, profile.fingerprint) == profile
    assert load_profile(tmp_path, "0" * 16) is None
    path.write_text(json.dumps(profile.row() | {"version": -1}))
    assert load_profile(tmp_path, profile.fingerprint) is None
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no machine profile"):
        load_profile(tmp_path, profile.fingerprint)
    profile_path(tmp_path, profile.fingerprint).unlink()
    assert load_profile(tmp_path, profile.fingerprint) is None


def test_a_profile_grows_stale(profile: MachineProfile) -> None:
    assert not profile.is_stale
    assert replace(profile, made_at=profile.made_at - 40 * 86400).is_stale
