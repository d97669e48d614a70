"""Front, engine and workers as processes: crashes, restarts, shutdown, and what stays behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from oxplow.serve.api.service import Limits
from tests.serve.model_dir import ROOT
from tests.serve.running import SCRIPTED_MAIN, Running, events, options, running
from tests.serve.test_streams import wait_for


@pytest.fixture(scope="module")
def apart(model_dir: Path) -> Iterator[Running]:
    with running(options(model_dir, is_inprocess=False)) as found:
        yield found


def test_answers_are_the_same_as_in_one_process(apart: Running, server: Running) -> None:
    def told(where: Running) -> object:
        return where.chat("why</think>Hello").json()["choices"]

    assert told(apart) == told(server)
    assert events(apart.chat("</think>hi", stream=True))[-1] == "[DONE]"
    assert apart.chat("hi", temperature=-1).status_code == 400


def test_a_slow_neighbour_delays_nobody_s_health(apart: Running) -> None:
    def long() -> None:
        other = httpx.Client(base_url=apart.url, timeout=30)
        other.post("/tokenize", json={"prompt": "word " * 400_000})

    thread = threading.Thread(target=long)
    thread.start()
    worst = 0.0
    while thread.is_alive():
        began = time.monotonic()
        assert apart.client.get("/health").status_code == 200
        worst = max(worst, time.monotonic() - began)
    thread.join()
    assert worst < 2.0


def test_a_worker_that_dies_costs_one_retry(apart: Running) -> None:
    for executor in (lane.executor for lane in apart.service.workers._lanes.values()):
        for process in list(executor._processes.values()):  # type: ignore[attr-defined]
            os.kill(process.pid, signal.SIGKILL)
    assert apart.chat("</think>still here").status_code == 200


def test_a_dead_engine_is_told_and_replaced(apart: Running) -> None:
    assert apart.client.get("/ready").status_code == 200
    before = apart.service.engine.stats
    told = events(apart.chat("@slow:0.1@</think>half@die@", stream=True))
    assert told[-1] == "[DONE]"
    assert json.loads(told[-2])["error"]["code"] == "unavailable"
    assert apart.client.get("/health").json() == {"status": "ok", "engine": "restarting"}
    not_ready = apart.client.get("/ready")
    assert not_ready.status_code == 503 and "restarting" in not_ready.json()["reason"]
    refused = apart.chat("</think>hi")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert wait_for(lambda: apart.client.get("/ready").status_code == 200, 20)
    assert apart.chat("</think>again").json()["choices"][0]["message"]["content"] == "again"
    plain = apart.chat("@slow:0.1@</think>half@die@")
    assert plain.status_code == 503
    assert wait_for(lambda: apart.client.get("/ready").status_code == 200, 20)
    assert apart.service.engine.stats.prompt_tokens >= before.prompt_tokens
    assert "oxplow_engine_restarts_total 2.0" in apart.client.get("/metrics").text


def start_program(model_dir: Path, grace_s: int) -> tuple[subprocess.Popen[str], str]:
    """Start the real program with a scripted engine and return it with its address."""
    args = ["serve", "--model", str(model_dir), "--port", "0", "--grace-s", str(grace_s), "--json"]
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPTED_MAIN, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.stderr.read() if program.stderr else ""
    told = json.loads(line)
    assert 0.1 < told["first_answer_s"] < 60
    return program, told["url"]


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listed.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("grace_s", [0, 5])
def test_a_signal_lets_answers_end_and_leaves_nothing(model_dir: Path, grace_s: int) -> None:
    program, url = start_program(model_dir, grace_s)
    children = children_of(program.pid)
    found: dict[str, list[str]] = {}

    def ask(name: str, script: str) -> None:
        body = {"messages": [{"role": "user", "content": script}], "stream": True}
        with httpx.Client(base_url=url, timeout=60) as client:
            found[name] = events(client.post("/v1/chat/completions", json=body))

    asked = {"short": "@slow:0.05@</think>0123456789", "long": "@slow:0.05@</think>" + "x" * 2000}
    threads = [threading.Thread(target=ask, args=pair) for pair in asked.items()]
    for thread in threads:
        thread.start()
    time.sleep(0.6)
    program.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    if grace_s:
        assert httpx.get(f"{url}/ready").status_code == 503
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 503
    began = time.monotonic()
    assert program.wait(grace_s + 20) == 0
    assert time.monotonic() - began < grace_s + 8
    for thread in threads:
        thread.join()
    assert found["long"][-1] == "[DONE]"
    assert "shutting down" in found["long"][-2]
    if grace_s:
        assert json.loads(found["short"][-2])["choices"][0]["finish_reason"] == "stop"
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


@pytest.mark.slow
def test_a_second_signal_hurries(model_dir: Path) -> None:
    program, url = start_program(model_dir, 60)
    body = {"messages": [{"role": "user", "content": "@slow:0.05@" + "x" * 2000}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        program.send_signal(signal.SIGINT)
        time.sleep(0.3)
        program.send_signal(signal.SIGINT)
        assert "[DONE]" in "".join(lines)
    assert program.wait(20) == 0
    assert program.stderr is not None
    said = program.stderr.read()
    assert "1 request may finish within 60 s; a second Ctrl-C ends them now" in said


@pytest.mark.slow
def test_a_signal_while_loading_ends_it_at_once(model_dir: Path) -> None:
    args = [sys.executable, "-m", "oxplow", "serve", "--model", str(model_dir), "--port", "0"]
    program = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert wait_for(lambda: len(children_of(program.pid)) >= 2, 20)
    children = children_of(program.pid)
    program.send_signal(signal.SIGTERM)
    assert program.wait(5) == 0
    assert wait_for(lambda: not any(_lives(pid) for pid in children))


@pytest.mark.slow
def test_the_workers_and_the_engine_follow_a_front_that_was_killed(model_dir: Path) -> None:
    program, _ = start_program(model_dir, 5)
    children = children_of(program.pid)
    assert len(children) >= 3
    program.kill()
    program.wait(10)
    assert wait_for(lambda: not any(_lives(pid) for pid in children), 10)


def _lives(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("when", ["folder", "port", "host"])
def test_a_start_that_cannot_work_says_why(model_dir: Path, tmp_path: Path, when: str) -> None:
    import socket

    args = ["serve", "--model", str(model_dir), "--port", "0"]
    taken = socket.create_server(("127.0.0.1", 0))
    if when == "folder":
        args[2] = str(tmp_path)
    elif when == "port":
        args[4] = str(taken.getsockname()[1])
    else:
        args += ["--host", "0.0.0.0"]
    done = subprocess.run(
        [sys.executable, "-m", "oxplow", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    taken.close()
    assert done.returncode == 2
    wanted = {"folder": "no config.json", "port": "--port", "host": "--api-key"}[when]
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


def test_limits_are_those_of_the_settings() -> None:
    from oxplow.config import load_config
    from oxplow.serve.commands.serve import serve_options

    given = {"serve.model": "x", "serve.names": "a, b", "limits.max_body_mib": 2, "serve.port": 1}
    chosen = serve_options(load_config(None, given, {}))
    assert chosen.names == ("a", "b")
    assert chosen.port == 1
    assert chosen.limits == Limits(max_body_bytes=2 << 20)
