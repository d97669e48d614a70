"""Each rule is shown a violation and a clean twin: a rule that cannot fail guards nothing."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.guards import habit_rules, import_rules, shape_rules
from tests.guards.source import Source, read_package
from tests.guards.test_house import RULES, import_without_torch


class Plant(NamedTuple):
    """A violation, what the rule must say of it, and the clean way to write the same."""

    rule: Callable[[list[Source]], list[str]]
    file: str
    bad: str
    said: str
    good: str


DOC = '"""One.\nTwo.\nThree.\n"""\n'
direction = import_rules.import_direction
no_torch = import_rules.no_torch
habit, shape = habit_rules, shape_rules

PLANTS = {
    "absolute_climb": Plant(
        direction, "cache/blocks.py", "from oxplow.engine.core import x",
        "cache imports up into engine", "from oxplow.errors import x",
    ),
    "plain_climb": Plant(
        direction, "cache/blocks.py", "import oxplow.engine.core",
        "blocks.py:1: cache imports up into engine", "import oxplow.ops.table",
    ),
    "plain_climb_renamed": Plant(
        direction, "errors.py", "import oxplow.quant as q", "errors imports up into quant",
        "import json as q",
    ),
    "relative_climb": Plant(
        direction, "cache/blocks.py", "from ..model import spec", "cache imports up into model",
        "from ..ops import table",
    ),
    "relative_climb_of_a_package": Plant(
        direction, "cache/__init__.py", "from .. import model", "cache imports up into model",
        "from . import model",
    ),
    "climb_by_the_package's_name": Plant(
        direction, "ops/table.py", "from oxplow import engine", "ops imports up into engine",
        "from oxplow import contracts",
    ),
    "climb_inside_a_function": Plant(
        direction, "contracts/kda.py", "def f():\n    from oxplow.ops import table",
        "kda.py:2: contracts imports up into ops", "def f():\n    from oxplow import quant",
    ),
    "climb_by_import_module": Plant(
        direction, "ops/table.py", "import importlib\nimportlib.import_module('oxplow.serve.cli')",
        "ops imports up into serve", "import importlib\nimportlib.import_module('oxplow.errors')",
    ),
    "engine_imports_feedback": Plant(
        direction, "engine/core.py", "from oxplow.feedback.gate import x",
        "engine imports up into feedback", "from oxplow.cache.blocks import x",
    ),
    "feedback_imports_engine": Plant(
        direction, "feedback/gate.py", "from oxplow.engine.core import x",
        "feedback imports up into engine", "from oxplow.trace import x",
    ),
    "unknown_room": Plant(
        direction, "attic/things.py", "x = 1", "room 'attic' is not on the map", "",
    ),
    "torch_in_errors": Plant(no_torch, "errors.py", "import torch", "imports torch", "import json"),
    "torch_in_cache": Plant(
        no_torch, "cache/spec.py", "def f():\n    from torch import nn", "imports torch",
        "def f():\n    from math import sqrt",
    ),
    "torch_in_scheduler": Plant(
        no_torch, "engine/scheduler.py", "import torch.nn as nn", "imports torch",
        "import dataclasses as nn",
    ),
    "torch_in_trace": Plant(
        no_torch, "trace/ring.py", "import safetensors.torch", "imports safetensors.torch",
        "import time",
    ),
    "long_module": Plant(
        shape.module_size, "model/glm.py", "x = 1\n" * 401, "401 lines", "x = 1\n" * 400,
    ),
    "long_function": Plant(
        shape.function_size, "model/glm.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines",
        "def f():\n" + "    x = 1\n" * 59,
    ),
    "long_method": Plant(
        shape.function_size, "model/glm.py",
        "class A:\n    async def f(self):\n" + "        x = 1\n" * 60, "f has 61 lines",
        "class A:\n    async def f(self):\n" + "        x = 1\n" * 59,
    ),
    "long_kernel": Plant(
        shape.function_size, "ops/kernels/torch/kda.py", "def f():\n" + "    x = 1\n" * 120,
        "f has 121 lines", "def f():\n" + "    x = 1\n" * 119,
    ),
    "many_parameters": Plant(
        shape.parameter_count, "engine/core.py", "def f(a, b, c, d, e, /, f, *, g, h, i): ...",
        "f takes 9 parameters", "def f(self, a, b, c, d, e, /, f, *, g, h): ...",
    ),
    "starred_parameters_count": Plant(
        shape.parameter_count, "engine/core.py", "def f(a, b, c, d, e, f, g, *h, **i): ...",
        "f takes 9 parameters", "def f(a, b, c, d, e, f, *h, **i): ...",
    ),
    "kwargs_forwarded": Plant(
        shape.keyword_pass_through, "serve/api.py", "def f(**kw):\n    return g(1, **kw)",
        "f forwards **kw", "def f(**kw):\n    return sorted(kw)",
    ),
    "no_module_docstring": Plant(
        shape.docstrings, "model/glm.py", "x = 1", "the module has no docstring", DOC,
    ),
    "one_line_module_docstring": Plant(
        shape.docstrings, "model/glm.py", '"""Hello."""', "fewer than three lines", DOC,
    ),
    "no_function_docstring": Plant(
        shape.docstrings, "model/glm.py", DOC + "def run(): ...", "run is public",
        DOC + "def _run(): ...",
    ),
    "no_method_docstring": Plant(
        shape.docstrings, "model/glm.py", DOC + 'class A:\n    """A."""\n    def run(self): ...',
        "A.run is public", DOC + 'class A:\n    """A."""\n    def _run(self): ...',
    ),
    "unsorted_all": Plant(
        shape.exports, "model/glm.py", "b = a = 1\n__all__ = ['b', 'a']", "is not sorted",
        "b = a = 1\n__all__ = ['a', 'b']",
    ),
    "class_before_constant_in_all": Plant(
        shape.exports, "model/glm.py", "A1 = Aa = b = 1\n__all__ = ['Aa', 'A1', 'b']", "not sorted",
        "A1 = Aa = b = 1\n__all__ = ['A1', 'Aa', 'b']",
    ),
    "repeated_all": Plant(
        shape.exports, "model/glm.py", "a = 1\n__all__ = ['a', 'a']", "repeats a name",
        "a = 1\n__all__ = ['a']",
    ),
    "absent_name_in_all": Plant(
        shape.exports, "model/glm.py", "__all__ = ['gone']", "names gone, which is not there",
        "import gone\n__all__ = ['gone']",
    ),
    "computed_all": Plant(
        shape.exports, "model/glm.py", "__all__ = sorted(globals())", "is not sorted",
        "__all__: list[str] = []",
    ),
    "grab_bag_module": Plant(
        shape.names, "model/utils.py", "x = 1", "not utils", "",
    ),
    "base_class": Plant(
        shape.names, "model/glm.py", "class BaseModel: ...", "BaseModel is not named by its role",
        "class Model: ...",
    ),
    "impl_class": Plant(
        shape.names, "model/glm.py", "class MixerImpl: ...", "MixerImpl is not named by its role",
        "class Mixer: ...",
    ),
    "f_string_in_log_call": Plant(
        habit.lazy_log_calls, "engine/core.py", "logger.info(f'step {n}')", "built eagerly",
        "logger.info('step %d', n)",
    ),
    "percent_in_log_call": Plant(
        habit.lazy_log_calls, "engine/core.py", "self._log.debug('step %d' % n)", "built eagerly",
        "self._log.debug('step %d', n)",
    ),
    "format_in_log_call": Plant(
        habit.lazy_log_calls, "engine/core.py",
        "logging.getLogger('x').log(10, 'step {}'.format(n))", "built eagerly",
        "logging.getLogger('x').log(10, 'step %d', n)",
    ),
    "environ_read": Plant(
        habit.environment, "ops/table.py", "import os\nx = os.environ['A']", "table.py:2",
        "import os\nx = os.getcwd()",
    ),
    "getenv_imported": Plant(
        habit.environment, "ops/table.py", "from os import getenv", "table.py:1",
        "from os import getcwd",
    ),
    "broad_except": Plant(
        habit.broad_excepts, "engine/core.py", "try:\n    f()\nexcept Exception:\n    pass",
        "a broad except of Exception", "try:\n    f()\nexcept ValueError:\n    pass",
    ),
    "bare_except": Plant(
        habit.broad_excepts, "engine/core.py", "try:\n    f()\nexcept:\n    pass",
        "a broad except of everything", "try:\n    f()\nexcept (OSError, ValueError):\n    pass",
    ),
    "broad_except_in_a_tuple": Plant(
        habit.broad_excepts, "engine/core.py",
        "try:\n    f()\nexcept (ValueError, BaseException):\n    pass",
        "a broad except of BaseException", "try:\n    f()\nexcept (ValueError,):\n    pass",
    ),
    "global_state": Plant(
        habit.module_state, "engine/core.py", "def f():\n    global x\n    x = 1", "global x",
        "def f():\n    x = 1",
    ),
}  # fmt: skip


def read_planted(root: Path, files: dict[str, str]) -> list[Source]:
    """Write `files` as a package below `root` and read it as the guards do."""
    for name, text in files.items():
        path = root / "oxplow" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n" if not text.endswith("\n") else text)
    return read_package(root)


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_rule_reports_the_planted_violation(plant: Plant, tmp_path: Path) -> None:
    found = plant.rule(read_planted(tmp_path, {plant.file: plant.bad}))
    assert len(found) == 1, found
    assert plant.said in found[0]


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_rule_accepts_the_clean_twin(plant: Plant, tmp_path: Path) -> None:
    file = "model/glm.py" if not plant.good else plant.file
    assert plant.rule(read_planted(tmp_path, {file: plant.good})) == []


def test_every_rule_has_a_plant() -> None:
    assert {plant.rule for plant in PLANTS.values()} == set(RULES)


def test_rooms_that_import_each_other_are_reported_once(tmp_path: Path) -> None:
    found = import_rules.import_direction(
        read_planted(
            tmp_path,
            {"quant.py": "import oxplow.contracts", "contracts/kda.py": "import oxplow.quant"},
        )
    )
    assert found == ["rooms import each other: contracts -> quant -> contracts"]


def test_broad_except_is_allowed_where_it_is_named(tmp_path: Path) -> None:
    broad = "try:\n    f()\nexcept Exception:\n    raise"
    assert habit_rules.broad_excepts(read_planted(tmp_path, {"serve/api/app.py": broad})) == []


def test_environment_may_be_read_in_config(tmp_path: Path) -> None:
    reading = "import os\nx = os.environ"
    assert habit_rules.environment(read_planted(tmp_path, {"config/load.py": reading})) == []


def test_path_of_one_machine_is_reported_in_any_text_file(tmp_path: Path) -> None:
    here = "/".join(["", "home", "ada", "oxplow"])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/note.md").write_text(f"see {here}/README.md\nhttps://host{here}/x\n")
    (tmp_path / "picture.png").write_text(here)
    found = habit_rules.machine_paths(tmp_path)
    assert [line.split(": ")[0] for line in found] == ["docs/note.md:1"]


def test_module_that_imports_torch_fails_where_torch_is_absent(tmp_path: Path) -> None:
    read_planted(tmp_path, {"__init__.py": "", "errors.py": "import torch"})
    assert "torch" in import_without_torch(["oxplow.errors"], str(tmp_path))


def test_torch_behind_another_module_is_found_by_the_import_itself(tmp_path: Path) -> None:
    files = {"__init__.py": "", "errors.py": "import oxplow.quant", "quant.py": "import torch"}
    assert import_rules.no_torch(read_planted(tmp_path, files)) == []
    assert "torch" in import_without_torch(["oxplow.errors"], str(tmp_path))


def test_docstring_counts_lines_with_text_only(tmp_path: Path) -> None:
    thin = textwrap.dedent('''
        """One.


        Two.
        """
    ''')
    found = shape_rules.docstrings(read_planted(tmp_path, {"model/glm.py": thin}))
    assert len(found) == 1
