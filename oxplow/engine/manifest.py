"""What leaves a request, as one versioned record: tokens, position, and every cached component.

Owns the record, its checksums and its file format. Knows no pool, no scheduler and no transport.
Invariant: a manifest is complete (every component of the layout, in order) and self-checking; a
reader of another version, model, layout or damaged bytes refuses before it changes anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oxplow.cache.plan import blocks_for
from oxplow.cache.prefix import PictureSpan
from oxplow.cache.spec import Component, Per
from oxplow.engine.request import SamplingParams
from oxplow.engine.state import component_name
from oxplow.errors import TransferError

VERSION = 2  # 2: points, and a digest over the header
_TOKENS = "token_ids"
_FORMAT = "oxplow-manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentEntry:
    """One component: what the layout says of it, the array's shape and checksum."""

    layer: int
    name: str
    per: str
    shape: tuple[int, ...]
    dtype: str
    shard_axis: int | None
    checksum: str

    @property
    def key(self) -> str:
        """The name of its tensor."""
        return f"{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPart:
    """What continues a generation beside the caches; `max_len` bounds prompt and answer."""

    request_id: str
    params: SamplingParams
    seed: int
    prompt_len: int
    max_len: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """State at an earlier position of a manifest's text: its slot components; blocks are shared.

    A text that leaves the manifest's path before its end can still start here.
    """

    tokens: int
    components: tuple[ComponentEntry, ...]
    tensors: Mapping[str, Tensor]

    def sealed(self) -> Point:
        """Return the point with a checksum on every component."""
        return replace(self, components=_sealed(self.components, self.tensors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """State after the first `computed_tokens` of `token_ids`.

    `request` None: a bare prefix for later requests, cut at a whole block; `points` are whole
    blocks before it, rising. `revision` and `layout` name the model and its cache layout; `salt`
    the tenant.
    """

    revision: str
    layout: str
    block_size: int
    salt: str
    token_ids: tuple[int, ...]
    computed_tokens: int
    pictures: tuple[PictureSpan, ...] = ()
    request: RequestPart | None = None
    points: tuple[Point, ...] = ()
    components: tuple[ComponentEntry, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        """Bytes of all components."""
        parts = [self.tensors, *(p.tensors for p in self.points)]
        return sum(t.nbytes for part in parts for t in part.values())

    def sealed(self) -> Manifest:
        """Return the manifest with a checksum on every component."""
        points = tuple(p.sealed() for p in self.points)
        return replace(self, components=_sealed(self.components, self.tensors), points=points)

    def verify(
        self, components: Sequence[Component], *, revision: str, layout: str, block_size: int
    ) -> None:
        """Raise TransferError where this manifest is not for this engine or not whole."""
        facts: tuple[tuple[str, object, object], ...] = (
            ("version", self.version, VERSION),
            ("model revision", self.revision, revision),
            ("cache layout", self.layout, layout),
            ("block size", self.block_size, block_size),
            (
                "list of components",
                [e.key for e in self.components],
                [component_name(c) for c in components],
            ),
        )
        for what, got, wanted in facts:
            if got != wanted:
                raise TransferError(f"the manifest's {what} is another", got=got, wanted=wanted)
        if not 0 < self.computed_tokens <= len(self.token_ids):
            raise TransferError(
                "the manifest's position is not inside its text",
                got=self.computed_tokens,
                wanted=f"1 to {len(self.token_ids)}",
            )
        blocks = blocks_for(self.computed_tokens, block_size)
        _check_parts(self.components, self.tensors, components, blocks)
        slots = [c for c in components if c.per is Per.SLOT]
        ends = [*(p.tokens for p in self.points), self.computed_tokens]
        if ends != sorted(set(ends)) or any(p.tokens <= 0 for p in self.points):
            raise TransferError("the manifest's points do not rise", got=ends)
        for point in self.points:
            if [e.key for e in point.components] != [component_name(c) for c in slots]:
                raise TransferError("a point of the manifest is not whole", where=point.tokens)
            _check_parts(point.components, point.tensors, slots, 0)

    def save(self, path: Path) -> None:
        """Write a sealed copy to a safetensors file; the header holds all but the arrays."""
        sealed = self.sealed()
        told = json.dumps(
            {
                "version": sealed.version,
                "revision": sealed.revision,
                "layout": sealed.layout,
                "block_size": sealed.block_size,
                "salt": sealed.salt,
                "computed_tokens": sealed.computed_tokens,
                "pictures": [asdict(p) for p in sealed.pictures],
                "request": None if sealed.request is None else _request_json(sealed.request),
                "components": [asdict(e) for e in sealed.components],
                "points": [
                    {"tokens": p.tokens, "components": [asdict(e) for e in p.components]}
                    for p in sealed.points
                ],
            }
        )
        ids = torch.tensor(sealed.token_ids, dtype=torch.int64)
        arrays = {n: t.contiguous() for n, t in sealed.tensors.items()}
        for point in sealed.points:
            arrays |= {f"{point.tokens}/{n}": t.contiguous() for n, t in point.tensors.items()}
        head = {"format": _FORMAT, "manifest": told, "digest": _digest(told, ids)}
        save_file({**arrays, _TOKENS: ids}, path, metadata=head)


def load_manifest(path: Path) -> Manifest:
    """Read what `Manifest.save` wrote; raises TransferError for another file or a damaged one."""
    try:
        with safe_open(path, "pt") as file:
            head = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise TransferError("the session file cannot be read", got=error, where=path) from error
    told, ids = _header(head, tensors.pop(_TOKENS, None), path)
    # A header that carries our digest can still be somebody else's work.
    try:
        return _manifest_from(told, tensors, ids)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError("the session file's header is not whole", where=path) from error


def entries_for(
    components: Sequence[Component], tensors: Mapping[str, Tensor]
) -> tuple[ComponentEntry, ...]:
    """List every component that `tensors` holds, unsealed."""
    return tuple(
        ComponentEntry(
            layer=c.layer,
            name=c.name,
            per=c.per.value,
            shape=tuple(tensors[component_name(c)].shape),
            dtype=c.dtype,
            # in the array as sent: blocks have one more axis in front
            shard_axis=None if c.shard_axis is None else c.shard_axis + (c.per is Per.BLOCK),
            checksum="",
        )
        for c in components
        if component_name(c) in tensors
    )


def layout_name(components: Sequence[Component], block_size: int) -> str:
    """Name a cache layout: equal exactly if every component and the block size are equal."""
    told = [[c.layer, c.name, c.per.value, list(c.shape), c.dtype] for c in components]
    return blake2b(json.dumps([block_size, told]).encode(), digest_size=16).hexdigest()


def _checksum(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return blake2b(raw.numpy().data, digest_size=16).hexdigest()


def _sealed(
    entries: Sequence[ComponentEntry], tensors: Mapping[str, Tensor]
) -> tuple[ComponentEntry, ...]:
    return tuple(replace(e, checksum=_checksum(tensors[e.key])) for e in entries)


def _check_parts(
    entries: Sequence[ComponentEntry],
    tensors: Mapping[str, Tensor],
    components: Sequence[Component],
    blocks: int,
) -> None:
    """Raise TransferError where an array is missing, has another form, or differs from its sum."""
    for entry, component in zip(entries, components, strict=True):
        shape = component.shape if component.per is Per.SLOT else (blocks, *component.shape)
        tensor = tensors.get(entry.key)
        got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
        if got != f"{tuple(shape)} torch.{component.dtype}" or entry.shape != tuple(shape):
            raise TransferError(
                f"component {entry.key} is not whole",
                got=f"{got}, listed as {entry.shape}",
                wanted=f"{tuple(shape)} {component.dtype}",
            )
        if tensor is not None and entry.checksum and _checksum(tensor) != entry.checksum:
            raise TransferError(f"component {entry.key} arrived damaged", wanted=entry.checksum)


def _digest(told: str, ids: Tensor) -> str:
    """Name a header and its tokens; the arrays have checksums in the header."""
    digest = blake2b(told.encode(), digest_size=16)
    digest.update(_checksum(ids).encode())
    return digest.hexdigest()


def _header(
    head: Mapping[str, str], ids: Tensor | None, path: Path
) -> tuple[dict[str, Any], Tensor]:
    """Return a file's header and tokens, checked against each other."""
    told = head.get("manifest", "")
    if head.get("format") != _FORMAT or ids is None:
        raise TransferError("this is no session file", got=sorted(head), where=path)
    try:
        fields = json.loads(told)
    except ValueError:
        fields = None
    version = fields.get("version") if isinstance(fields, dict) else None
    if version is not None and version != VERSION:
        raise TransferError(
            "the session file's version is another", got=version, wanted=VERSION, where=path
        )
    if not isinstance(fields, dict) or head.get("digest") != _digest(told, ids):
        raise TransferError("the session file's header is damaged", where=path)
    return fields, ids


def _manifest_from(told: dict[str, Any], arrays: dict[str, Tensor], ids: Tensor) -> Manifest:
    points = [
        Point(
            tokens=int(p["tokens"]),
            components=_entries_from(p["components"]),
            tensors=_point_arrays(arrays, f"{p['tokens']}/"),
        )
        for p in told["points"]
    ]
    return Manifest(
        version=told["version"],
        revision=told["revision"],
        layout=told["layout"],
        block_size=told["block_size"],
        salt=told["salt"],
        token_ids=tuple(ids.tolist()),
        computed_tokens=told["computed_tokens"],
        pictures=tuple(PictureSpan(**p) for p in told["pictures"]),
        request=None if told["request"] is None else _request_from(told["request"]),
        points=tuple(points),
        components=_entries_from(told["components"]),
        tensors={n: t for n, t in arrays.items() if "/" not in n},
    )


def _entries_from(told: Sequence[dict[str, Any]]) -> tuple[ComponentEntry, ...]:
    return tuple(ComponentEntry(**{**e, "shape": tuple(e["shape"])}) for e in told)


def _point_arrays(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in arrays.items() if n.startswith(prefix)}


def _request_json(part: RequestPart) -> dict[str, object]:
    told = asdict(part)
    params = told["params"]
    params["logit_bias"] = [[token, value] for token, value in part.params.logit_bias.items()]
    return told


def _request_from(told: dict[str, object]) -> RequestPart:
    params = told["params"]
    if not isinstance(params, dict):
        raise TransferError("the session file's request is not a record", got=type(params).__name__)
    fields = {
        **params,
        "logit_bias": dict(params["logit_bias"]),
        "stop_token_ids": tuple(params["stop_token_ids"]),
    }
    return RequestPart(**{**told, "params": SamplingParams(**fields)})  # type: ignore[arg-type]
