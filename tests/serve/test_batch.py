"""`oxplow batch`: files in and out, what goes on after an end, progress, and what is retried."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxplow.errors import CapacityError, ConfigError, OxplowError, RequestError
from oxplow.serve import cli
from oxplow.serve.batch import BatchItem, BatchReport, read_answers, read_items, run_batch
from tests.serve.running import SCRIPTED_MAIN, hear_interrupts
from tests.serve.test_streams import wait_for

LINES = [
    {"messages": [{"role": "user", "content": "</think>one"}]},
    {
        "custom_id": "mine",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "two", "max_tokens": 9},
    },
    {"prompt": "three", "n": 0},
]


@pytest.mark.usefixtures("scripted")
def test_a_batch_goes_on_where_it_stopped(model_dir: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    args = ["batch", str(source), str(output), "--model", str(model_dir), "--json"]

    def run() -> Any:
        done = CliRunner().invoke(cli.app, args)
        return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])

    code, told = run()
    assert code == 1
    assert (told["asked"], told["skipped"], told["failed"]) == (3, 0, 1)
    answers = {a["custom_id"]: a for a in map(json.loads, output.read_text().splitlines())}
    chat = answers["line-1"]["response"]["body"]
    assert chat["choices"][0]["message"]["content"] == "one"
    assert answers["mine"]["response"]["body"]["choices"][0]["text"] == "two"
    assert answers["line-3"]["error"]["code"] == "invalid_value"
    # Interrupted in the middle of the last line: that line, and no other, is asked again.
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    code, told = run()
    assert (told["asked"], told["skipped"]) == (1, 2)
    assert read_answers(output) == {"line-1": False, "mine": False, "line-3": True}


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"url": "/v1/nope", "body": {}}', '{"body": 1}', None]
)
def test_a_wrong_batch_line_is_named(tmp_path: Path, line: str | None) -> None:
    path = tmp_path / "in.jsonl"
    if line is not None:
        path.write_text('{"prompt": "ok"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_items(path)
    assert line is None or str(caught.value.where).endswith(":2")


def test_names_of_a_batch_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a", "prompt": "x"}\n' * 2)
    with pytest.raises(ConfigError, match="unique"):
        read_items(path)


class Examinee:
    """Answers a batch as its lines spell out."""

    def __init__(self) -> None:
        self.is_alive, self.asked, self.is_mended = True, [], False

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(body["prompt"])
        word = body["prompt"]
        if not self.is_alive:
            raise OxplowError("there is no engine")
        if word == "wait":
            await asyncio.sleep(3600)
        if word == "full" and self.asked.count("full") < 3:
            raise CapacityError("the queue is full")
        if word == "wrong" and not self.is_mended:
            raise RequestError("no", code="invalid_value")
        if word == "fault" and not self.is_mended:
            raise OxplowError("the numbers were not finite")
        if word == "die":
            self.is_alive = False
            raise OxplowError("the engine thread ended")
        return {"usage": {"completion_tokens": 2}, "text": word}


def ask(
    words: list[str], output: Path, examinee: Examinee, **more: Any
) -> tuple[BatchReport, dict[str, bool]]:
    report = BatchReport()
    items = [BatchItem(w, "completions", {"prompt": w}) for w in words]
    asyncio.run(run_batch(items, output, examinee, report, concurrency=2, **more))
    return report, read_answers(output)


def test_failures_are_kept_told_and_asked_again_when_asked_for(tmp_path: Path) -> None:
    output, examinee = tmp_path / "out.jsonl", Examinee()
    words = ["a", "wrong", "fault", "b"]
    report, names = ask(words, output, examinee)
    assert (report.asked, report.failed, report.completion_tokens) == (4, 2, 4)
    assert names == {"a": False, "wrong": True, "fault": True, "b": False}
    errors = [json.loads(line)["error"] for line in output.read_text().splitlines()]
    assert {"code": "invalid_value", "message": "no"} in errors
    examinee.is_mended = True
    report, names = ask(words, output, examinee)
    assert (report.asked, report.skipped, report.failed_before) == (0, 4, 2)
    report, names = ask(words, output, examinee, retries_failed=True)
    assert (report.asked, report.skipped, report.failed, report.failed_before) == (2, 2, 0, 0)
    assert names == dict.fromkeys(words, False)
    assert len(output.read_text().splitlines()) == 4


def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("oxplow.serve.batch.asyncio.sleep", lambda _: sleep(0))
    report, names = ask(["full"], tmp_path / "out.jsonl", Examinee())
    assert (report.failed, names) == (0, {"full": False})


def test_a_dead_engine_ends_the_batch_and_fails_no_line(tmp_path: Path) -> None:
    output, examinee = tmp_path / "out.jsonl", Examinee()
    with pytest.raises(OxplowError, match="engine has stopped"):
        ask(["a", "b", "die", "wait", "c", "d"], output, examinee)
    assert read_answers(output) == {"a": False, "b": False}


def test_an_output_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for text in ("notes\n", '{"custom_id": "a"}\n', "[1]\n"):
        output.write_text(text)
        with pytest.raises(ConfigError, match="not ours"):
            read_answers(output, drop_failed=True)
        assert output.read_text() == text


@pytest.mark.usefixtures("scripted")
def test_what_failed_is_told_with_the_way_on(model_dir: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x", "n": 0}\n{"prompt": "y"}\n')
    args = ["batch", str(source), str(output), "--model", str(model_dir)]
    for _ in range(2):  # also where the failure is of an earlier run
        done = CliRunner().invoke(cli.app, args)
        assert done.exit_code == 1
        assert "1 of 2 lines failed" in done.stderr
        assert "--retry-failed" in done.stderr
    same = CliRunner().invoke(cli.app, ["batch", str(source), str(source)])
    assert "one file" in str(same.exception)


def test_without_a_terminal_progress_comes_in_lines_and_an_interrupt_says_how_to_go_on(
    model_dir: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"@slow:0.05@{'x' * 12}"} for _ in range(60)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = ["batch", str(source), str(output), "--model", str(model_dir)]
    more = ["--concurrency", "1", "--progress-s", "1", "--json"]
    run = subprocess.Popen(
        [sys.executable, "-c", SCRIPTED_MAIN, *args, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=hear_interrupts,
    )
    assert wait_for(lambda: output.exists() and output.read_text().count("\n") >= 2, 60)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 130, stderr
    assert "Traceback" not in stderr
    told = json.loads(stdout.splitlines()[-1])
    written = read_answers(output)
    assert told["interrupted"] is True and told["asked"] == len(written) >= 2
    assert f"interrupted: {len(written)} of 60 lines are in {output}" in stderr
    assert "the same command again" in stderr
    assert "batch: " in stderr and " of 60 lines, 0 failed, " in stderr and " left" in stderr
