"""Reading of settings: TOML file, environment, overrides.

Owns the only reads of configuration files and of the environment in the package. It must not decide
anything: that is `resolve`. Later wins: default, file (`--config` or OXPLOW_CONFIG), OXPLOW_*
variable, override. OMP_NUM_THREADS counts as `compute.threads` where no file or OXPLOW_* variable
sets that.
Invariant: a value is checked where it enters and keeps its origin; an unknown key is refused with
the nearest name.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

from oxplow.config.engine import MemoryConfig, ScheduleConfig
from oxplow.config.records import (
    CacheConfig,
    ComputeConfig,
    KernelPreference,
    LogConfig,
    RuntimeConfig,
    TraceConfig,
)
from oxplow.config.serving import LimitsConfig, ServeConfig
from oxplow.errors import ConfigError

__all__ = ["LoadedConfig", "Setting", "load_config"]

ENV_PREFIX = "OXPLOW_"
ENV_FILE = "OXPLOW_CONFIG"
_OMP = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Show one setting: its value, where that came from, and the variable that sets it."""

    key: str
    value: object
    origin: str
    env: str
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """Pair the checked config with the origin of each of its values."""

    runtime: RuntimeConfig
    settings: tuple[Setting, ...]


_SECTIONS: tuple[tuple[str, type], ...] = (
    ("compute", ComputeConfig),
    ("cache", CacheConfig),
    ("log", LogConfig),
    ("trace", TraceConfig),
    ("serve", ServeConfig),
    ("limits", LimitsConfig),
    ("schedule", ScheduleConfig),
    ("memory", MemoryConfig),
)
_KERNELS_DOC = "the kernel that must serve this op"


def load_config(
    path: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    override_origin: str = "override",
) -> LoadedConfig:
    """Read defaults, file, environment and `overrides`, and return the checked result.

    `overrides` maps dotted keys such as "compute.device" to values; a None value is "not given".
    `override_origin` says where they came from, such as "--set". `environ` stands in for the
    environment of the process in tests.
    Raises ConfigError for an unreadable file, an unknown key or a value out of range.
    """
    env = os.environ if environ is None else environ
    if path is None and env.get(ENV_FILE):
        path = Path(env[ENV_FILE])
    given: dict[str, tuple[object, str]] = {}
    for key, value in _file_items(path) if path is not None else ():
        given[_known(key, f"file {path}")] = (value, f"file {path}")
    for key, value, origin in _env_items(env):
        given[_known(key, origin)] = (value, origin)
    if "compute.threads" not in given and (threads := _omp_threads(env)) is not None:
        given["compute.threads"] = (threads, f"env {_OMP}")
    for key, value in (overrides or {}).items():
        if value is not None:
            given[_known(key, override_origin)] = (value, override_origin)
    return _build(given)


def _keys() -> list[str]:
    return [f"{name}.{f.name}" for name, kind in _SECTIONS for f in fields(kind)]


def _env_name(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "_").upper()


def _nearest(name: str, names: Iterable[str]) -> str:
    """Say which known name is meant, or list them all when none is near."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"{near[0]}, the nearest name" if near else "one of " + ", ".join(known)


def _known(key: str, origin: str) -> str:
    section, _, name = key.partition(".")
    if (section == "kernels" and name) or key in _keys():
        return key
    raise ConfigError("unknown setting", got=key, wanted=_nearest(key, _keys()), where=origin)


def _file_items(path: Path) -> list[tuple[str, object]]:
    """Return dotted keys and values of a TOML file, two levels deep at most."""
    try:
        with path.open("rb") as handle:
            tables = tomllib.load(handle)
    except OSError as error:
        raise ConfigError("cannot read the config file", got=error.strerror, where=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("the config file is not TOML", got=str(error), where=path) from error
    items: list[tuple[str, object]] = []
    for section, table in tables.items():
        if not isinstance(table, dict):
            names = ", ".join([name for name, _ in _SECTIONS] + ["kernels"])
            wanted = f"a table, one of {names}; {_nearest(section, _keys())}"
            raise ConfigError("unknown setting", got=section, wanted=wanted, where=path)
        items += [(f"{section}.{name}", value) for name, value in table.items()]
    return items


def _env_items(env: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (key, text, origin) of each OXPLOW_* variable; an empty value counts as unset."""
    names = {_env_name(key): key for key in _keys()}
    items: list[tuple[str, str, str]] = []
    for name in sorted(n for n in env if n.startswith(ENV_PREFIX) and n != ENV_FILE and env[n]):
        origin = f"env {name}"
        if name in names:
            items.append((names[name], env[name], origin))
        elif name.startswith(ENV_PREFIX + "KERNELS_"):
            op = name.removeprefix(ENV_PREFIX + "KERNELS_").lower()
            items.append((f"kernels.{op}", env[name], origin))
        else:
            raise ConfigError(
                "unknown variable", got=name, wanted=_nearest(name, names), where="environment"
            )
    return items


def _omp_threads(env: Mapping[str, str]) -> int | None:
    """Return what OMP_NUM_THREADS says of the outermost level; None where it says nothing."""
    first = env.get(_OMP, "").partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def _build(given: Mapping[str, tuple[object, str]]) -> LoadedConfig:
    """Make the records and the list of settings from checked keys."""
    sections: dict[str, object] = {}
    settings: list[Setting] = []
    for section, kind in _SECTIONS:
        hints = get_type_hints(kind)
        values = {
            f.name: _coerce(f"{section}.{f.name}", *given[f"{section}.{f.name}"], hints[f.name])
            for f in fields(kind)
            if f"{section}.{f.name}" in given
        }
        try:
            sections[section] = kind(**values)
        except ConfigError as error:
            origin = given[str(error.where)][1] if str(error.where) in given else "default"
            raise ConfigError(
                error.what, got=error.got, wanted=error.wanted, where=origin
            ) from error
        for f in fields(kind):
            key = f"{section}.{f.name}"
            settings.append(
                Setting(
                    key=key,
                    value=getattr(sections[section], f.name),
                    origin=given[key][1] if key in given else "default",
                    env=_env_name(key),
                    doc=f.metadata["doc"],
                )
            )
    wishes: list[KernelPreference] = []
    for key in sorted(k for k in given if k.startswith("kernels.")):
        raw, origin = given[key]
        name = str(_coerce(key, raw, origin, str))
        wishes.append(KernelPreference(op=key.removeprefix("kernels."), kernel=name))
        settings.append(
            Setting(key=key, value=name, origin=origin, env=_env_name(key), doc=_KERNELS_DOC)
        )
    runtime = RuntimeConfig(kernels=tuple(wishes), **sections)  # type: ignore[arg-type]
    return LoadedConfig(runtime=runtime, settings=tuple(settings))


_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WANTED: Mapping[object, str] = {bool: "true or false", int: "a whole number", float: "a number"}
_TRUTH = {"1": True, "true": True, "yes": True, "on": True}
_FALSEHOOD = {"0": False, "false": False, "no": False, "off": False}


def _coerce(key: str, raw: object, origin: str, hint: object) -> object:
    """Turn text or a TOML value into the type of the field; raises ConfigError with the origin."""
    if NoneType in get_args(hint):
        hint = next(h for h in get_args(hint) if h is not NoneType)
    if hint is bool:
        if isinstance(raw, str) and raw.lower() in _TRUTH | _FALSEHOOD:
            return (_TRUTH | _FALSEHOOD)[raw.lower()]
        if isinstance(raw, bool):
            return raw
    elif hint is int:
        if isinstance(raw, str) and _WHOLE.fullmatch(raw.strip()):
            return int(raw)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
    elif hint is float:
        if isinstance(raw, str) and _NUMBER.fullmatch(raw.strip()):
            return float(raw)
        if isinstance(raw, int | float) and not isinstance(raw, bool) and isfinite(raw):
            return float(raw)
    elif isinstance(raw, str):
        return raw
    wanted = _WANTED.get(hint, "text")
    raise ConfigError(
        f"setting {key} has the wrong type", got=repr(raw), wanted=wanted, where=origin
    )
