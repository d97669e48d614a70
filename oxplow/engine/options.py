"""The engine's settings, as one record for each concern.

Owns names, defaults, ranges and effects. Knows no tensor and reads no file: the composition root
fills these records from the configuration. Invariant: records are frozen and check themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oxplow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """How steps are filled.

    `step_target_s` seconds that a step should take (None: always the full budget);
    `max_prefill_tokens` in one step; `max_partial` long prompts in progress at once; `short_share`
    of the prefill budget that either class, short or long, keeps beside the other; `short_tokens`
    is the longest prompt that counts as short; `deadline_token_s` seconds of patience per prompt
    token, so that short prompts overtake long ones that came a little earlier.
    """

    step_target_s: float | None = 0.2
    max_prefill_tokens: int = 2048
    max_partial: int = 4
    short_share: float = 0.25
    short_tokens: int = 2048
    deadline_token_s: float = 1e-3

    def __post_init__(self) -> None:
        target = self.step_target_s
        _check("step_target_s", target, target is None or target > 0, "over 0, or none")
        _check(
            "max_prefill_tokens", self.max_prefill_tokens, self.max_prefill_tokens > 0, "1 or more"
        )
        _check("max_partial", self.max_partial, self.max_partial > 0, "1 or more")
        _check("short_share", self.short_share, 0 < self.short_share <= 0.5, "over 0, at most 0.5")
        _check("short_tokens", self.short_tokens, self.short_tokens > 0, "1 or more")
        _check("deadline_token_s", self.deadline_token_s, self.deadline_token_s >= 0, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How memory is promised, kept and given up.

    `output_share` of a request's allowed answer is reserved at admission, at most
    `max_reserve_tokens` (an answer without a limit may take the whole context); more grows while
    there is room, else somebody is preempted. `swap_min_tokens`: a preempted request of at least
    so many computed tokens is copied to the host (below, recomputed), while `swap_bytes` last.
    Snapshots of long prompts are `snapshot_tokens` apart at first and then `snapshot_ratio` times
    as deep as the one before; answers keep one every `answer_snapshot_tokens`.
    """

    output_share: float = 0.25
    max_reserve_tokens: int = 2048
    swap_min_tokens: int = 1024
    swap_bytes: int = 1 << 32
    snapshot_tokens: int = 512
    snapshot_ratio: float = 1.25
    answer_snapshot_tokens: int = 64

    def __post_init__(self) -> None:
        _check("output_share", self.output_share, 0 <= self.output_share <= 1, "0 to 1")
        ok = self.max_reserve_tokens >= 0
        _check("max_reserve_tokens", self.max_reserve_tokens, ok, "0 or more")
        _check("swap_min_tokens", self.swap_min_tokens, self.swap_min_tokens >= 0, "0 or more")
        _check("swap_bytes", self.swap_bytes, self.swap_bytes >= 0, "0 or more")
        _check("snapshot_tokens", self.snapshot_tokens, self.snapshot_tokens > 0, "1 or more")
        _check("snapshot_ratio", self.snapshot_ratio, self.snapshot_ratio >= 1, "1 or more")
        ok = self.answer_snapshot_tokens > 0
        _check("answer_snapshot_tokens", self.answer_snapshot_tokens, ok, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Everything the core is told beside the model and the cache plan.

    `max_waiting` requests may queue and `max_waiting_tokens` of their prompts; `queue_timeout_s`
    seconds in the queue fail a request (None: never); `max_stalled_steps` steps in a row without
    any work, although there is some, fail the request at the head; `encoder_tokens` picture
    positions are kept encoded.
    """

    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 24
    queue_timeout_s: float | None = None
    max_stalled_steps: int = 100
    encoder_tokens: int = 32768

    def __post_init__(self) -> None:
        _check("max_waiting", self.max_waiting, self.max_waiting > 0, "1 or more")
        _check(
            "max_waiting_tokens", self.max_waiting_tokens, self.max_waiting_tokens > 0, "1 or more"
        )
        timeout = self.queue_timeout_s
        _check("queue_timeout_s", timeout, timeout is None or timeout > 0, "over 0, or none")
        _check("max_stalled_steps", self.max_stalled_steps, self.max_stalled_steps > 0, "1 or more")
        _check("encoder_tokens", self.encoder_tokens, self.encoder_tokens >= 0, "0 or more")


def _check(name: str, got: object, ok: bool, wanted: str) -> None:
    if not ok:
        raise ConfigError(
            f"engine option {name} is out of range", got=got, wanted=wanted, where=name
        )
