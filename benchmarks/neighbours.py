"""What a very long prompt or a large picture costs the requests beside it.

Starts a server of its own, sends one heavy request and, until that is answered, short streamed ones
one after the other. Prints one JSON line: time to first token and between tokens of the neighbours,
alone and beside the heavy request, readiness, and how long the heavy request took.

    python -m benchmarks.neighbours --model DIR --tokens 200000
    python -m benchmarks.neighbours --picture 2000 [--leave-after 5]
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import statistics
import subprocess
import sys
import threading
import time

import httpx

SHORT = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": 16, "ignore_eos": True, "temperature": 0}


class Neighbour:
    """Streams short requests and keeps their times."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600)
        self.first: list[float] = []
        self.between: list[float] = []

    def ask(self) -> None:
        """Stream one answer."""
        began = last = time.monotonic()
        body = {**SHORT, "prompt": random.choices(range(5, 200), k=32), "stream": True}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                (self.first if last == began else self.between).append(now - last)
                last = now

    def figures(self) -> dict[str, float | int]:
        """Return medians and the ends of the distributions, in seconds."""
        found: dict[str, float | int] = {"requests": len(self.first)}
        for name, times in (("ttft", self.first), ("itl", self.between)):
            ordered = sorted(times)
            found[f"{name}_median_s"] = round(statistics.median(ordered), 4)
            found[f"{name}_p95_s"] = round(ordered[int(0.95 * (len(ordered) - 1))], 4)
            found[f"{name}_max_s"] = round(ordered[-1], 4)
        return found


def main() -> None:
    """Run one scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--picture", type=int, default=0)
    parser.add_argument("--leave-after", type=float)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "oxplow", "serve", "--port", "0", "--json"]
    command += ["--threads", str(asked.threads)]
    if asked.tokens:
        command += ["--max-model-len", str(asked.tokens + 64)]
    if asked.model:
        command += ["--model", asked.model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            sys.stdout.write(json.dumps(measure(url, asked)) + "\n")
        finally:
            server.terminate()


def measure(url: str, asked: argparse.Namespace) -> dict[str, object]:
    """Return the figures of neighbours alone and beside the heavy request."""
    record: dict[str, object] = {"command": " ".join(["benchmarks.neighbours", *sys.argv[1:]])}
    alone, beside = Neighbour(url), Neighbour(url)
    for _ in range(5):
        alone.ask()
    record["alone"] = alone.figures()
    heavy: dict[str, object] = {}
    thread = threading.Thread(target=lambda: heavy.update(ask_heavy(url, asked)))
    ready = Readiness(url)
    thread.start()
    while thread.is_alive():
        beside.ask()
        ready.look()
    record |= {"beside": beside.figures(), "heavy": heavy, "ready": ready.seen}
    return record


class Readiness:
    """Counts what `/ready` said, and how long `/health` took at worst."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self.seen: dict[str, float] = {"green": 0, "red": 0, "health_max_s": 0.0}

    def look(self) -> None:
        """Ask once."""
        began = time.monotonic()
        self._client.get("/health")
        took = round(time.monotonic() - began, 4)
        self.seen["health_max_s"] = max(self.seen["health_max_s"], took)
        is_green = self._client.get("/ready").status_code == 200
        self.seen["green" if is_green else "red"] += 1


def ask_heavy(url: str, asked: argparse.Namespace) -> dict[str, object]:
    """Send the heavy request; return its time and counts."""
    began = time.monotonic()
    if asked.tokens:
        ids = random.Random(0).choices(range(5, 250), k=asked.tokens)
        body: dict[str, object] = {"prompt": ids, "max_tokens": 4, "temperature": 0}
        path = "/v1/completions"
    else:
        part = {"type": "image_url", "image_url": {"url": picture(asked.picture)}}
        content = [part, {"type": "text", "text": "What is this?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        path = "/v1/chat/completions"
    try:
        answer = httpx.post(url + path, json=body, timeout=asked.leave_after or 7200)
    except httpx.TimeoutException:
        return {"left_after_s": asked.leave_after}
    usage = answer.json().get("usage") or answer.json()
    return {"status": answer.status_code, "seconds": time.monotonic() - began, "usage": usage}


def picture(side: int) -> str:
    """Return a square picture of noise as a data URL."""
    from PIL import Image

    noise = Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3))
    buffer = io.BytesIO()
    noise.resize((side, side)).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main()
