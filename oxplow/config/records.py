"""The records of settings and the decisions made from them.

Owns each setting's type, default, range and effect, and `resolve`. It must not read a file or the
environment, nor know torch: the caller states `Facts`.
Invariant: records are frozen and check themselves; `resolve` returns a new object in which nothing
is left undecided.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from oxplow.config.engine import MemoryConfig, ScheduleConfig
from oxplow.config.serving import LimitsConfig, ServeConfig
from oxplow.errors import ConfigError

__all__ = [
    "CacheConfig",
    "ComputeConfig",
    "DtypeName",
    "Facts",
    "KernelPreference",
    "LogConfig",
    "LogLevel",
    "ResolvedConfig",
    "RuntimeConfig",
    "TraceConfig",
    "resolve",
]

DtypeName = Literal["float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Say where and how the arithmetic runs."""

    device: str | None = field(
        default=None,
        metadata={"doc": "torch device, such as cpu or cuda:0; unset: first accelerator, else cpu"},
    )
    activation_dtype: DtypeName | None = field(
        default=None,
        metadata={"doc": "dtype of activations; unset: float32 on cpu, bfloat16 elsewhere"},
    )
    deterministic: bool = field(
        default=False,
        metadata={"doc": "fixed tiles and reduction orders: no batch changes a bit; slower"},
    )
    threads: int | None = field(
        default=None,
        metadata={"doc": "CPU threads; unset: OMP_NUM_THREADS, else one per physical core"},
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        if self.device is not None and not self.device.partition(":")[0].isidentifier():
            raise _bad("compute.device", self.device, "a torch device such as cpu or cuda:0")
        _choice("compute.activation_dtype", self.activation_dtype, DtypeName, optional=True)
        if self.threads is not None and self.threads < 1:
            raise _bad("compute.threads", self.threads, "a whole number of 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Say how cache memory is cut and how long a request may grow."""

    block_size_tokens: int = field(
        default=64,
        metadata={"doc": "tokens in a cache block; a multiple of the index pool, which is 4"},
    )
    max_model_len_tokens: int | None = field(
        default=None,
        metadata={"doc": "longest prompt plus answer, in tokens; unset: what the model allows"},
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        if self.block_size_tokens < 4 or self.block_size_tokens % 4:
            raise _bad("cache.block_size_tokens", self.block_size_tokens, "a multiple of 4, >= 4")
        if self.max_model_len_tokens is not None and self.max_model_len_tokens < 2:
            raise _bad("cache.max_model_len_tokens", self.max_model_len_tokens, "2 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Say what is logged and where."""

    level: LogLevel = field(
        default="info", metadata={"doc": "lowest level shown: debug, info, warning or error"}
    )
    file: str | None = field(
        default=None, metadata={"doc": "append structured JSONL records here; unset: none"}
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        _choice("log.level", self.level, LogLevel, optional=False)
        if self.file is not None and not self.file.strip():
            raise _bad("log.file", self.file, "a path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Say how much of the event log is kept in memory."""

    capacity_events: int = field(
        default=65536,
        metadata={"doc": "events kept, about 200 bytes each; 0 switches tracing off"},
    )
    shadow_every: int = field(
        default=0,
        metadata={
            "doc": "recompute one call in so many of each op by its reference and log what breaks"
            " its law; slow; 0 switches it off"
        },
    )

    def __post_init__(self) -> None:
        """Check ranges; raises ConfigError."""
        if not 0 <= self.capacity_events <= 2**26:
            raise _bad("trace.capacity_events", self.capacity_events, "0 to 67108864")
        if self.shadow_every < 0:
            raise _bad("trace.shadow_every", self.shadow_every, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPreference:
    """Name the kernel that must serve one op; where it cannot, the start fails with its reason."""

    op: str
    kernel: str

    def __post_init__(self) -> None:
        """Check that both sides are named; raises ConfigError."""
        if not self.op.strip() or not self.kernel.strip():
            raise _bad(f"kernels.{self.op}", self.kernel, "the name of a kernel")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Hold every setting of one process; frozen, composed of one record per concern."""

    compute: ComputeConfig = field(default_factory=ComputeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    kernels: tuple[KernelPreference, ...] = ()

    def preferred_kernels(self) -> dict[str, str]:
        """Return the wished kernel by op, as the op table's selection takes it."""
        return {wish.op: wish.kernel for wish in self.kernels}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """State what the caller found out about machine and model; L0 cannot ask by itself.

    `devices` lists torch devices that answer, accelerators first; cpu need not be named.
    """

    physical_cores: int
    devices: tuple[str, ...] = ()
    model_max_len_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Hold the decisions: no field is left open."""

    device: str
    activation_dtype: DtypeName
    deterministic: bool
    threads: int
    block_size_tokens: int
    max_model_len_tokens: int
    kernels: tuple[KernelPreference, ...]


def resolve(config: RuntimeConfig, facts: Facts) -> ResolvedConfig:
    """Decide every open setting from `facts` and return a new object.

    Raises ConfigError where the asked device is not there or the asked length exceeds the model's.
    """
    compute, cache = config.compute, config.cache
    devices = (*facts.devices, "cpu")
    device = compute.device or devices[0]
    # "cuda" means any of them; "cuda:1" must be there.
    if device not in devices and device not in {d.partition(":")[0] for d in devices}:
        raise _bad("compute.device", device, "one of " + ", ".join(devices))
    on_cpu = device.partition(":")[0] == "cpu"
    limit = facts.model_max_len_tokens
    longest = cache.max_model_len_tokens or limit
    if longest is None:
        raise _bad("cache.max_model_len_tokens", None, "a length: the model states none")
    if limit is not None and longest > limit:
        raise _bad("cache.max_model_len_tokens", longest, f"at most {limit}, the model's limit")
    return ResolvedConfig(
        device=device,
        activation_dtype=compute.activation_dtype or ("float32" if on_cpu else "bfloat16"),
        deterministic=compute.deterministic,
        threads=compute.threads or max(1, facts.physical_cores),
        block_size_tokens=cache.block_size_tokens,
        max_model_len_tokens=longest,
        kernels=config.kernels,
    )


def _bad(key: str, got: object, wanted: str) -> ConfigError:
    return ConfigError(f"setting {key} is out of range", got=repr(got), wanted=wanted, where=key)


def _choice(key: str, value: object, literal: object, *, optional: bool) -> None:
    choices = get_args(literal)
    if value not in choices and not (optional and value is None):
        raise _bad(key, value, "one of " + ", ".join(choices))
