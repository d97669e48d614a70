"""Give tests their oracle directories: built on first use, or named with `--oracle DIR`.

Owns the pytest option, the session cache and the choice of default seeds. Must not know Oxplow.
Invariant: a directory is built at most once in a session, in pytest's own temporary folder; one
that was named on the command line is only read. Wire it with `pytest_plugins =
["tests.oracles.fixtures"]` in the top `conftest.py`.

A test that takes `glm_directory` or `kimi_directory` runs once for every directory of that kind:
those named with `--oracle` (repeatable), or the default seeds if none of that kind was named.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.oracles.reading import Oracle, open_oracle

# (seed, fp8, ragged): what `glm_directory` runs over when no directory is named.
GLM_DEFAULTS = (
    (0, False, False),
    (0, True, False),
    (2, False, False),
    (2, True, False),
    (0, True, True),
)
KIMI_DEFAULTS = (0, 1)

GlmBuilder = Callable[..., Path]
KimiBuilder = Callable[..., Path]

__all__ = [
    "GLM_DEFAULTS",
    "KIMI_DEFAULTS",
    "glm_directory",
    "glm_oracle",
    "kimi_directory",
    "kimi_oracle",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_generate_tests",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--oracle DIR`."""
    parser.addoption(
        "--oracle",
        action="append",
        default=[],
        metavar="DIR",
        help="compare with this oracle directory instead of building one (repeatable)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread tests over the named directories, or over the default seeds."""
    named = _named_directories(metafunc.config)
    if "glm_directory" in metafunc.fixturenames:
        cases = named.get("glm5_next") or [pytest.param(p, id=_name(p)) for p in GLM_DEFAULTS]
        metafunc.parametrize("glm_directory", cases, indirect=True, scope="session")
    if "kimi_directory" in metafunc.fixturenames:
        kimi = named.get("kimi_linear") or [pytest.param(s, id=f"seed{s}") for s in KIMI_DEFAULTS]
        metafunc.parametrize("kimi_directory", kimi, indirect=True, scope="session")


@pytest.fixture(scope="session")
def glm_oracle(tmp_path_factory: pytest.TempPathFactory) -> GlmBuilder:
    """Return `build(seed=0, fp8=False, ragged=False) -> directory`, cached for the session."""
    built: dict[tuple[int, bool, bool], Path] = {}

    def build(seed: int = 0, fp8: bool = False, ragged: bool = False) -> Path:
        key = (seed, fp8, ragged)
        if key not in built:
            # Imported here: transformers takes seconds, and most tests need no oracle.
            from tests.oracles import glm5_next

            directory = tmp_path_factory.mktemp(f"glm-{_name(key)}")
            plan = glm5_next.Glm5NextOracle(seed=seed, fp8=fp8, ragged=ragged)
            glm5_next.build(directory, plan)
            built[key] = directory
        return built[key]

    return build


@pytest.fixture(scope="session")
def kimi_oracle(tmp_path_factory: pytest.TempPathFactory) -> KimiBuilder:
    """Return `build(seed=0) -> directory`, cached for the session."""
    built: dict[int, Path] = {}

    def build(seed: int = 0) -> Path:
        if seed not in built:
            from tests.oracles import kimi_linear

            directory = tmp_path_factory.mktemp(f"kimi-seed{seed}")
            kimi_linear.build(directory, kimi_linear.KimiLinearOracle(seed=seed))
            built[seed] = directory
        return built[seed]

    return build


@pytest.fixture(scope="session")
def glm_directory(request: pytest.FixtureRequest, glm_oracle: GlmBuilder) -> Oracle:
    """Return one GLM oracle, open: a named directory or a default seed."""
    wanted = request.param
    return open_oracle(wanted if isinstance(wanted, Path) else glm_oracle(*wanted))


@pytest.fixture(scope="session")
def kimi_directory(request: pytest.FixtureRequest, kimi_oracle: KimiBuilder) -> Oracle:
    """Return one Kimi-Linear oracle, open: a named directory or a default seed."""
    wanted = request.param
    return open_oracle(wanted if isinstance(wanted, Path) else kimi_oracle(wanted))


def _named_directories(config: pytest.Config) -> dict[str, list[object]]:
    """Group the directories of `--oracle` by the model type that their config names."""
    groups: dict[str, list[object]] = {}
    for text in config.getoption("--oracle"):
        directory = Path(os.path.abspath(text))
        case = pytest.param(directory, id=directory.name)
        groups.setdefault(open_oracle(directory).model_type, []).append(case)
    return groups


def _name(key: tuple[int, bool, bool]) -> str:
    seed, fp8, ragged = key
    return f"seed{seed}" + ("-fp8" if fp8 else "") + ("-ragged" if ragged else "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that needs an oracle: building one takes transformers and several seconds."""
    for item in items:
        if {"glm_oracle", "kimi_oracle"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.oracle)
            item.add_marker(pytest.mark.slow)
