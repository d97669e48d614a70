"""Fixtures of the server's tests: a model folder and a scripted server, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.model_dir import write_model_files
from tests.serve.running import Running, options, running


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[Running]:
    with running(options(model_dir)) as found:
        yield found
