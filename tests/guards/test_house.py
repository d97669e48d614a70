"""The rules of the house, held against the package as it stands."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

import oxplow
from tests.guards import habit_rules, import_rules, shape_rules
from tests.guards.source import PACKAGE, ROOT, Source, read_package

SOURCES = read_package(ROOT)
Rule = Callable[[list[Source]], list[str]]
RULES: tuple[Rule, ...] = (
    import_rules.import_direction,
    import_rules.no_torch,
    shape_rules.module_size,
    shape_rules.function_size,
    shape_rules.parameter_count,
    shape_rules.keyword_pass_through,
    shape_rules.docstrings,
    shape_rules.exports,
    shape_rules.names,
    habit_rules.lazy_log_calls,
    habit_rules.environment,
    habit_rules.broad_excepts,
    habit_rules.module_state,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule) -> None:
    found = rule(SOURCES)
    assert not found, "\n".join([rule.__doc__ or "", *found])


def test_every_module_was_read() -> None:
    assert {s.name for s in SOURCES} >= {"oxplow", "oxplow.errors", "oxplow.serve.cli"}


def test_tracked_files_name_no_path_of_one_machine() -> None:
    found = habit_rules.machine_paths(ROOT)
    assert not found, "\n".join(found)


def test_modules_without_tensors_import_where_torch_is_absent() -> None:
    modules = [s.name for s in SOURCES if import_rules.must_not_know_torch(s)]
    assert import_without_torch(modules) == ""


def test_program_starts_without_importing_torch() -> None:
    assert import_without_torch([PACKAGE, "oxplow.serve.cli"]) == ""


def import_without_torch(modules: list[str], path: str = str(ROOT)) -> str:
    """Import `modules` in a child where torch cannot be imported; return the last error line."""
    script = (
        "import sys, importlib, json\n"
        "sys.modules['torch'] = None\n"
        f"sys.path.insert(0, {path!r})\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_public_names_are_those_of_the_golden_file() -> None:
    golden = json.loads((ROOT / "tests/golden/public_surface.json").read_text())
    assert golden["oxplow"] == oxplow.__all__, golden["header"]["command"]


@pytest.mark.parametrize("name", oxplow.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(oxplow, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = oxplow.no_such_name


def test_dir_lists_the_lazy_names() -> None:
    assert dir(oxplow) == sorted(oxplow.__all__)
