"""Every knob of the engine is a setting with its own default, checked and carried over."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from oxplow.config import load_config
from oxplow.engine.options import EngineOptions, MemoryOptions, SchedulerOptions
from oxplow.errors import ConfigError
from oxplow.serve.engine_settings import engine_options, engine_settings

CHANGED: dict[str, object] = {
    "schedule.step_target_s": 0.05,
    "schedule.max_prefill_tokens": 512,
    "schedule.max_partial": 2,
    "schedule.short_share": 0.5,
    "schedule.short_tokens": 64,
    "schedule.deadline_token_s": 0.0,
    "memory.output_share": 1.0,
    "memory.max_reserve_tokens": 7,
    "memory.swap_min_tokens": 8,
    "memory.swap_mib": 9,
    "memory.snapshot_tokens": 128,
    "memory.snapshot_ratio": 2.0,
    "memory.answer_snapshot_tokens": 32,
    "memory.encoder_tokens": 99,
    "limits.max_waiting_tokens": 11,
    "limits.queue_timeout_s": 1.5,
}


def test_defaults_are_those_of_the_engine() -> None:
    assert engine_options(load_config(environ={}).runtime, 1024) == EngineOptions()


def test_every_option_of_the_engine_can_be_set() -> None:
    """Nothing of the engine's records keeps its default when every setting is changed."""
    runtime = load_config(None, CHANGED, {}).runtime
    changed, plain = engine_options(runtime, 3), EngineOptions()
    for got, default, kind in (
        (changed.scheduler, plain.scheduler, SchedulerOptions),
        (changed.memory, plain.memory, MemoryOptions),
        (changed, plain, EngineOptions),
    ):
        same = [f.name for f in fields(kind) if getattr(got, f.name) == getattr(default, f.name)]
        assert same in ([], ["max_stalled_steps"]), "a guard against our own faults, no setting"
    assert changed.memory.swap_bytes == 9 << 20


def test_settings_reach_the_engine_s_process() -> None:
    loaded = load_config(None, CHANGED, {})
    sent = engine_settings(Path(), loaded).settings
    assert load_config(None, sent, {}).runtime == loaded.runtime


def test_a_target_of_nothing_is_no_target() -> None:
    runtime = load_config(None, {"schedule.step_target_s": 0}, {}).runtime
    assert engine_options(runtime, 1).scheduler.step_target_s is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("schedule.step_target_s", "-1"),
        ("schedule.step_target_s", "soon"),
        ("schedule.step_target_s", "nan"),
        ("schedule.short_share", "0.6"),
        ("schedule.max_prefill_tokens", "0"),
        ("schedule.max_partial", "2.5"),
        ("memory.output_share", "1.01"),
        ("memory.snapshot_ratio", "0.5"),
        ("memory.swap_mib", "-3"),
        ("memory.encoder_tokens", "many"),
        ("limits.queue_timeout_s", "0"),
        ("limits.max_waiting_tokens", "0"),
    ],
)
def test_a_wrong_value_names_the_setting_and_where_it_came_from(key: str, text: str) -> None:
    name = "OXPLOW_" + key.replace(".", "_").upper()
    with pytest.raises(ConfigError) as refused:
        load_config(environ={name: text})
    assert key in str(refused.value) and name in str(refused.value)


def test_numbers_may_be_written_in_any_usual_way(tmp_path: Path) -> None:
    path = tmp_path / "oxplow.toml"
    path.write_text("[schedule]\nstep_target_s = 1\ndeadline_token_s = 2e-3\n")
    schedule = load_config(path, environ={"OXPLOW_SCHEDULE_SHORT_SHARE": ".5"}).runtime.schedule
    assert (schedule.step_target_s, schedule.deadline_token_s, schedule.short_share) == (
        1.0,
        2e-3,
        0.5,
    )
