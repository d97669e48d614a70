"""The documents say what is there: modules, paths, links, commands and targets."""

import re
from pathlib import Path

import pytest

from oxplow.serve import cli
from tests.guards.source import ROOT
from tools.structure_map import module_map, with_map

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = {command.name for command in cli.app.registered_commands} | {
    group.name for group in cli.app.registered_groups
}


def missing_paths(text: str, root: Path) -> list[str]:
    """Return the paths in backticks that look like ours and are not there."""
    named = re.findall(r"`((?:oxplow|tests|tools|docs|benchmarks|\.ci)/[\w./-]*)`", text)
    return [name for name in named if not (root / name).exists()]


def broken_links(text: str, folder: Path) -> list[str]:
    """Return relative links whose target is not there."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    return [target for target in targets if not (folder / target).exists()]


def unknown_commands(text: str, targets: set[str], commands: set[str | None]) -> list[str]:
    """Return `make ...` and `oxplow ...` in code whose target or command does not exist."""
    code = [
        *re.findall(r"`([^`\n]+)`", text),
        *re.findall(r"^(?:\$ )?(\w.*)$", _fenced(text), re.M),
    ]
    found = []
    for line in code:
        words = [w for w in line.split() if not w.startswith("-")]
        known = {"make": targets, "oxplow": commands}.get(words[0] if words else "")
        if known is None or len(words) < 2:
            continue
        if words[0] == "oxplow" and "--set" in line.split():
            words = [w for w in words if "=" not in w]
        if words[1] not in known:
            found.append(line)
    return found


def _fenced(text: str) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def test_map_of_modules_is_what_the_modules_say() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    assert page == with_map(page, module_map(ROOT)), "run `make structure`"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_paths_links_and_commands_of_the_page_exist(page: Path) -> None:
    text = page.read_text()
    assert missing_paths(text, ROOT) == []
    assert broken_links(text, page.parent) == []
    assert unknown_commands(text, TARGETS, COMMANDS) == []


def test_every_decision_is_in_the_index_and_numbered_once() -> None:
    folder = ROOT / "docs/decisions"
    files = sorted(p.name for p in folder.glob("[0-9]*.md"))
    indexed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert indexed == files
    assert len({name[:4] for name in files}) == len(files)


def test_agents_page_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 80


# --- each check is shown a fault ----------------------------------------------------------------


def test_map_lists_each_module_with_its_first_sentence(tmp_path: Path) -> None:
    (tmp_path / "oxplow/cache").mkdir(parents=True)
    (tmp_path / "oxplow/errors.py").write_text('"""The tree.\n\nMore.\n"""\n')
    (tmp_path / "oxplow/cache/__init__.py").write_text('"""Where memory | lives."""\n')
    (tmp_path / "oxplow/cache/spec.py").write_text("x = 1\n")
    assert module_map(tmp_path).splitlines()[2:] == [
        "| `oxplow/errors.py` | The tree. |",
        "| `oxplow/cache/` | Where memory \\| lives. |",
        "| `oxplow/cache/spec.py` | (no docstring) |",
    ]


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the line"):
        with_map("# Structure\n", "")


def test_absent_path_link_and_command_are_reported(tmp_path: Path) -> None:
    assert missing_paths("see `oxplow/gone.py` and `make x`", tmp_path) == ["oxplow/gone.py"]
    assert broken_links("[a](gone.md) [b](https://x/y) [c](#d)", tmp_path) == ["gone.md"]
    text = "`make gone` `oxplow gone` `make`\n```\n$ make test ARGS=1\noxplow --json nope\n```\n"
    unknown = unknown_commands(text, {"test"}, {"config"})
    assert unknown == ["make gone", "oxplow gone", "oxplow --json nope"]
    assert unknown_commands("`oxplow --set a=b config`", set(), {"config"}) == []
