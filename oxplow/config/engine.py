"""The records of settings of the engine: how steps are filled and how memory is promised.

Owns each setting's type, default, range and effect. It must not know the engine: the composition
root carries the values over.
Invariant: records are frozen and check themselves; a default here equals the engine's own.
"""

from dataclasses import dataclass, field

from oxplow.errors import ConfigError

__all__ = ["MemoryConfig", "ScheduleConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Say how the steps of the engine are filled."""

    step_target_s: float = field(
        default=0.2,
        metadata={"doc": "seconds a step should take beside other requests; 0: always full steps"},
    )
    max_prefill_tokens: int = field(
        default=2048, metadata={"doc": "prompt tokens of one step at most"}
    )
    max_partial: int = field(default=4, metadata={"doc": "prompts that are read at once"})
    short_share: float = field(
        default=0.25,
        metadata={"doc": "share of a step that short and long prompts keep beside each other"},
    )
    short_tokens: int = field(
        default=2048, metadata={"doc": "longest prompt that counts as short, in tokens"}
    )
    deadline_token_s: float = field(
        default=1e-3,
        metadata={"doc": "seconds of patience for each prompt token: short ones overtake"},
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        _at_least("schedule.step_target_s", self.step_target_s, 0)
        _at_least("schedule.max_prefill_tokens", self.max_prefill_tokens, 1)
        _at_least("schedule.max_partial", self.max_partial, 1)
        _at_least("schedule.short_tokens", self.short_tokens, 1)
        _at_least("schedule.deadline_token_s", self.deadline_token_s, 0)
        if not 0 < self.short_share <= 0.5:
            raise _bad("schedule.short_share", self.short_share, "over 0, at most 0.5")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Say how the engine's memory is promised, kept and given up."""

    output_share: float = field(
        default=0.25, metadata={"doc": "share of an allowed answer that is reserved at its start"}
    )
    max_reserve_tokens: int = field(
        default=2048, metadata={"doc": "tokens reserved for one answer at most"}
    )
    swap_min_tokens: int = field(
        default=1024,
        metadata={"doc": "interrupted requests from so many tokens on are kept on the host"},
    )
    swap_mib: int = field(default=4096, metadata={"doc": "MiB on the host for them"})
    snapshot_tokens: int = field(
        default=512, metadata={"doc": "tokens between reusable states at a prompt's start"}
    )
    snapshot_ratio: float = field(
        default=1.25, metadata={"doc": "each further one is so many times as deep; 1: even spacing"}
    )
    answer_snapshot_tokens: int = field(
        default=64, metadata={"doc": "tokens between reusable states of an answer"}
    )
    encoder_tokens: int = field(
        default=32768, metadata={"doc": "picture positions that stay encoded; larger is refused"}
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        if not 0 <= self.output_share <= 1:
            raise _bad("memory.output_share", self.output_share, "0 to 1")
        for name, least in (
            ("max_reserve_tokens", 0),
            ("swap_min_tokens", 0),
            ("swap_mib", 0),
            ("snapshot_tokens", 1),
            ("snapshot_ratio", 1),
            ("answer_snapshot_tokens", 1),
            ("encoder_tokens", 0),
        ):
            _at_least(f"memory.{name}", getattr(self, name), least)


def _at_least(key: str, got: float, least: float) -> None:
    if not got >= least:  # also false for a value that is not a number
        raise _bad(key, got, f"{least} or more")


def _bad(key: str, got: object, wanted: str) -> ConfigError:
    return ConfigError(f"setting {key} is out of range", got=repr(got), wanted=wanted, where=key)
