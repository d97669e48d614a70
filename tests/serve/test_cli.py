"""The program: help with examples, one JSON line with --json, exit codes, and logging set-up."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oxplow
from oxplow.config import LogConfig
from oxplow.contracts import CONTRACTS
from oxplow.errors import ConfigError
from oxplow.serve import cli

COMMANDS = sorted(
    [[c.name or ""] for c in cli.app.registered_commands]
    + [
        [group.name or "", command.name or ""]
        for group in cli.app.registered_groups
        for command in (group.typer_instance or cli.app).registered_commands
    ]
)
every_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
runner = CliRunner()


def last_json(text: str) -> dict[str, object]:
    found = json.loads(text.strip().splitlines()[-1])
    assert isinstance(found, dict)
    return found


def program(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oxplow", *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@every_command
def test_every_command_shows_help_with_an_example(command: list[str]) -> None:
    shown = runner.invoke(cli.app, [*command, "--help"])
    assert shown.exit_code == 0
    _, found, example = shown.output.partition("Example: oxplow ")
    assert found
    assert " ".join(command) in " ".join(example.split())


@every_command
def test_every_command_takes_json(command: list[str]) -> None:
    assert "--json" in runner.invoke(cli.app, [*command, "--help"], env={"COLUMNS": "200"}).output


def test_version_is_the_package_s() -> None:
    shown = runner.invoke(cli.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"oxplow {oxplow.__version__}\n")


def test_config_shows_value_and_origin_of_each_setting(tmp_path: Path) -> None:
    file = tmp_path / "o.toml"
    file.write_text("[log]\nlevel = 'debug'\n")
    args = ["--config", str(file), "--set", "compute.threads=3", "config", "--show", "--json"]
    settings = last_json(runner.invoke(cli.app, args).output)["settings"]
    assert isinstance(settings, dict)
    assert settings["log.level"] == {"value": "debug", "origin": f"file {file}"}
    assert settings["compute.threads"] == {"value": 3, "origin": "--set"}
    assert settings["cache.block_size_tokens"]["origin"] == "default"


def test_config_as_a_table_names_the_variable() -> None:
    shown = runner.invoke(cli.app, ["config", "--show"])
    assert "OXPLOW_CACHE_BLOCK_SIZE_TOKENS" in shown.output


def test_set_without_a_value_is_refused() -> None:
    failed = runner.invoke(cli.app, ["--set", "compute.threads", "config"])
    assert isinstance(failed.exception, ConfigError)
    assert "wanted KEY=VALUE" in str(failed.exception)


def test_expected_failure_is_one_sentence_and_exit_code_2() -> None:
    done = program("--set", "compute.thread=1", "config")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("oxplow: unknown setting; got compute.thread; wanted compute.")
    assert "Traceback" not in done.stderr


def test_expected_failure_with_json_ends_in_one_json_object() -> None:
    done = program("--set", "compute.thread=1", "config", "--json")
    error = last_json(done.stdout)["error"]
    assert isinstance(error, dict)
    assert (done.returncode, error["type"]) == (2, "ConfigError")


def test_explain_names_a_kernel_for_every_op() -> None:
    shown = runner.invoke(cli.app, ["--set", "compute.device=cpu", "explain", "--json"])
    assert shown.exception is None, shown.exception
    told = last_json(shown.output)
    assert told["missing"] == []
    assert (told["device"], told["dtype"]) == ("cpu", "float32")
    ops = told["ops"]
    assert isinstance(ops, dict)
    assert "rms_norm" in ops
    assert all(choice["kernel"] and choice["reason"] for choice in ops.values())


def test_explain_of_one_op_shows_only_that() -> None:
    ops = last_json(runner.invoke(cli.app, ["explain", "rms_norm", "--json"]).output)["ops"]
    assert isinstance(ops, dict)
    assert list(ops) == ["rms_norm"]


def test_explain_refuses_an_unknown_op() -> None:
    by_name = runner.invoke(cli.app, ["explain", "rms_nrom"])
    by_wish = runner.invoke(cli.app, ["--set", "kernels.rms_nrom=torch", "explain"])
    assert "unknown op; got rms_nrom; wanted " in str(by_name.exception)
    assert str(by_wish.exception) == str(by_name.exception)


def test_explain_shows_an_op_without_a_kernel_beside_the_others() -> None:
    args = ["--set", "kernels.rms_norm=gone", "explain", "--json"]
    shown = runner.invoke(cli.app, args)
    told = last_json(shown.output)
    assert (shown.exit_code, told["missing"]) == (1, ["rms_norm"])
    assert list(told["ops"]) == list(CONTRACTS)  # type: ignore[call-overload]
    ops = told["ops"]
    assert isinstance(ops, dict)
    assert ops["rms_norm"]["kernel"] is None
    assert ops["rms_norm"]["refused"]["gone"] == "no kernel of that name is registered"


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """Give the root logger and put its handlers back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_logging_writes_text_to_stderr_and_json_to_the_file(
    root_logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.jsonl"
    cli.start_logging(LogConfig(level="warning", file=str(file)), rank=3)
    logging.getLogger("oxplow.x").info("hidden")
    logging.getLogger("oxplow.x").warning("shown %d", 1)
    written = last_json(file.read_text())
    assert (written["message"], written["rank"]) == ("shown 1", 3)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "shown 1" in printed.err
    assert "hidden" not in printed.err + file.read_text()


def test_log_file_that_cannot_be_opened_stops_the_start(
    root_logger: logging.Logger, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="cannot open the log file"):
        cli.start_logging(LogConfig(file=str(tmp_path / "absent" / "x.jsonl")))
