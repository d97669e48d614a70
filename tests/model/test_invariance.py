"""A request's logits do not depend on how its tokens are split, on its neighbours, or on prefill
against decode.

Within the law: against the float64 references, a split run may err at most a small multiple of
what the unsplit float32 run errs (the calibrated rule of `contracts.laws`, applied to the whole
model). In deterministic mode: bit for bit.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oxplow.model
from oxplow.model.network import HybridModel
from tests.drive import Driver
from tests.model.build import our_model, truth_model
from tests.ops.rowwise import promised_here

LENGTH = 90
FACTOR = 8.0


class Subject:
    """One tiny model three ways: ours, deterministic, and the truth for one prompt."""

    def __init__(self, directory, tokens: Tensor) -> None:
        self.fast = our_model(directory)
        self.exact = our_model(directory, invariant=True)
        self.ids = tokens[:LENGTH].tolist()
        self.others = [tokens[i : i + 70].tolist() for i in (20, 41, 60)]
        truth = Driver(truth_model(directory)).step({"a": self.ids})["a"]
        whole = Driver(self.fast).step({"a": self.ids})["a"]
        self.truth = truth
        self.allowed = FACTOR * float((whole.double() - truth).abs().max())
        self.bits = Driver(self.exact).step({"a": self.ids})["a"]

    def check(self, logits: Tensor, model: HybridModel, rows: slice = slice(None)) -> None:
        """Assert the law (fast table) or equal bits (deterministic table)."""
        if model is self.exact:
            assert torch.equal(logits, self.bits[rows])
        else:
            assert float((logits.double() - self.truth[rows]).abs().max()) <= self.allowed


@pytest.fixture(scope="module")
def subject(glm_oracle) -> Subject:
    from tests.oracles.reading import open_oracle

    oracle = open_oracle(glm_oracle(seed=0))
    return Subject(oracle.directory, oracle.tensor("text.ids")[0])


MODES = ["fast", pytest.param("exact", marks=promised_here)]


def run_split(
    model: HybridModel, ids: list[int], cuts: list[int], company: list[list[int]] | None = None
) -> Tensor:
    """Feed `ids` in pieces; `company` requests enter one token less than all at the first piece,
    then decode.
    """
    driver, pieces, at = Driver(model), [], 0
    for n, end in enumerate([*cuts, len(ids)]):
        parts = {"a": ids[at:end]}
        for i, other in enumerate(company or []):
            parts[f"n{i}"] = other[: 5 + 7 * i] if n == 0 else [other[4 + 7 * i + n]]
        pieces.append(driver.step(parts)["a"])
        at = end
    return torch.cat(pieces)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True).map(sorted))
def test_any_split_of_the_prompt_gives_the_same(
    subject: Subject, mode: str, cuts: list[int]
) -> None:
    model = getattr(subject, mode)
    subject.check(run_split(model, subject.ids, cuts), model)


@pytest.mark.parametrize("mode", MODES)
def test_step_by_step_equals_prefill(subject: Subject, mode: str) -> None:
    model = getattr(subject, mode)
    subject.check(run_split(model, subject.ids, list(range(1, LENGTH))), model)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6)
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=4, unique=True).map(sorted),
    company=st.integers(1, 3),
)
def test_company_does_not_matter(
    subject: Subject, mode: str, cuts: list[int], company: int
) -> None:
    model = getattr(subject, mode)
    subject.check(run_split(model, subject.ids, cuts, subject.others[:company]), model)


@pytest.mark.parametrize("mode", MODES)
def test_reused_slots_and_blocks_do_not_leak(subject: Subject, mode: str) -> None:
    model = getattr(subject, mode)
    driver = Driver(model, num_blocks=4, num_slots=1)
    driver.step({"before": subject.others[0]})
    driver.release("before")
    subject.check(driver.step({"a": subject.ids})["a"], model)


def test_model_code_leaves_curved_functions_to_the_ops() -> None:
    """Library sigmoid and its kin give a tensor's tail other bits: only kernels use them."""
    curved = {"sigmoid", "silu", "softmax", "softplus", "gelu", "tanh", "log_softmax", "relu"}
    for path in sorted(Path(oxplow.model.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", ""))
            assert not (isinstance(node, ast.Attribute | ast.Name) and name in curved), (
                f"{path.name}:{node.lineno} uses {name}"
            )
