"""Our model against transformers on tiny random checkpoints, from logits down to every layer's
streams.

The bounds are the issue's: they hold for float32 against float32. `--oracle DIR` compares with a
directory made by any script that writes the same keys.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxplow.model.network import HybridModel
from oxplow.model.step import Embeds, build_step
from tests.drive import Driver
from tests.model.build import our_model, truth_model
from tests.oracles.reading import Oracle

LOGITS = 1e-4
PIXELS = 5e-4


@pytest.fixture(scope="module")
def model(glm_directory: Oracle) -> HybridModel:
    return our_model(glm_directory.directory, always_select=True)


def gap(got: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference after checking shapes."""
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max())


def test_text_logits_agree(glm_directory: Oracle, model: HybridModel) -> None:
    ids = glm_directory.tensor("text.ids")[0].tolist()
    logits = Driver(model).step({"a": ids})["a"]
    assert gap(logits, glm_directory.tensor("text.logits")[0]) <= LOGITS


def test_dense_shortcut_agrees_where_selection_is_everything(glm_directory: Oracle) -> None:
    model = our_model(glm_directory.directory)
    limit = model.spec.text.index.dense_limit
    ids = glm_directory.tensor("text.ids")[0].tolist()[:limit]
    logits = Driver(model).step({"a": ids})["a"]
    assert gap(logits, glm_directory.tensor("text.logits")[0, :limit]) <= LOGITS


def test_streams_entering_every_layer_agree(glm_directory: Oracle, model: HybridModel) -> None:
    seen: dict[int, Tensor] = {}

    def observe(cut: str, layer: int, value: Tensor) -> None:
        if cut == "streams":
            seen[layer] = value.clone()

    Driver(model).step({"a": glm_directory.tensor("text.ids")[0].tolist()}, observe=observe)
    for layer, got in seen.items():
        wanted = glm_directory.tensor(f"text.streams.{layer}")[0]
        # the first cut that exceeds the bound names the faulty layer
        assert gap(got, wanted.view_as(got)) <= LOGITS * max(1.0, float(wanted.abs().max())), (
            f"layer {layer}"
        )


def test_selected_sets_are_equal_at_every_position(
    glm_directory: Oracle, model: HybridModel
) -> None:
    picked: dict[int, Tensor] = {}
    ids = glm_directory.tensor("text.ids")[0].tolist()
    Driver(model).step(
        {"a": ids},
        observe=lambda cut, i, v: picked.__setitem__(i, v) if cut == "selected" else None,
    )
    sparse = [k for k in glm_directory.keys if k.startswith("text.topk.")]
    assert len(sparse) == len(picked) > 0
    for layer, got in picked.items():
        wanted = glm_directory.tensor(f"text.topk.{layer}")[0]
        for t in range(len(ids)):
            mine = {i for i in got[t].tolist() if i >= 0}
            theirs = {i for i in wanted[t].tolist() if i >= 0}
            assert mine == theirs, f"layer {layer}, position {t}: {sorted(mine ^ theirs)}"


def test_greedy_tokens_are_equal(glm_directory: Oracle, model: HybridModel) -> None:
    driver = Driver(model)
    wanted = glm_directory.tensor("text.greedy")[0].tolist()
    last = driver.step({"a": glm_directory.tensor("text.ids")[0].tolist()})["a"][-1]
    assert driver.greedy("a", last, len(wanted)) == wanted
    assert len(wanted) >= 64 or glm_directory.notes.get("steps")


def test_image_logits_agree(glm_directory: Oracle, model: HybridModel) -> None:
    _check_pictures(glm_directory, model, "image")


def test_prompt_with_several_images_agrees(glm_directory: Oracle, model: HybridModel) -> None:
    if not glm_directory.has("images.ids"):
        pytest.skip("this oracle has one image only")
    _check_pictures(glm_directory, model, "images")


def test_prompt_with_pictures_and_a_clip_agrees(glm_directory: Oracle, model: HybridModel) -> None:
    if not glm_directory.has("mixed.ids"):
        pytest.skip("this oracle mixes no pictures and clips")
    oracle = glm_directory
    pictures = _encoded(oracle, model, "images")
    first = int(oracle.tensor("images.grid_thw")[0].prod()) // model.spec.vision.merge**2
    values = torch.cat([pictures[:first], _encoded(oracle, model, "video"), pictures[first:]])
    ids = oracle.tensor("mixed.ids")[0]
    rows = (ids == model.spec.image_token_id).nonzero()[:, 0]
    logits = Driver(model).step({"a": ids.tolist()}, embeds=Embeds(rows=rows, values=values))["a"]
    assert gap(logits, oracle.tensor("mixed.logits")[0]) <= PIXELS


def test_video_prompt_agrees(glm_directory: Oracle, model: HybridModel) -> None:
    if not glm_directory.has("video.ids"):
        pytest.skip("this oracle has no video")
    _check_pictures(glm_directory, model, "video")


def _encoded(oracle: Oracle, model: HybridModel, key: str) -> Tensor:
    return model.encode(oracle.tensor(f"{key}.pixel_values"), oracle.tensor(f"{key}.grid_thw"))


def _check_pictures(oracle: Oracle, model: HybridModel, key: str) -> None:
    features = _encoded(oracle, model, key)
    ids, wanted = oracle.tensor(f"{key}.ids")[0], oracle.tensor(f"{key}.logits")[0]
    given = oracle.tensor(f"{key}.features")
    assert gap(features, given) <= PIXELS
    rows = (ids == model.spec.image_token_id).nonzero()[:, 0]
    for values, bound in ((features, PIXELS), (given, LOGITS)):
        logits = Driver(model).step({"a": ids.tolist()}, embeds=Embeds(rows=rows, values=values))[
            "a"
        ]
        assert gap(logits, wanted) <= bound


def test_draft_logits_agree(glm_directory: Oracle, model: HybridModel) -> None:
    if not glm_directory.has("mtp.logits"):
        pytest.skip("this oracle has no draft block")
    ids = glm_directory.tensor("text.ids")[0]
    driver = Driver(model)
    driver.step({"trunk": ids.tolist()})
    hidden = driver.hidden[:-1]
    rows = driver.rows("draft", ids[:-1].tolist())
    step = build_step([rows], block_size=model.block_size, device=torch.device("cpu"))
    out = model.draft(hidden, ids[1:], step, driver.caches)
    assert gap(out.hidden, glm_directory.tensor("mtp.hidden")[0]) <= LOGITS
    assert gap(out.logits, glm_directory.tensor("mtp.logits")[0]) <= LOGITS


@pytest.mark.gpu
def test_text_and_image_agree_on_the_accelerator(glm_directory: Oracle) -> None:
    device = torch.device(torch.accelerator.current_accelerator())
    model = our_model(glm_directory.directory, always_select=True, device=device)
    driver = Driver(model, device=device)
    logits = driver.step({"a": glm_directory.tensor("text.ids")[0].tolist()})["a"]
    assert gap(logits.cpu(), glm_directory.tensor("text.logits")[0]) <= LOGITS
    wanted = glm_directory.tensor("text.greedy")[0].tolist()
    assert driver.greedy("a", logits[-1], len(wanted)) == wanted
    pixels = glm_directory.tensor("image.pixel_values").to(device)
    features = model.encode(pixels, glm_directory.tensor("image.grid_thw")).cpu()
    assert gap(features, glm_directory.tensor("image.features")) <= PIXELS


def test_references_in_float64_agree_too(glm_directory: Oracle) -> None:
    """The contracts' meaning itself: the model run on references alone, against transformers."""
    if glm_directory.directory.name and "seed2" in glm_directory.directory.name:
        pytest.skip("one seed is enough for the slow references")
    model = truth_model(glm_directory.directory)
    ids = glm_directory.tensor("text.ids")[0].tolist()[:48]
    logits = Driver(model).step({"a": ids})["a"]
    assert gap(logits.float(), glm_directory.tensor("text.logits")[0, :48]) <= LOGITS


def test_kimi_text_logits_agree(kimi_directory: Oracle) -> None:
    model = our_model(kimi_directory.directory)
    logits = Driver(model).step({"a": kimi_directory.tensor("text.ids")[0].tolist()})["a"]
    assert gap(logits, kimi_directory.tensor("text.logits")[0]) <= LOGITS


def test_kimi_greedy_tokens_are_equal(kimi_directory: Oracle) -> None:
    driver = Driver(our_model(kimi_directory.directory))
    wanted = kimi_directory.tensor("text.greedy")[0].tolist()
    last = driver.step({"a": kimi_directory.tensor("text.ids")[0].tolist()})["a"][-1]
    assert driver.greedy("a", last, len(wanted)) == wanted
