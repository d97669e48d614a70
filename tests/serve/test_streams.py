"""Time in streams: signs of life, clients that leave, slow prompts, many at once."""

import json
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from oxplow.serve.api.service import Limits
from tests.serve.running import Running, events, options, running

QUICK = Limits(keep_alive_s=0.2)


def wait_for(condition: object, timeout_s: float = 5.0) -> bool:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


def counter(server: Running, name: str) -> float:
    """Read one number of the metrics page."""
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no {name}")


@pytest.fixture(scope="module")
def quick(model_dir: Path) -> object:
    with running(options(model_dir, limits=QUICK)) as found:
        yield found


def test_headers_come_at_once_and_comments_while_the_prompt_runs(quick: Running) -> None:
    body = {"messages": [{"role": "user", "content": "@prefill:1.2@</think>hi"}], "stream": True}
    began = time.monotonic()
    gaps, last, comments = [], began, 0
    with quick.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert time.monotonic() - began < 0.5
        for line in response.iter_lines():
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            comments += line.startswith(":")
    assert comments >= 4
    assert max(gaps) < 0.6


def test_clients_read_through_comments(quick: Running) -> None:
    client = openai.OpenAI(base_url=f"{quick.url}/v1", api_key="x", max_retries=0)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "@prefill:0.7@</think>hi"}],
        stream=True,
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "hi"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request(server: Running, stream: bool, path: str) -> None:
    script = "@slow:0.02@</think>" + "x" * 500
    body: dict[str, object] = {"stream": stream, "max_tokens": 500}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": script}]
    else:
        body["prompt"] = script
    before = counter(server, "oxplow_requests_cancelled_total")
    text = json.dumps(body)
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as line:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n\r\n"
        line.sendall((head + text).encode())
        assert wait_for(lambda: server.service.engine.num_open == 1)
        time.sleep(0.1)
    assert wait_for(lambda: server.service.engine.num_open == 0, 2.0)
    time.sleep(0.5)  # two beats
    made = server.service.engine.stats.generated_tokens
    assert server.service.engine.stats.running == 0
    time.sleep(0.5)
    assert server.service.engine.stats.generated_tokens == made
    assert wait_for(lambda: counter(server, "oxplow_requests_cancelled_total") == before + 1)


def test_sixty_streams_end_with_their_own_text(server: Running) -> None:
    found: dict[int, str] = {}

    def one(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {
                "messages": [{"role": "user", "content": f"</think>text {number} é"}],
                "stream": True,
            }
            told = events(client.post("/v1/chat/completions", json=body))
            pieces = [json.loads(t)["choices"][0]["delta"].get("content", "") for t in told[:-1]]
            found[number] = "".join(pieces)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"text {n} é" for n in range(60)}


def test_a_full_queue_answers_429_with_a_time(model_dir: Path) -> None:
    with running(options(model_dir, max_waiting=1)) as small:
        results: list[httpx.Response] = []

        def hold() -> None:
            with httpx.Client(base_url=small.url, timeout=30) as client:
                body = {"messages": [{"role": "user", "content": "@slow:0.05@</think>0123456789"}]}
                results.append(client.post("/v1/chat/completions", json=body))

        thread = threading.Thread(target=hold)
        thread.start()
        assert wait_for(lambda: small.service.engine.num_open == 1)
        time.sleep(0.1)
        for stream in (False, True):
            full = small.chat("</think>hi", stream=stream)
            assert full.status_code == 429
            assert full.json()["error"]["code"] == "queue_full"
            assert int(full.headers["retry-after"]) >= 1
        thread.join()
        assert results[0].status_code == 200


def test_a_client_that_leaves_in_its_body_is_no_fault(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (b"", b"{"):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as line:
            line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            line.sendall(b"content-length: 100\r\n\r\n" + sent)
            time.sleep(0.1)
    assert wait_for(lambda: server.service.body_bytes == 0)
    assert server.chat("</think>ok").status_code == 200
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_a_slow_body_is_given_up(model_dir: Path) -> None:
    with running(options(model_dir, limits=Limits(body_timeout_s=0.3))) as small:
        address = ("127.0.0.1", int(small.url.rpartition(":")[2]))
        with socket.create_connection(address) as line:
            line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
            line.sendall(b"content-length: 100\r\n\r\n{")
            line.settimeout(5)
            assert b"408" in line.recv(100)
