"""The tiny model that every engine test shares."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from oxplow.contracts import CONTRACTS
from oxplow.model.load import LoadOptions, load_model
from oxplow.model.network import HybridModel
from oxplow.ops.kernels import builtin_kernels
from oxplow.ops.table import Facts, OpTable, select
from tests.engine.build import BLOCK, Make, make_core
from tests.oracles.fixtures import GlmBuilder


@pytest.fixture(scope="session")
def ops() -> OpTable:
    return select(
        builtin_kernels(), CONTRACTS, Facts(device=torch.device("cpu"), dtype=torch.float32)
    )


@pytest.fixture(scope="session")
def model(ops: OpTable, glm_oracle: GlmBuilder) -> HybridModel:
    return load_model(glm_oracle(), ops, LoadOptions(block_size=BLOCK))


@pytest.fixture
def make(model: HybridModel, ops: OpTable) -> Make:
    """Return `make_core` on the tiny model."""
    return partial(make_core, model, ops)
