"""A trace served by a running server: one connection a request, tokens stamped as they come.

Owns the HTTP side of a load. Knows the completions API and no engine. Invariant: a request that
fails is an answer with its reason, never an exception; every wait ends.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from urllib.parse import urlsplit

from oxplow.errors import ConfigError
from oxplow.feedback.load import Arrival, Felt, Trace

__all__ = ["serve_url"]

_TIMEOUT_S = 300.0
_MOST_TOKEN = 200  # ids of plain bytes in every vocabulary that we serve


def serve_url(url: str, model: str, trace: Trace, seed: int) -> list[Felt]:
    """Send a trace to `url`/v1/completions as it arrives. Raises ConfigError for a strange URL."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError("a server is named by a plain URL", got=url, wanted="http://HOST:PORT")
    felt: list[Felt | None] = [None] * len(trace)
    began = time.perf_counter()
    place = (parts.hostname, parts.port or 80)

    def one(number: int, arrival: Arrival) -> None:
        time.sleep(max(0.0, arrival.at_s - (time.perf_counter() - began)))
        felt[number] = _ask(place, model, arrival, _prompt(arrival, number, seed), began)

    threads = [
        threading.Thread(target=one, args=(n, a), daemon=True, name=f"load-{n}")
        for n, a in enumerate(trace)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [f if f is not None else _lost(a, "no answer") for f, a in zip(felt, trace, strict=True)]


def _prompt(arrival: Arrival, number: int, seed: int) -> list[int]:
    head, tail = random.Random(f"{seed}/{arrival.group}"), random.Random(f"{seed}#{number}")
    shared = min(arrival.shared_tokens, arrival.prompt_tokens)
    start = [head.randrange(_MOST_TOKEN) for _ in range(shared)]
    rest = arrival.prompt_tokens - shared
    return start + [tail.randrange(_MOST_TOKEN) for _ in range(rest)]


def _ask(
    place: tuple[str, int], model: str, arrival: Arrival, prompt: list[int], began: float
) -> Felt:
    body = {
        "model": model, "prompt": prompt, "max_tokens": arrival.new_tokens, "temperature": 0,
        "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    tokens: list[float] = []
    cached = 0
    connection = http.client.HTTPConnection(*place, timeout=_TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            return _lost(arrival, f"status {answer.status}: {answer.read(300)!r}")
        for raw in answer:
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            chunk = json.loads(line[5:])
            if chunk.get("choices"):
                tokens.append(time.perf_counter() - began)
            details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = int(details.get("cached_tokens") or cached)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _lost(arrival, f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    return Felt(
        due_s=arrival.at_s, scheduled_s=None, tokens_s=tuple(tokens),
        prompt_tokens=arrival.prompt_tokens, cached_tokens=cached,
        failure="" if tokens else "the answer holds no token",
    )  # fmt: skip


def _lost(arrival: Arrival, why: str) -> Felt:
    return Felt(
        due_s=arrival.at_s, scheduled_s=None, tokens_s=(), prompt_tokens=arrival.prompt_tokens,
        failure=why,
    )  # fmt: skip
