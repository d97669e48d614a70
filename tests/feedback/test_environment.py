"""Records of the surroundings: what is alike, what changed, and what is first suspect."""

from __future__ import annotations

import json

import torch

from oxplow.config import cache_home, compute_variables
from oxplow.feedback.environment import capture, differences, environment_finding
from oxplow.feedback.finding import Verdict


def test_a_record_survives_json_and_equals_itself() -> None:
    facts = json.loads(json.dumps(capture(), allow_nan=False))
    assert differences(facts, facts) == ()
    assert facts["setting.threads"] == torch.get_num_threads()
    assert {"version.torch", "clock.spin_ns", "process.threads"} <= set(facts)


def test_a_changed_setting_is_seen_and_comes_before_versions_and_load() -> None:
    before = capture()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        after = capture()
    finally:
        torch.set_float32_matmul_precision(precision)
    after |= {"version.torch": "1.0", "load.average": float(before["load.average"]) + 40}
    names = [c.name for c in differences(before, after) if "spin" not in c.name]
    assert names[:2] == ["setting.matmul_precision", "version.torch"]
    assert "load.average" in names
    finding = environment_finding(before, after, repro="oxplow diagnose")
    assert finding.verdict is Verdict.FAIL
    assert finding.locus.parameter == "setting.matmul_precision"
    assert "medium" in finding.summary


def test_wandering_within_its_spread_is_no_difference_and_beyond_it_is_one() -> None:
    before = {"clock.spin_ns": 10.0, "load.average": 1.0, "setting.threads": 1}
    assert not differences(before, before | {"clock.spin_ns": 12.0, "load.average": 1.4})
    slow = differences(before, before | {"clock.spin_ns": 20.0})
    assert [c.name for c in slow] == ["clock.spin_ns"]
    assert "10 -> 20" in str(slow[0])


def test_a_fact_that_one_side_lacks_is_a_difference_unless_it_is_a_condition() -> None:
    assert differences({"variable.OMP_NUM_THREADS": "1"}, {})[0].after is None
    assert not differences({"clock.mhz": 1000.0}, {})


def test_records_without_a_common_fact_judge_nothing() -> None:
    assert environment_finding({"a": 1}, {"b": 2}, repro="x").verdict is Verdict.INVALID
    assert environment_finding({"a": 1}, {"a": 1}, repro="x").verdict is Verdict.PASS


def test_variables_are_read_by_prefix_and_never_secret() -> None:
    env = {"OMP_NUM_THREADS": "1", "HOME": "h", "OXPLOW_API_KEY": "s", "TORCH_LOGS": "x"}
    assert compute_variables(env) == {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "x"}


def test_the_cache_folder_follows_the_rules_of_xdg() -> None:
    assert str(cache_home({"XDG_CACHE_HOME": "/var/c"})) == "/var/c/oxplow"
    assert cache_home({"XDG_CACHE_HOME": "relative"}).parts[-2:] == (".cache", "oxplow")
