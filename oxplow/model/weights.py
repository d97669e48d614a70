"""Checkpoint directories: sharded safetensors, memory-mapped, every tensor accounted for.

Owns finding, checking and handing out stored tensors. Knows names, shapes and formats, not
layers. Invariant: each stored tensor is taken exactly once or the load fails; nothing is guessed
from file names: a weight is FP8 if and only if its `weight_scale_inv` exists. Plain tensors stay
mapped (no copy); stacked ones are copied shard by shard through short-lived mappings, so peak
memory stays near the stored size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oxplow.errors import WeightError

Progress = Callable[[int, int], None]
"""Called with (bytes taken so far, total stored bytes)."""

FP8_BLOCK = 128
"""Rows and columns of one FP8 weight block."""

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_SCALE = "_scale_inv"
_NO_JSON = (json.JSONDecodeError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies and what it is."""

    shard: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight as stored: plain values, or one-byte codes with block scales."""

    values: Tensor
    scale: Tensor | None = None


class Checkpoint:
    """An open checkpoint directory; tensors are taken by name and checked against the wanted shape.

    `device` receives every tensor (CPU keeps the mapping), `dtype` converts bf16/f16/f32 matrices
    on the way (None: as stored). Raises WeightError for missing files, missing, unknown,
    misshapen tensors.
    """

    def __init__(
        self,
        directory: Path,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.directory = directory
        self._device = device or torch.device("cpu")
        self._dtype = dtype
        self._progress = progress
        self._stored = _read_headers(directory)
        self._left = set(self._stored)
        self._total = sum(s.nbytes for s in self._stored.values())
        self._done = 0
        self._open: dict[Path, Any] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return self._total

    def has(self, name: str) -> bool:
        """True when a tensor of this name is stored."""
        return name in self._stored

    def names_under(self, prefix: str) -> list[str]:
        """Return stored names that start with `prefix`, sorted."""
        return sorted(n for n in self._stored if n.startswith(prefix))

    def vector(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        """Take a plain tensor of exactly `shape`; `fp32` widens it (parameters that must not be
        rounded).
        """
        stored = self._expect(name, shape)
        if stored.dtype is torch.float8_e4m3fn:
            raise WeightError(
                f"tensor {name} is FP8", wanted="a plain format", where=stored.shard.name
            )
        value = self._mapped(stored.shard).get_tensor(name)
        self._took(name)
        return self._placed(value, torch.float32 if fp32 else self._dtype)

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """Take a weight [rows, columns], FP8 when its scale is stored."""
        stored = self._expect(name, (rows, columns))
        scale_name = name + _SCALE
        if not self.has(scale_name):
            if stored.dtype is torch.float8_e4m3fn:
                raise WeightError(
                    f"tensor {name} is FP8 but {scale_name} is missing", where=stored.shard.name
                )
            return Matrix(self.vector(name, rows, columns))
        self._check_fp8(name, stored)
        scale = self._take_scale(scale_name, rows, columns)
        value = self._mapped(stored.shard).get_tensor(name)
        _refuse_nan_codes(name, value)
        self._took(name)
        return Matrix(value.to(self._device), scale)

    def stacked(self, names: Sequence[str], rows: int, columns: int) -> Matrix:
        """Take equal matrices into one new tensor [len(names), rows, columns] (and stacked scales).

        All must be FP8, or none.
        """
        coded = [self.has(n + _SCALE) for n in names]
        if any(coded) != all(coded):
            odd = names[coded.index(not coded[0])]
            raise WeightError(
                "FP8 and plain tensors are mixed in one stack", got=f"{names[0]} and {odd}"
            )
        first = self._expect(names[0], (rows, columns))
        if coded[0]:
            self._check_fp8(names[0], first)
        dtype = first.dtype if coded[0] or self._dtype is None else self._dtype
        out = torch.empty(len(names), rows, columns, dtype=dtype, device=self._device)
        passing: dict[
            Path, Any
        ] = {}  # mappings dropped on return, so that copied pages do not stay resident
        for i, name in enumerate(names):
            stored = self._expect(name, (rows, columns))
            if stored.dtype is not first.dtype:
                raise WeightError(
                    "two formats in one stack", got=f"{name} {stored.dtype}", wanted=first.dtype
                )
            if stored.shard not in passing:
                passing[stored.shard] = _map(stored.shard)
            value = passing[stored.shard].get_tensor(name)
            if coded[0]:
                _refuse_nan_codes(name, value)
            out[i].copy_(value)
            self._took(name)
        if not coded[0]:
            return Matrix(out)
        return Matrix(
            out, torch.stack([self._take_scale(n + _SCALE, rows, columns) for n in names])
        )

    def skip(self, name: str) -> None:
        """Account for a tensor that the model does not use."""
        self._took(name)

    def finish(self) -> None:
        """Raise WeightError when stored tensors were never taken: an unknown name is never
        ignored.
        """
        if self._left:
            some = sorted(self._left)
            raise WeightError(
                f"{len(some)} stored tensors are not part of this model",
                got=some[:5],
                wanted="names of the released layout",
                where=self.directory,
            )

    def _expect(self, name: str, shape: Sequence[int]) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise WeightError(
                f"tensor {name} is missing", wanted=f"shape {tuple(shape)}", where=self.directory
            )
        if stored.shape != tuple(shape):
            raise WeightError(
                f"tensor {name} has a wrong shape",
                got=stored.shape,
                wanted=tuple(shape),
                where=stored.shard.name,
            )
        return stored

    def _check_fp8(self, name: str, stored: Stored) -> None:
        if stored.dtype is not torch.float8_e4m3fn:
            raise WeightError(
                f"tensor {name} has a scale but is not FP8",
                got=stored.dtype,
                where=stored.shard.name,
            )

    def _take_scale(self, name: str, rows: int, columns: int) -> Tensor:
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return self.vector(name, *blocks, fp32=True)

    def _placed(self, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return value.to(device=self._device, dtype=dtype or value.dtype)

    def _took(self, name: str) -> None:
        if name not in self._left:
            raise WeightError(f"tensor {name} is used twice", where=self.directory)
        self._left.discard(name)
        self._done += self._stored[name].nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _mapped(self, shard: Path) -> Any:
        if shard not in self._open:
            self._open[shard] = _map(shard)
        return self._open[shard]


def read_config(directory: Path) -> dict[str, Any]:
    """Return the parsed `config.json`; raises WeightError when it is missing or not an object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightError("checkpoint has no config.json", where=directory) from None
    except OSError as error:
        raise WeightError(f"config.json cannot be read: {error}", where=directory) from error
    except _NO_JSON as error:
        raise WeightError(f"config.json does not parse: {error}", where=directory) from error
    if not isinstance(config, dict):
        raise WeightError(
            "config.json is not an object", got=type(config).__name__, where=directory
        )
    return config


def _read_headers(directory: Path) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for shard in _shards(directory):
        handle = _map(shard)
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if name in stored:
                raise WeightError(
                    f"tensor {name} is stored twice",
                    got=[stored[name].shard.name, shard.name],
                    where=directory,
                )
            part = handle.get_slice(name)
            kind = part.get_dtype()
            if kind not in _DTYPES:
                raise WeightError(
                    f"tensor {name} has an unsupported format",
                    got=kind,
                    wanted=sorted(_DTYPES),
                    where=shard.name,
                )
            stored[name] = Stored(shard, tuple(part.get_shape()), _DTYPES[kind])
    return stored


def _refuse_nan_codes(name: str, codes: Tensor) -> None:
    """Raise for e4m3 codes 0x7f and 0xff: they are NaN, and one of them spoils every answer."""
    wrong = int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum())
    if wrong:
        raise WeightError(f"tensor {name} holds NaN codes", got=wrong, wanted="finite e4m3 values")


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not directory.is_dir():
        raise WeightError("checkpoint directory does not exist", where=directory)
    if not index.exists():
        if not single.exists():
            raise WeightError(
                "no model.safetensors and no index",
                got=sorted(p.name for p in directory.iterdir())[:8],
                where=directory,
            )
        return [single]
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in listed.values()})
    except (*_NO_JSON, OSError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"the index does not parse: {error!r}", where=index) from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise WeightError(
                "the index names a shard that is not there", got=name, where=directory
            )
    return [directory / name for name in names]


def _map(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise WeightError(
            f"shard {shard.name} cannot be read: {error}", where=shard.parent
        ) from error
