"""Sessions: a conversation's cached state outlives its server, and bad files harm nobody."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from oxplow.errors import CapacityError, ConfigError, RequestError, TransferError
from oxplow.serve import cli
from oxplow.serve.api.service import Limits
from oxplow.serve.engine_port import (
    Drain,
    EngineInfo,
    EngineStats,
    SaveSession,
    SessionDone,
    Started,
)
from oxplow.serve.engine_settings import DEFAULT_FACTORY
from oxplow.serve.link.client import EngineClient
from oxplow.serve.link.driver import Driver
from oxplow.serve.sessions import Sessions, read_session_file
from tests.oracles.fixtures import GlmBuilder
from tests.serve.model_dir import ROOT
from tests.serve.running import Running, options, running
from tests.serve.test_link import INFO, Wire, work

slow = pytest.mark.slow
FIRST = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog, " * 5}]
NAMED = {"X-Oxplow-Session": "monday"}
runner = CliRunner()


@contextmanager
def served(model: Path, folder: Path, *, apart: bool = False) -> Iterator[Running]:
    chosen = options(
        model,
        factory=DEFAULT_FACTORY,
        max_model_len=2048,
        is_inprocess=not apart,
        template_file=ROOT / "training/chat_template.jinja",
    )
    # Steps are cut by the clock; in this mode that changes no bit.
    settings = {**chosen.engine.settings, "compute.deterministic": True}
    engine = msgspec.structs.replace(chosen.engine, settings=settings)
    with running(replace(chosen, engine=engine, sessions_dir=folder)) as found:
        yield found


@pytest.fixture(scope="module")
def model(glm_oracle: GlmBuilder) -> Path:
    return Path(glm_oracle(0))


def turn(
    server: Running, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any
) -> tuple[Any, int, list[float]]:
    """Ask one turn; return the message, the tokens that were cached, and the log-probabilities."""
    body = {
        "messages": messages,
        "max_tokens": 70,
        "temperature": 0,
        "logprobs": True,
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    choice = told["choices"][0]
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["message"], cached, [r["logprob"] for r in choice["logprobs"]["content"]]


def second(message: Any) -> list[Any]:
    kept = {"role": "assistant", "content": message["content"]}
    return [*FIRST, kept, {"role": "user", "content": "And then?"}]


@slow
def test_the_next_turn_is_that_of_an_uninterrupted_server(model: Path, tmp_path: Path) -> None:
    with served(model, tmp_path) as first:
        message, cached, _ = turn(first, FIRST, NAMED)
        assert cached == 0
        done = first.client.post("/sessions/monday/save", json={}).json()
        assert done["name"] == "monday" and done["tokens"] >= 256
        expected = turn(first, second(message), NAMED)
        other = [*FIRST, {"role": "user", "content": "Something else"}]
        branched = turn(first, other)
    with served(model, tmp_path) as restarted:
        assert turn(restarted, second(message), NAMED) == expected
        assert expected[1] >= 192
        # One that leaves the saved path at the first prompt's end starts there.
        assert turn(restarted, other) == branched
        assert branched[1] >= 192
        assert 'oxplow_session_files_total{event="loaded"} 1.0' in metrics(restarted)
    with served(model, tmp_path / "empty") as cold:
        assert turn(cold, second(message), NAMED) == (expected[0], 0, expected[2])


def metrics(server: Running) -> str:
    return server.client.get("/metrics").text


@slow
def test_saved_on_one_server_loaded_on_another(model: Path, tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    with served(model, left, apart=True) as first:
        message, _, _ = turn(first, FIRST, NAMED)
        command = ["sessions", "save", "monday", "--url", first.url, "--json"]
        saved = json.loads(runner.invoke(cli.app, command).output)
        expected = turn(first, second(message), NAMED)
        shown = runner.invoke(cli.app, ["sessions", "list", "--url", first.url])
        assert re.search(r"monday\W+\d+\W+\d+\W+[\d.]+ MiB", shown.output), shown.output
    file = left / "monday.safetensors"
    assert file.stat().st_mode & 0o777 == 0o600
    assert left.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in left.iterdir()] == ["monday.safetensors"]
    with served(model, right, apart=True) as other:
        shutil.copy(file, right / "tuesday.safetensors")
        command = ["sessions", "load", "tuesday", "--url", other.url]
        shown = runner.invoke(cli.app, command)
        assert f"tuesday: {saved['tokens']} tokens loaded" in shown.output
        assert turn(other, second(message)) == expected
        command = ["sessions", "show", "tuesday", "--url", other.url, "--json"]
        facts = json.loads(runner.invoke(cli.app, command).output)["file"]
        assert facts["starts"][-1] == facts["tokens"] == saved["tokens"]
        refused = runner.invoke(cli.app, ["sessions", "load", "never", "--url", other.url])
        assert "unknown session" in str(refused.exception)


@slow
def test_bad_files_are_refused_and_harm_nobody(
    model: Path, tmp_path: Path, glm_oracle: GlmBuilder
) -> None:
    with served(model, tmp_path) as first:
        message, _, _ = turn(first, FIRST, NAMED)
        assert first.client.post("/sessions/monday/save", json={}).status_code == 200
    whole = (tmp_path / "monday.safetensors").read_bytes()
    middle = len(whole) // 2
    version = whole.replace(b'\\"version\\": 2', b'\\"version\\": 9', 1)
    assert version != whole
    bad = {
        "cut": (whole[:middle], "cannot be read"),
        "empty": (b"", "cannot be read"),
        "text": (b"not a session at all, only text", "cannot be read"),
        "flipped": (
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "damaged",
        ),
        "version": (version, "version is another"),
        "large": (whole + bytes(400 << 20), "cannot be read|larger than the caches"),
    }
    with served(model, tmp_path) as server:
        for name, (content, why) in bad.items():
            (tmp_path / f"{name}.safetensors").write_bytes(content)
            told = server.client.post(f"/sessions/{name}/load", json={})
            assert told.status_code in (409, 429), (name, told.text)
            assert re.search(why, told.json()["error"]["message"]), (name, told.text)
            # A turn of that name is computed, as if there were no file.
            assert turn(server, FIRST, {"X-Oxplow-Session": name}, reuse_prefix=False)[1] == 0
        assert {r["name"] for r in server.client.get("/sessions").json()["data"]} >= {"monday"}
        assert turn(server, second(message), NAMED)[1] >= 192
        events = re.findall(r'oxplow_session_files_total\{event="(\w+)"\} (\S+)', metrics(server))
        assert dict(events) == {"saved": "0.0", "loaded": "1.0", "refused": f"{2 * len(bad)}.0"}
    with served(Path(glm_oracle(1)), tmp_path) as foreign:
        told = foreign.client.post("/sessions/monday/load", json={})
        assert told.status_code == 409
        assert "another" in told.json()["error"]["message"]
        assert turn(foreign, FIRST, NAMED)[1] == 0


@slow
def test_a_graceful_end_saves_and_the_next_start_loads(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    template = ROOT / "training/chat_template.jinja"
    command = [
        sys.executable, "-m", "oxplow", "serve", "--model", str(model), "--port", "0", "--json",
        "--chat-template", str(template), "--sessions-dir", str(folder), "--cache-mib", "96",
        "--max-model-len", "2048", "--threads", "1", "--served-model-name", "tiny",
    ]  # fmt: skip

    def one(messages: list[Any]) -> tuple[Any, int, list[float]]:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=60) as client:
                return turn(Running(url, client, None), messages, NAMED)  # type: ignore[arg-type]
        finally:
            server.send_signal(signal.SIGTERM)
            _, log = server.communicate(timeout=60)
            assert server.returncode == 0, log
            assert "session monday: " in log and "tokens saved" in log, log

    message, cached, _ = one(FIRST)
    assert cached == 0
    assert [p.name for p in folder.iterdir()] == ["monday.safetensors"]
    saved = read_session_file(folder / "monday.safetensors")
    _, cached, _ = one(second(message))
    assert cached == max(s for s in saved.starts if s <= cached) >= 192
    assert read_session_file(folder / "monday.safetensors").tokens > saved.tokens


# Who may ask for what.


@pytest.fixture(scope="module")
def named(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("sessions")
    (folder.parent / "outside.safetensors").write_bytes(b"secret")
    limits = Limits(api_key="k")
    with running(replace(options(model_dir, limits=limits), sessions_dir=folder)) as found:
        found.client.headers["Authorization"] = "Bearer k"
        yield found


def test_without_a_folder_there_are_no_sessions(server: Running) -> None:
    for method, path in (("GET", ""), ("GET", "/x"), ("POST", "/x/save"), ("POST", "/x/load")):
        told = server.client.request(method, f"/sessions{path}", json={})
        assert told.status_code == 404 and "--sessions-dir" in told.json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "</think>hi"}]}
    told = server.client.post("/v1/chat/completions", json=body, headers=NAMED)
    assert (told.status_code, told.json()["error"]["code"]) == (400, "unsupported")


@pytest.mark.parametrize(
    "name",
    ["%2e%2e", "../outside", "..%2Foutside", "%2e%2e%2foutside", "a%00b", ".x", "x" * 65, "a b"],
)
def test_a_name_is_never_a_path(named: Running, name: str) -> None:
    for what in ("save", "load"):
        told = named.client.post(f"/sessions/{name}/{what}", json={})
        assert told.status_code in (400, 404, 405), told.text
    assert named.client.get(f"/sessions/{name}").status_code in (400, 404)
    if "%" not in name:
        body = {"messages": [{"role": "user", "content": "</think>hi"}]}
        told = named.client.post(
            "/v1/chat/completions", json=body, headers={"X-Oxplow-Session": name}
        )
        assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_value")


def test_saving_asks_for_the_key_and_for_json(named: Running) -> None:
    strange = {"Authorization": "Bearer no"}
    assert named.client.get("/sessions", headers=strange).status_code == 401
    assert named.client.post("/sessions/x/save", json={}, headers=strange).status_code == 401
    # What a foreign web page can send without asking first.
    form = {"Content-Type": "text/plain"}
    assert named.client.post("/sessions/x/save", content="{}", headers=form).status_code == 415
    assert named.client.post("/sessions/x/save").status_code == 415
    for body in (b"", b"[]", b"{"):
        kind = {"Content-Type": "application/json"}
        told = named.client.post("/sessions/x/save", content=body, headers=kind)
        assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_json")
    told = named.client.post("/sessions/x/save", json={})
    assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found")


def test_the_program_says_what_is_wrong() -> None:
    gone = runner.invoke(cli.app, ["sessions", "list", "--url", "http://127.0.0.1:9"])
    assert "no Oxplow server answers" in str(gone.exception)
    wrong = runner.invoke(cli.app, ["sessions", "list", "--url", "file:///etc/passwd"])
    assert "the address is none" in str(wrong.exception)


def test_the_key_comes_from_the_settings(named: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["sessions", "list", "--url", named.url, "--json"]
    assert "API key" in str(runner.invoke(cli.app, asked).exception)
    monkeypatch.setitem(os.environ, "OXPLOW_SERVE_API_KEY", "k")
    assert json.loads(runner.invoke(cli.app, asked).output) == {"sessions": []}


# The way of a session through the driver and its engine's end.


class SlowJob:
    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end

    def work(self) -> None:
        self._may_end.wait(30)

    def finish(self) -> SessionDone:
        return SessionDone(job_id="j", tokens=64)


class IdleCore:
    """Has nothing to do but sessions."""

    info = EngineInfo(max_model_len=9, vocab_size=9, eos_token_ids=(1,))
    has_work, predicted_s = False, 0.0

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def stats(self) -> EngineStats:
        return EngineStats()

    def session_job(self, command: SaveSession) -> SlowJob:
        if command.path == "refused":
            raise TransferError("nothing of this text is cached")
        return SlowJob(self.may_end)


def test_an_engine_that_leaves_finishes_the_file_first() -> None:
    core, told = IdleCore(), []
    driver = Driver(core, told.append)  # type: ignore[arg-type]
    save = SaveSession(job_id="j", path="x", prompt=b"", answer=b"")
    driver.put(save)
    driver.put(msgspec.structs.replace(save, job_id="k", path="refused"))
    driver.put(Drain())
    thread = threading.Thread(target=driver.run)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    core.may_end.set()
    thread.join(10)
    assert not thread.is_alive()
    done = {e.job_id: (e.tokens, e.kind) for e in told if isinstance(e, SessionDone)}
    assert done == {"j": (64, ""), "k": (0, "transfer")}


def test_an_engine_that_dies_while_it_saves_is_told(tmp_path: Path) -> None:
    async def check() -> None:
        wire = Wire()
        client = EngineClient(wire)
        sessions = Sessions(tmp_path, client)
        with pytest.raises(RequestError, match="unknown session"):
            await sessions.save("monday")
        await client.start()
        sessions.note("monday", work(), [3, 4])
        saving = asyncio.ensure_future(sessions.save("monday"))
        while not wire.sent:
            await asyncio.sleep(0)
        wire.lose("gone")
        with pytest.raises(CapacityError, match="gone"):
            await saving
        assert sessions.held() == {"monday": 4}
        # Its file is looked for again by the engine that takes the place.
        (tmp_path / "monday.safetensors").write_bytes(b"x")
        for starts in (1, 2):
            wire.tell(Started(info=INFO))
            wire.sent.clear()
            for _ in range(2):
                opening = asyncio.ensure_future(sessions.open("monday"))
                while not (wire.sent or opening.done()):
                    await asyncio.sleep(0)
                if not opening.done():
                    wire.tell(
                        SessionDone(job_id=wire.sent[0].job_id, kind="transfer", failure="no")
                    )
                await opening
            assert len(wire.sent) == 1, starts

    asyncio.run(check())


def test_the_memory_of_names_is_bounded(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path, EngineClient(Wire()))
    for number in range(300):
        sessions.note(f"s{number}", work(), [1])
    assert len(sessions.held()) == 256 and "s299" in sessions.held() and "s0" not in sessions.held()


def test_what_an_earlier_run_left_half_written_is_removed(tmp_path: Path) -> None:
    half = tmp_path / ".monday.safetensors.17.part"
    half.write_bytes(b"x")
    Sessions(tmp_path, EngineClient(Wire()))
    assert not half.exists()
    with pytest.raises(ConfigError, match="folder of sessions"):
        Sessions(Path("/dev/null/x"), EngineClient(Wire()))
