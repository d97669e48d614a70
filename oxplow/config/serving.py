"""The records of settings of the server.

Owns type, default, range and effect of what `oxplow serve` takes. It must not read a file or the
environment.
Invariant: records are frozen and check themselves; lists are written as text with commas.
"""

from dataclasses import dataclass, field

from oxplow.errors import ConfigError

__all__ = ["LimitsConfig", "ServeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Say what is served and where."""

    model: str | None = field(
        default=None, metadata={"doc": "folder of the model; unset: the bundled nano model"}
    )
    host: str = field(
        default="127.0.0.1",
        metadata={"doc": "address to listen on; one that others can reach asks for an api_key"},
    )
    port: int = field(default=8000, metadata={"doc": "port to listen on; 0 takes a free one"})
    names: str | None = field(
        default=None,
        metadata={"doc": "names in the API, with commas; unset: the name of the model's folder"},
    )
    chat_template: str | None = field(
        default=None, metadata={"doc": "file of a chat template; unset: the model's own"}
    )
    inprocess: bool = field(
        default=False, metadata={"doc": "run engine and workers as threads of one process"}
    )
    api_key: str | None = field(
        default=None, metadata={"doc": "key that requests must carry; unset: none is asked"}
    )
    allow_origins: str | None = field(
        default=None, metadata={"doc": "web origins that browsers may call from, with commas; or *"}
    )
    allow_media_domains: str | None = field(
        default=None,
        metadata={"doc": "hosts that pictures may be fetched from, with commas; unset: none"},
    )
    sessions_dir: str | None = field(
        default=None,
        metadata={"doc": "folder where named sessions are kept; unset: there are none"},
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        if not 0 <= self.port <= 65535:
            raise _bad("serve.port", self.port, "0 to 65535")
        for name in ("model", "host", "names", "chat_template", "api_key", "sessions_dir"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise _bad(f"serve.{name}", value, "text that is not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Say what a client may cost and how long things may take."""

    cache_mib: int | None = field(
        default=None,
        metadata={"doc": "MiB for cached state; unset: 1024, or twice the longest request"},
    )
    max_running: int = field(
        default=16, metadata={"doc": "answers that are computed at once; each has a state slot"}
    )
    max_waiting: int = field(
        default=1024, metadata={"doc": "answers that may queue; more get 429 with Retry-After"}
    )
    max_waiting_tokens: int = field(
        default=1 << 24, metadata={"doc": "prompt tokens that may queue; more get 429"}
    )
    queue_timeout_s: float | None = field(
        default=None, metadata={"doc": "seconds in the queue that fail a request; unset: no limit"}
    )
    max_body_mib: int = field(default=64, metadata={"doc": "largest request body in MiB"})
    body_timeout_s: int = field(
        default=60, metadata={"doc": "seconds that a body may pause while it arrives"}
    )
    keep_alive_s: int = field(
        default=10, metadata={"doc": "seconds of silence after which a stream gets a comment"}
    )
    grace_s: int = field(
        default=30, metadata={"doc": "seconds that running answers get when the server leaves"}
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        counts = ("max_running", "max_waiting", "max_waiting_tokens", "max_body_mib")
        for name in (*counts, "body_timeout_s"):
            if getattr(self, name) < 1:
                raise _bad(f"limits.{name}", getattr(self, name), "1 or more")
        if self.queue_timeout_s is not None and not self.queue_timeout_s > 0:
            raise _bad("limits.queue_timeout_s", self.queue_timeout_s, "over 0")
        if self.keep_alive_s < 1:
            raise _bad("limits.keep_alive_s", self.keep_alive_s, "1 or more")
        if self.grace_s < 0:
            raise _bad("limits.grace_s", self.grace_s, "0 or more")
        if self.cache_mib is not None and self.cache_mib < 1:
            raise _bad("limits.cache_mib", self.cache_mib, "1 or more")


def _bad(key: str, got: object, wanted: str) -> ConfigError:
    return ConfigError(f"setting {key} is out of range", got=repr(got), wanted=wanted, where=key)
