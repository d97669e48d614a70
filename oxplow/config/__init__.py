"""Settings: what a person may choose, where each value came from, and what was decided.

Owns every setting and is the only reader of configuration files, of the environment and of flags.
It must not know torch, a model or a device: the caller fills `Facts` in.
Invariant: configs are frozen; nothing is patched after loading, `resolve` returns a new object.
"""

from oxplow.config.engine import MemoryConfig, ScheduleConfig
from oxplow.config.load import LoadedConfig, Setting, load_config
from oxplow.config.places import cache_home, compute_variables
from oxplow.config.records import (
    CacheConfig,
    ComputeConfig,
    DtypeName,
    Facts,
    KernelPreference,
    LogConfig,
    LogLevel,
    ResolvedConfig,
    RuntimeConfig,
    TraceConfig,
    resolve,
)
from oxplow.config.serving import LimitsConfig, ServeConfig

__all__ = [
    "CacheConfig",
    "ComputeConfig",
    "DtypeName",
    "Facts",
    "KernelPreference",
    "LimitsConfig",
    "LoadedConfig",
    "LogConfig",
    "LogLevel",
    "MemoryConfig",
    "ResolvedConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "ServeConfig",
    "Setting",
    "TraceConfig",
    "cache_home",
    "compute_variables",
    "load_config",
    "resolve",
]
