"""Bad numbers, stalls and broken pictures harm the request that has them and nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxplow.cache.prefix import PictureSpan
from oxplow.cache.spec import Per
from oxplow.engine.core import EngineCore
from oxplow.engine.options import MemoryOptions
from oxplow.engine.request import FinishReason, Picture, Request, RequestStatus
from oxplow.errors import RequestError
from oxplow.model.network import HybridModel
from oxplow.model.step import Embeds
from tests.drive import Driver
from tests.engine.build import (
    GREEDY,
    Make,
    alone,
    answer,
    ask,
    assert_all_free,
    choice_end,
    drain,
    end_of,
    prompt_of,
    text,
)

# P05: one NaN.


def infect(core: EngineCore, name: str, per: Per) -> None:
    """Write NaN into one running request's slot or blocks."""
    holding = core.cache.holdings[f"{name}#0"]
    for component in core.runner.caches.components:
        pool = core.runner.caches[component.layer][component.name]
        if component.per is per:
            units = [holding.slot] if per is Per.SLOT else holding.block_ids
            pool[units] = float("nan")


@pytest.mark.parametrize("per", [Per.SLOT, Per.BLOCK])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_nan_fails_one_request_and_reaches_nobody(
    make: Make, model: HybridModel, per: Per, when: str
) -> None:
    core = make(budget=64 if when == "decode" else 16, blocks=48)
    prompts = {f"{i}": text(70 + i, 40) for i in range(4)}
    for name, prompt in prompts.items():
        core.add(Request(request_id=name, prompt_ids=prompt, params=GREEDY))
    events = []
    while "2#0" not in core.cache.holdings or (
        len(answer(events, "2")) < 3 if when == "decode" else False
    ):
        events += core.step()
    while when == "prefill" and core.book.choices("2")[0].computed_tokens == 0:
        events += core.step()
    known_before = set(core.cache.blocks._block_of)
    infect(core, "2", per)
    slot = core.cache.holdings["2#0"].slot
    events += drain(core)
    end = end_of(events, "2")
    assert end.status is RequestStatus.FAILED
    assert "not finite" in end.message
    assert choice_end(events, "2").reason is FinishReason.FAILED
    assert core.stats().poisoned == 1
    for name in "013":
        assert answer(events, name) == alone(model, prompts[name], 12)
    own = core.handover.chain("")
    own.extend([*prompts["2"], *answer(events, "2")])
    new = {k for k in own.keys if core.cache.blocks.find(k) is not None} - known_before
    assert not new, "nothing that was computed from bad numbers can be found"
    assert_all_free(core)
    assert slot in range(4)
    for i in range(8):
        name = f"later {i}"
        prompt = text(200 + i, 10 + 7 * (i % 4))
        core.add(Request(request_id=name, prompt_ids=prompt, params=GREEDY))
    events = drain(core)
    for i in range(8):
        prompt = text(200 + i, 10 + 7 * (i % 4))
        assert answer(events, f"later {i}") == alone(model, prompt, 12)


def test_memory_of_a_failed_request_is_wiped(make: Make) -> None:
    core = make(snapshots=0)
    core.add(Request(request_id="a", prompt_ids=text(1, 40), params=GREEDY))
    core.step()
    holding = core.cache.holdings["a#0"]
    infect(core, "a", Per.SLOT)
    blocks, slot = list(holding.block_ids), holding.slot
    drain(core)
    for component in core.runner.caches.components:
        pool = core.runner.caches[component.layer][component.name]
        units = pool[slot] if component.per is Per.SLOT else pool[blocks]
        assert torch.equal(units, torch.zeros_like(units)), component.name


def test_infinite_logits_are_caught_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make()
    project = HybridModel.project

    def broken(self: HybridModel, hidden: Tensor) -> Tensor:
        logits = project(self, hidden).clone()
        logits[0, 7] = float("inf")
        return logits

    monkeypatch.setattr(HybridModel, "project", broken)
    assert end_of(ask(core, text(1, 5)), "a").status is RequestStatus.FAILED


# Progress.


def test_a_request_that_can_never_be_placed_is_failed_not_spun_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(max_stalled_steps=5)
    monkeypatch.setattr(type(core.cache), "fits", lambda self, hit, tokens: False)
    monkeypatch.setattr(type(core.cache), "missing_blocks", lambda self, hit, tokens: 1)
    events = ask(core, text(1, 5))
    assert end_of(events, "a").status is RequestStatus.FAILED
    assert "room" in end_of(events, "a").message
    assert core.stats().stalled_steps == 5


# P13: pictures.

TOWER_PATCH = 3 * 2 * 14 * 14


def pixels(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return patches and grid of a picture of rows x columns patches."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows * columns, TOWER_PATCH, generator=generator)
    return values, torch.tensor([[1, rows, columns]])


def pictured(model: HybridModel, parts: list[int | tuple[int, int]]) -> dict[str, object]:
    """Build a prompt from text lengths and (seed, tokens) pictures of 2 x 2 * tokens patches."""
    image = model.spec.image_token_id
    assert image is not None
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            ids += text(part, part)
            continue
        seed, tokens = part
        values, grid = pixels(seed, 2, 2 * tokens)
        span = PictureSpan(len(ids), tokens, f"picture {seed}")
        pictures.append(Picture(span=span, pixel_values=values, grid_thw=grid))
        ids += [image] * tokens
    return {"prompt_ids": ids, "pictures": tuple(pictures)}


def with_pictures(model: HybridModel, parts: list[int | tuple[int, int]]) -> list[int]:
    """Return the driver's greedy answer to a prompt with pictures, encoded in one go."""
    built = pictured(model, parts)
    rows, values = [], []
    for picture in built["pictures"]:
        rows += range(picture.span.start, picture.span.end)
        values.append(model.encode(picture.pixel_values, picture.grid_thw))
    embeds = Embeds(rows=torch.tensor(rows), values=torch.cat(values))
    driver = Driver(model, num_blocks=128)
    return driver.greedy("a", driver.step({"a": built["prompt_ids"]}, embeds=embeds)["a"][-1], 12)


PARTS: list[int | tuple[int, int]] = [10, (1, 6), 5, (2, 9), (3, 4), 8]


@pytest.mark.parametrize("budget", [5, 16, 64])
@pytest.mark.parametrize("room", [9, 15, 100])
def test_pictures_are_split_over_chunks_as_if_in_one(
    make: Make, model: HybridModel, budget: int, room: int
) -> None:
    core = make(budget=budget, encoder_tokens=room)
    core.add(Request(request_id="a", params=GREEDY, **pictured(model, PARTS)))
    core.add(Request(request_id="b", prompt_ids=text(1, 20), params=GREEDY))
    events = drain(core)
    assert answer(events, "a") == with_pictures(model, PARTS)
    assert answer(events, "b") == alone(model, text(1, 20), 12)
    assert core.encoder.num_tokens <= room


def test_pictures_of_several_requests_take_turns_in_a_small_cache(
    make: Make, model: HybridModel
) -> None:
    core = make(budget=9, encoder_tokens=12)
    wholes: dict[str, list[int | tuple[int, int]]] = {
        "a": [6, (1, 9), 4, (2, 5), 3],
        "b": [3, (3, 8), (4, 12), 2],
        "c": [2, (5, 7), 9],
    }
    for name, parts in wholes.items():
        core.add(Request(request_id=name, params=GREEDY, **pictured(model, parts)))
    events = []
    for _ in range(200):
        events += core.step()
        assert core.encoder.num_tokens <= 12
    assert not core.has_work
    for name, parts in wholes.items():
        assert answer(events, name) == with_pictures(model, parts)


def test_rows_that_come_encoded_are_used_as_they_are(make: Make, model: HybridModel) -> None:
    built = pictured(model, PARTS)
    ready = tuple(
        Picture(span=p.span, rows=model.encode(p.pixel_values, p.grid_thw))
        for p in built["pictures"]
    )
    core = make(budget=16)
    events = ask(core, built["prompt_ids"], pictures=ready)
    assert answer(events, "a") == with_pictures(model, PARTS)
    assert core.encoder.num_encoded == 0


def test_an_impossible_picture_is_refused_and_two_that_fit_in_turn_finish(
    make: Make, model: HybridModel
) -> None:
    core = make(encoder_tokens=10, budget=64)
    with pytest.raises(RequestError, match="too large") as refused:
        core.add(Request(request_id="a", params=GREEDY, **pictured(model, [4, (1, 11), 4])))
    assert refused.value.code == "invalid_image"
    events = ask(core, **_renamed(pictured(model, [4, (1, 6), (2, 6), 4])))
    assert len(answer(events, "a")) == 12
    assert core.stats().stalled_steps == 0


def test_pictures_survive_preemption_in_the_middle_of_prefill(
    make: Make, model: HybridModel
) -> None:
    memory = MemoryOptions(output_share=0.0, swap_min_tokens=10**9)
    core = make(budget=16, encoder_tokens=9, memory=memory, slots=1)
    core.add(Request(request_id="a", params=GREEDY, priority=5, **pictured(model, PARTS)))
    for _ in range(4):
        core.step()
    core.add(Request(request_id="b", prompt_ids=text(1, 20), params=GREEDY, priority=1))
    events = drain(core)
    assert core.stats().preemptions == 1
    assert answer(events, "a") == with_pictures(model, PARTS)


def test_the_same_picture_is_encoded_once_and_hits_the_prefix(
    make: Make, model: HybridModel
) -> None:
    core = make()
    parts: list[int | tuple[int, int]] = [10, (1, 20), 20]
    first = answer(ask(core, **_renamed(pictured(model, parts))), "a")
    events = ask(core, **_renamed(pictured(model, parts)))
    assert answer(events, "a") == first
    assert prompt_of(events, "a").cached_tokens == 48
    assert core.encoder.num_encoded == 1
    other: list[int | tuple[int, int]] = [10, (2, 20), 20]
    events = ask(core, **_renamed(pictured(model, other)))
    assert prompt_of(events, "a").cached_tokens == 0, "another picture, the same token ids"


def test_a_picture_that_the_tower_refuses_fails_its_request_only(
    make: Make, model: HybridModel
) -> None:
    core = make()
    values, _ = pixels(1, 2, 8)
    image = model.spec.image_token_id
    bad = Picture(
        span=PictureSpan(2, 4, "bad"), pixel_values=values, grid_thw=torch.tensor([[1, 2, 4]])
    )
    ids = [1, 2, *[image] * 4, 3]
    core.add(Request(request_id="bad", prompt_ids=ids, pictures=(bad,), params=GREEDY))
    core.add(Request(request_id="a", prompt_ids=text(1, 20), params=GREEDY))
    events = drain(core)
    assert end_of(events, "bad").status is RequestStatus.FAILED
    assert answer(events, "a") == alone(model, text(1, 20), 12)
    assert_all_free(core)


def test_one_hash_with_two_sizes_does_not_mix_rows(make: Make, model: HybridModel) -> None:
    core = make()
    for tokens in (6, 9):
        built = pictured(model, [10, (1, tokens), 5])
        (picture,) = built["pictures"]
        span = PictureSpan(picture.span.start, tokens, "same name")
        renamed = Picture(span=span, pixel_values=picture.pixel_values, grid_thw=picture.grid_thw)
        events = ask(core, built["prompt_ids"], pictures=(renamed,))
        assert answer(events, "a") == with_pictures(model, [10, (1, tokens), 5])


@pytest.mark.parametrize(
    "spans",
    [
        [PictureSpan(3, 4, "x")],
        [PictureSpan(0, 2, "x"), PictureSpan(1, 2, "y")],
        [PictureSpan(-1, 2, "x")],
        [PictureSpan(0, 0, "x")],
    ],
)
def test_picture_places_must_lie_in_the_prompt(make: Make, spans: list[PictureSpan]) -> None:
    core = make()
    pictures = tuple(Picture(span=s, rows=torch.zeros(s.num_tokens, 128)) for s in spans)
    with pytest.raises(RequestError) as refused:
        core.add(Request(request_id="a", prompt_ids=[1] * 5, pictures=pictures))
    assert refused.value.code == "invalid_image"


def test_wrong_encoder_rows_are_refused(make: Make) -> None:
    core = make()
    picture = Picture(span=PictureSpan(0, 3, "x"), rows=torch.zeros(2, 128))
    with pytest.raises(RequestError, match="do not fit"):
        core.add(Request(request_id="a", prompt_ids=[1] * 5, pictures=(picture,)))
    nothing = Picture(span=PictureSpan(0, 3, "x"))
    with pytest.raises(RequestError, match="neither rows nor pixels"):
        core.add(Request(request_id="a", prompt_ids=[1] * 5, pictures=(nothing,)))


def _renamed(built: dict[str, object]) -> dict[str, object]:
    return {"prompt": built["prompt_ids"], "pictures": built["pictures"]}
