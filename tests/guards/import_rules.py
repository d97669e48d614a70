"""Rules about imports: direction between rooms, no cycles, and rooms that must not know torch."""

from fnmatch import fnmatch
from pathlib import PurePosixPath

from tests.guards.source import PACKAGE, Source, imported_modules

LAYERS = {
    "errors": 0, "config": 0, "trace": 0,
    "quant": 1, "contracts": 1,
    "parallel": 2, "ops": 2,
    "cache": 3,
    "model": 4,
    "engine": 5,
    "disagg": 6,
}  # fmt: skip
_LOWEST = frozenset(room for room, layer in LAYERS.items() if layer <= 2)
# Rooms beside the layers: what each may import besides itself.
SIDE_ROOMS = {
    "feedback": _LOWEST,
    "agent": _LOWEST | {"feedback"},
    "plan": frozenset(LAYERS) | {"feedback"},
    # The composition root: gives factories to probes, so it may see everything.
    "serve": frozenset(LAYERS) | {"feedback", "agent", "plan"},
}
ROOMS = LAYERS.keys() | SIDE_ROOMS.keys()

NO_TORCH = (
    "oxplow/errors.py",
    "oxplow/config/*",
    "oxplow/trace/*",
    "oxplow/cache/*",
    "oxplow/engine/request.py",
    "oxplow/engine/scheduler.py",
    "oxplow/disagg/messages.py",
    "oxplow/disagg/router.py",
)
_TENSOR_LIBRARIES = frozenset(
    {"torch", "triton", "transformers", "accelerate", "safetensors.torch"}
)


def import_direction(sources: list[Source]) -> list[str]:
    """Refuse an import that climbs, crosses into a side room, or closes a cycle of rooms."""
    found: dict[str, None] = {}  # in order, each message once
    edges: dict[str, set[str]] = {}
    for source in sources:
        if source.room and source.room not in ROOMS:
            found[f"{source.shown}: room {source.room!r} is not on the map of layers"] = None
            continue
        for line, target in imported_modules(source):
            room = _room(target)
            if not source.room or room is None or room == source.room:
                continue
            edges.setdefault(source.room, set()).add(room)
            if not _may(source.room, room):
                found[f"{source.shown}:{line}: {source.room} imports up into {room}"] = None
    return [*found] + [f"rooms import each other: {cycle}" for cycle in _cycles(edges)]


def no_torch(sources: list[Source]) -> list[str]:
    """Refuse tensor libraries in modules that must run without them."""
    found = {
        f"{source.shown}:{line}: imports {library} but must not know tensors": None
        for source in sources
        if must_not_know_torch(source)
        for line, target in imported_modules(source)
        for library in _TENSOR_LIBRARIES
        if target == library or target.startswith(library + ".")
    }
    return [*found]


def must_not_know_torch(source: Source) -> bool:
    """Tell whether the module is on the no-torch list."""
    shown = PurePosixPath(source.shown).as_posix()
    return any(fnmatch(shown, pattern) for pattern in NO_TORCH)


def _room(target: str) -> str | None:
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == PACKAGE and parts[1] in ROOMS else None


def _may(importer: str, imported: str) -> bool:
    if importer in SIDE_ROOMS:
        return imported in SIDE_ROOMS[importer]
    return imported in LAYERS and LAYERS[imported] <= LAYERS[importer]


def _cycles(edges: dict[str, set[str]]) -> list[str]:
    """Return each pair or ring of rooms once, by following edges from every room."""
    found: set[tuple[str, ...]] = set()

    def follow(trail: tuple[str, ...]) -> None:
        for room in sorted(edges.get(trail[-1], ())):
            if room == trail[0] and trail[0] == min(trail):
                found.add(trail)
            elif room not in trail:
                follow((*trail, room))

    for room in sorted(edges):
        follow((room,))
    return [" -> ".join((*ring, ring[0])) for ring in sorted(found)]
