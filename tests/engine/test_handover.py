"""Export and adopt: the one path by which state leaves and comes back, in memory and in files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oxplow.cache.spec import Per
from oxplow.engine.core import EngineCore
from oxplow.engine.events import RequestEnd
from oxplow.engine.llm import model_revision
from oxplow.engine.manifest import Manifest, load_manifest
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import Request, SamplingParams
from oxplow.errors import CapacityError, RequestError, TransferError
from oxplow.model.network import HybridModel
from tests.engine.build import (
    BLOCK,
    GREEDY,
    Make,
    alone,
    answer,
    ask,
    assert_all_free,
    drain,
    prompt_of,
    text,
)

PROMPT = text(1, 40)


def stopped(
    make: Make, steps: int, params: SamplingParams = GREEDY
) -> tuple[EngineCore, list[int]]:
    """Run a request for some steps; return the core and the tokens so far."""
    core = make(budget=16)
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=params))
    events = []
    for _ in range(steps):
        events += core.step()
    return core, answer(events, "a")


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9, 12])
def test_an_adopted_request_goes_on_as_if_nothing_happened(
    make: Make, model: HybridModel, tmp_path: Path, steps: int
) -> None:
    core, begun = stopped(make, steps)
    manifest = core.export("a")
    manifest.save(tmp_path / "a.safetensors")
    core.abort("a")
    drain(core)
    other = make(blocks=80, slots=2)
    assert other.adopt(load_manifest(tmp_path / "a.safetensors"), "b") == "b"
    rest = answer(_renumbered(drain(other), len(begun)), "b")
    assert [*begun, *rest] == alone(model, PROMPT, 12)
    assert other.stats().prefill_tokens <= max(0, 40 - manifest.computed_tokens)
    assert_all_free(other)


def _renumbered(events: list[object], first: int) -> list[object]:
    return [
        replace(e, position=e.position - first) if hasattr(e, "position") else e for e in events
    ]


def test_the_original_goes_on_undisturbed(make: Make, model: HybridModel) -> None:
    core, begun = stopped(make, 6)
    core.export("a")
    events = _renumbered(drain(core), len(begun))
    assert [*begun, *answer(events, "a")] == alone(model, PROMPT, 12)


def test_sampled_requests_keep_their_draws(make: Make) -> None:
    params = SamplingParams(temperature=1.3, seed=5, max_tokens=12, ignore_eos=True, top_p=0.9)
    whole = answer(ask(make(), PROMPT, params), "a")
    core, begun = stopped(make, 7, params)
    other = make()
    other.adopt(core.export("a"))
    assert [*begun, *answer(_renumbered(drain(other), len(begun)), "a")] == whole


def test_a_manifest_lists_every_component_and_nothing_beyond_its_tokens(make: Make) -> None:
    core, _ = stopped(make, 5)
    manifest = core.export("a")
    components = core.runner.caches.components
    assert [e.key for e in manifest.components] == [f"{c.layer}.{c.name}" for c in components]
    assert manifest.num_bytes == sum(
        c.unit_bytes * (1 if c.per is Per.SLOT else -(-manifest.computed_tokens // BLOCK))
        for c in components
    )
    for component, entry in zip(components, manifest.components, strict=True):
        assert entry.checksum
        assert torch.isfinite(manifest.tensors[entry.key]).all(), "memory of nobody travels along"
        if component.per is not Per.BLOCK:
            continue
        units = manifest.tensors[entry.key].flatten(0, 1)
        known = manifest.computed_tokens * component.shape[0] // BLOCK
        assert not units[known:].any(), "bytes of other requests travel along"
        assert units[:known].any()


def damaged(manifest: Manifest) -> dict[str, Manifest]:
    """Return broken variants by what is wrong with them."""
    key = manifest.components[0].key
    flipped = manifest.tensors[key].clone()
    flipped.view(torch.uint8).flatten()[0] ^= 1
    return {
        "arrived damaged": replace(manifest, tensors={**manifest.tensors, key: flipped}),
        "is not whole": replace(
            manifest, tensors={k: v for k, v in manifest.tensors.items() if k != key}
        ),
        "version is another": replace(manifest, version=99),
        "revision is another": replace(manifest, revision="other"),
        "layout is another": replace(manifest, layout="other"),
        "block size is another": replace(manifest, block_size=32),
        "components is another": replace(manifest, components=manifest.components[1:]),
        "not inside its text": replace(manifest, computed_tokens=1000),
    }


def test_a_wrong_manifest_is_refused_and_changes_nothing(make: Make) -> None:
    core, _ = stopped(make, 5)
    other = make()
    for why, manifest in damaged(core.export("a")).items():
        with pytest.raises(TransferError, match=why):
            other.adopt(manifest)
        assert_all_free(other)
        assert not other.has_work
    drain(core)


def test_adoption_checks_names_and_room(make: Make) -> None:
    core, _ = stopped(make, 5)
    manifest = core.export("a")
    with pytest.raises(RequestError, match="in use"):
        core.adopt(manifest)
    with pytest.raises(CapacityError, match="too long"):
        make(blocks=3).adopt(manifest)
    with pytest.raises(TransferError, match="no such choice"):
        core.export("nobody")
    with pytest.raises(TransferError, match="no such choice"):
        core.export("a", 1)
    drain(core)


def test_a_waiting_request_has_no_state(make: Make) -> None:
    core = make()
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=GREEDY))
    with pytest.raises(TransferError, match="no state"):
        core.export("a")
    drain(core)


def test_a_swapped_out_request_can_be_exported(make: Make, model: HybridModel) -> None:
    core = make(slots=1, memory=MemoryOptions(swap_min_tokens=1))
    core.add(Request(request_id="a", prompt_ids=PROMPT, params=GREEDY, priority=2))
    events = core.step() + core.step() + core.step()
    core.add(Request(request_id="b", prompt_ids=text(2, 9), params=GREEDY, priority=1))
    events += core.step()
    assert core.stats().swapped_bytes > 0
    manifest = core.export("a")
    core.abort("a")
    assert core.stats().swapped_bytes == 0
    other = make()
    other.adopt(manifest)
    begun = answer(events, "a")
    rest = answer(_renumbered(drain(other), len(begun)), "a")
    assert [*begun, *rest] == alone(model, PROMPT, 12)
    drain(core)
    assert_all_free(core)


# Sessions: a bare prefix.


def test_a_saved_session_hits_in_another_engine(
    make: Make, model: HybridModel, tmp_path: Path
) -> None:
    core = make()
    tokens = answer(ask(core, PROMPT), "a")
    chat = [*PROMPT, *tokens]
    core.export_prefix(chat, salt="").save(tmp_path / "chat.safetensors")
    other = make()
    assert other.adopt(load_manifest(tmp_path / "chat.safetensors")) is None
    other.cache.check()
    events = ask(other, [*chat, 7, 8, 9])
    assert prompt_of(events, "a").cached_tokens == 48
    assert answer(events, "a") == alone(model, [*chat, 7, 8, 9], 12)
    assert_all_free(other)


def test_a_session_belongs_to_its_tenant(make: Make) -> None:
    core = make()
    ask(core, PROMPT, salt="left")
    with pytest.raises(TransferError, match="nothing of this text"):
        core.export_prefix(PROMPT, salt="right")
    other = make()
    other.adopt(core.export_prefix(PROMPT, salt="left"))
    assert prompt_of(ask(other, PROMPT, salt="right"), "a").cached_tokens == 0
    assert prompt_of(ask(other, PROMPT, salt="left"), "a").cached_tokens == 32


def test_a_prefix_needs_room_and_a_whole_block(make: Make) -> None:
    core = make()
    ask(core, PROMPT)
    manifest = core.export_prefix(PROMPT)
    with pytest.raises(CapacityError, match="no room"):
        make(snapshots=0).adopt(manifest)
    request = core.export_prefix(PROMPT)
    with pytest.raises(TransferError):
        make().adopt(replace(request, computed_tokens=17))


@pytest.mark.parametrize("content", [b"", b"not a session", b"\x08\0\0\0\0\0\0\0{}      "])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TransferError):
        load_manifest(path)
    with pytest.raises(TransferError):
        load_manifest(tmp_path / "absent")


def test_a_cut_file_is_refused(make: Make, tmp_path: Path) -> None:
    core, _ = stopped(make, 5)
    path = tmp_path / "a.safetensors"
    core.export("a").save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TransferError):
        load_manifest(path)
    drain(core)


def test_the_revision_follows_the_weights_not_the_name(tmp_path: Path) -> None:
    names = []
    for i, weights in enumerate((b"a" * 100, b"a" * 99 + b"b", b"a" * 100)):
        directory = tmp_path / f"{i}" / "model"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(weights)
        names.append(model_revision(directory))
    assert names[0] == names[2] != names[1]


def test_engines_of_other_revisions_share_nothing(make: Make) -> None:
    core = make()
    ask(core, PROMPT)
    with pytest.raises(TransferError, match="revision"):
        make(revision="newer").adopt(core.export_prefix(PROMPT))


def test_every_end_is_told_after_adoption(make: Make) -> None:
    core, _ = stopped(make, 5)
    other = make()
    other.adopt(core.export("a"))
    events = drain(other)
    (end,) = [e for e in events if isinstance(e, RequestEnd)]
    assert end.answer_tokens == 12
    drain(core)


# Sessions whose next turn leaves the saved path before its end.


def talked(make: Make) -> tuple[EngineCore, list[int]]:
    """Answer the prompt long enough for a state inside the answer; return core and conversation."""
    core = make()
    tokens = answer(ask(core, PROMPT, replace(GREEDY, max_tokens=60)), "a")
    return core, [*PROMPT, *tokens]


def test_a_session_serves_texts_that_leave_its_answer(
    make: Make, model: HybridModel, tmp_path: Path
) -> None:
    core, chat = talked(make)
    manifest = core.handover.export_prefix(chat, "", also=(len(PROMPT),))
    assert [p.tokens for p in manifest.points] == [32]
    assert manifest.computed_tokens > 48
    manifest.save(tmp_path / "chat.safetensors")
    other = make()
    other.adopt(load_manifest(tmp_path / "chat.safetensors"))
    other.cache.check()
    for name, turn in (("x", [*PROMPT, 9, 8, 7]), ("y", [*chat, 9, 8, 7])):
        events = ask(other, turn, request_id=name)
        hit = prompt_of(events, name).cached_tokens
        assert hit == (32 if name == "x" else manifest.computed_tokens)
        assert answer(events, name) == alone(model, turn, 12)
    assert_all_free(other)


def test_a_second_load_takes_nothing(make: Make, tmp_path: Path) -> None:
    core, chat = talked(make)
    manifest = core.handover.export_prefix(chat, "", also=(len(PROMPT),)).sealed()
    other = make()
    other.adopt(manifest)
    free = other.cache.blocks.num_available
    writes: list[object] = []
    other.runner.state.write = lambda *args: writes.append(args)  # type: ignore[method-assign]
    other.adopt(manifest)
    assert (other.cache.blocks.num_available, writes) == (free, [])


def test_a_damaged_point_is_refused(make: Make) -> None:
    core, chat = talked(make)
    manifest = core.handover.export_prefix(chat, "", also=(len(PROMPT),)).sealed()
    (point,) = manifest.points
    name = point.components[0].key
    tensors = {**point.tensors, name: point.tensors[name] + 1}
    wrong = {
        "arrived damaged": replace(point, tensors=tensors),
        "is not whole": replace(point, tensors={}),
        "not rise": replace(point, tokens=manifest.computed_tokens),
        "whole block": replace(point, tokens=33),
        "point of the manifest is not whole": replace(point, components=()),
    }
    for why, bad in wrong.items():
        other = make()
        with pytest.raises(TransferError, match=why):
            other.adopt(replace(manifest, points=(bad,)))
        assert_all_free(other)


def test_no_changed_byte_of_a_file_is_adopted(make: Make, tmp_path: Path) -> None:
    core, chat = talked(make)
    path = tmp_path / "chat.safetensors"
    core.handover.export_prefix(chat, "", also=(len(PROMPT),)).save(path)
    whole, other = path.read_bytes(), make()
    places = [*range(0, 4096, 41), *range(4096, len(whole), len(whole) // 150)]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(TransferError):
            other.adopt(load_manifest(path))
    for length in (0, 7, 8, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(TransferError):
            load_manifest(path)
    assert_all_free(other)
    path.write_bytes(whole)
    other.adopt(load_manifest(path))
