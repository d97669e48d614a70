"""What an engine process is told at its start.

Owns the record and its making from the settings. Knows no torch: the front fills it in, the
engine's process reads it.
Invariant: it is plain data, so it crosses a process boundary as JSON.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from oxplow.config import LoadedConfig, RuntimeConfig
from oxplow.engine.options import EngineOptions, MemoryOptions, SchedulerOptions

__all__ = ["DEFAULT_FACTORY", "EngineSettings", "engine_options", "engine_settings"]

DEFAULT_FACTORY = "oxplow.serve.engine_build:build_core"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Say what to serve and with how much memory.

    `factory` names the function that builds the engine, "module:function". `cache_bytes` None takes
    a share of what is free; `max_model_len` None what the model allows, 131,072 at most.
    `settings` are those that differ from their defaults, by key.
    """

    directory: str
    factory: str = DEFAULT_FACTORY
    cache_bytes: int | None = None
    max_model_len: int | None = None
    num_slots: int = 16
    max_waiting: int = 1024
    settings: dict[str, bool | int | float | str] = {}


def engine_settings(directory: Path, loaded: LoadedConfig) -> EngineSettings:
    """Take the engine's part out of the settings of a run."""
    limits, cache = loaded.runtime.limits, loaded.runtime.cache
    changed = {
        s.key: s.value
        for s in loaded.settings
        if s.origin != "default"
        and isinstance(s.value, bool | int | float | str)
        and not s.key.startswith("serve.")
    }
    return EngineSettings(
        directory=str(directory),
        cache_bytes=None if limits.cache_mib is None else limits.cache_mib << 20,
        max_model_len=cache.max_model_len_tokens,
        num_slots=limits.max_running,
        max_waiting=limits.max_waiting,
        settings=changed,
    )


def engine_options(runtime: RuntimeConfig, max_waiting: int) -> EngineOptions:
    """Carry the settings of schedule, memory and queue over to the engine's own records."""
    schedule, memory, limits = runtime.schedule, runtime.memory, runtime.limits
    return EngineOptions(
        scheduler=SchedulerOptions(
            step_target_s=schedule.step_target_s or None,
            max_prefill_tokens=schedule.max_prefill_tokens,
            max_partial=schedule.max_partial,
            short_share=schedule.short_share,
            short_tokens=schedule.short_tokens,
            deadline_token_s=schedule.deadline_token_s,
        ),
        memory=MemoryOptions(
            output_share=memory.output_share,
            max_reserve_tokens=memory.max_reserve_tokens,
            swap_min_tokens=memory.swap_min_tokens,
            swap_bytes=memory.swap_mib << 20,
            snapshot_tokens=memory.snapshot_tokens,
            snapshot_ratio=memory.snapshot_ratio,
            answer_snapshot_tokens=memory.answer_snapshot_tokens,
        ),
        max_waiting=max_waiting,
        max_waiting_tokens=limits.max_waiting_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        encoder_tokens=memory.encoder_tokens,
    )
