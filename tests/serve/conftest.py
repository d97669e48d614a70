"""Fixtures of the server's tests: a model folder and a scripted server, made once."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import oxplow.serve.engine_settings as settings_module
from tests.serve.model_dir import write_model_files
from tests.serve.running import SCRIPTED, Running, options, running


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="session")
def server(model_dir: Path) -> Iterator[Running]:
    with running(options(model_dir)) as found:
        yield found


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine of this process be the scripted one."""
    make = settings_module.engine_settings
    monkeypatch.setattr(
        settings_module,
        "engine_settings",
        lambda *given: msgspec.structs.replace(make(*given), factory=SCRIPTED),
    )
