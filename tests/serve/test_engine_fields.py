"""Each sampling field against the real engine on a tiny random model, seen from HTTP."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from oxplow.serve.engine_settings import DEFAULT_FACTORY
from tests.oracles.fixtures import GlmBuilder
from tests.serve.model_dir import ROOT
from tests.serve.running import Running, options, running

pytestmark = pytest.mark.slow
PROMPT = "The quick brown fox jumps over the lazy dog, " * 3


@pytest.fixture(scope="module")
def engine(glm_oracle: GlmBuilder) -> Iterator[Running]:
    chosen = options(
        glm_oracle(0),
        factory=DEFAULT_FACTORY,
        max_model_len=2048,
        template_file=ROOT / "training/chat_template.jinja",
    )
    with running(chosen) as found:
        yield found


def ids(engine: Running, **fields: Any) -> list[int]:
    """Complete the prompt and return the answer's tokens, which its log-probabilities name."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    response = engine.client.post("/v1/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return [round(v, 4) for v in choice["logprobs"]["token_logprobs"]]


def text(engine: Running, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = engine.client.post("/v1/completions", json={**body, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_greedy_answers_repeat_and_narrow_sampling_is_greedy(engine: Running) -> None:
    greedy = ids(engine)
    assert ids(engine) == greedy
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"top_p": 0}, {"min_p": 1}):
        assert ids(engine, temperature=2, **narrow) == greedy
    assert ids(engine, temperature=2, seed=1) != greedy


def test_a_seed_fixes_the_draw(engine: Running) -> None:
    assert ids(engine, temperature=1, seed=7) == ids(engine, temperature=1, seed=7)
    assert ids(engine, temperature=1, seed=7) != ids(engine, temperature=1, seed=8)
    assert ids(engine, temperature=1) != ids(engine, temperature=1)


def test_seeded_choices_differ_from_each_other_and_repeat(engine: Running) -> None:
    def texts() -> list[str]:
        return [c["text"] for c in text(engine, temperature=1, seed=7, n=3)["choices"]]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    same = text(engine, n=2)["choices"]
    assert same[0]["text"] == same[1]["text"]


@pytest.mark.parametrize(
    ("fields", "pull"),
    [({"repetition_penalty": 50}, 0), ({"presence_penalty": 2}, 3), ({"frequency_penalty": 2}, 3)],
)
def test_penalties_change_what_repeats(
    engine: Running, fields: dict[str, float], pull: float
) -> None:
    bias = {"64": pull, "65": pull}  # makes two tokens come again and again
    assert ids(engine, logit_bias=bias, **fields) != ids(engine, logit_bias=bias)


def test_a_bias_decides(engine: Running) -> None:
    assert text(engine, logit_bias={"64": 100})["choices"][0]["text"] == "a" * 12


def test_end_tokens_end_unless_ignored_or_forbidden(engine: Running) -> None:
    end = {"256": 100}
    assert text(engine, logit_bias=end, ignore_eos=False)["usage"]["completion_tokens"] == 1
    assert text(engine, logit_bias=end)["usage"]["completion_tokens"] == 12
    late = text(engine, logit_bias=end, ignore_eos=False, min_tokens=5)
    assert late["usage"]["completion_tokens"] == 6
    assert late["choices"][0]["finish_reason"] == "stop"


def test_stop_tokens_and_texts_stop(engine: Running) -> None:
    bias = {"64": 100}
    stopped = text(engine, logit_bias=bias, stop_token_ids=[64])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] == 1
    stopped = text(engine, logit_bias=bias, stop="aaa")
    assert (stopped["choices"][0]["text"], stopped["usage"]["completion_tokens"]) == ("", 3)


def test_budgets_bound_the_answer(engine: Running) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        told = text(engine, **{"max_tokens": None, name: 7})
        assert told["usage"]["completion_tokens"] == 7
        assert told["choices"][0]["finish_reason"] == "length"


def test_log_probabilities_are_the_model_s(engine: Running) -> None:
    (choice,) = text(engine, echo=True, logprobs=3, max_tokens=2)["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None
    assert all(v < 0 for v in found["token_logprobs"][1:])
    assert all(len(t) <= 3 for t in found["top_logprobs"][1:])
    greedy = found["top_logprobs"][-1]
    assert found["token_logprobs"][-1] == max(greedy.values())


def test_a_prefix_is_reused_unless_it_must_not_be(engine: Running) -> None:
    long = PROMPT * 5

    def cached(**fields: Any) -> int:
        told = text(engine, prompt=long, max_tokens=1, **fields)
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() >= 0.8 * len(long) - 64
    assert cached(reuse_prefix=False) == 0
    assert cached(cache_salt="another tenant") == 0
    assert cached(priority=-5) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stream", [False, True])
def test_schemas_hold_at_temperature_two(engine: Running, seed: int, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["left", "right"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["kind", "count", "list"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    response = engine.chat(
        "hi", response_format=form, temperature=2, seed=seed, max_tokens=200, stream=stream
    )
    if stream:
        lines = [x[6:] for x in response.text.splitlines() if x.startswith("data: {")]
        deltas = [json.loads(x)["choices"][0]["delta"] for x in lines]
        answer = json.loads("".join(d.get("content") or "" for d in deltas))
    else:
        answer = json.loads(response.json()["choices"][0]["message"]["content"])
    assert answer["kind"] in ("left", "right")
    assert 0 <= answer["count"] <= 999
    assert all(isinstance(v, bool) for v in answer["list"])


def test_calls_hold_at_temperature_two(engine: Running) -> None:
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["n"],
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for seed in range(3):
        answer = engine.chat(
            "hi", tools=[tool], tool_choice="required", parallel_tool_calls=False,
            temperature=2, seed=seed, max_tokens=100,
        ).json()["choices"][0]  # fmt: skip
        (call,) = answer["message"]["tool_calls"]
        assert 0 <= json.loads(call["function"]["arguments"])["n"] <= 99
        assert answer["finish_reason"] == "tool_calls"


def test_a_picture_changes_the_answer(engine: Running) -> None:
    def told(colour: str) -> object:
        buffer = io.BytesIO()
        Image.new("RGB", (112, 112), colour).save(buffer, "PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        body = {
            "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        response = engine.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    assert told("red") == told("red")
    assert told("red") != told("blue")


def test_a_greedy_answer_continues_as_it_would_have_gone_on(engine: Running) -> None:
    letters = {str(i): 50 for i in range(64, 90)}
    user = {"role": "user", "content": "go"}
    fields: dict[str, Any] = {"temperature": 0, "logit_bias": letters, "ignore_eos": True}

    def answer(messages: list[dict[str, Any]], tokens: int, **more: Any) -> str:
        body = {"messages": messages, "max_tokens": tokens, **fields, **more}
        response = engine.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    whole = answer([user], 20, enable_thinking=False)
    assert len(whole) == 20
    for at in (1, 5, 10, 15, 19):
        given = {"role": "assistant", "content": whole[:at]}
        rest = answer([user, given], 20 - at, continue_final_message=True)
        assert whole[:at] + rest == whole


def test_a_long_prompt_does_not_stop_a_short_one(engine: Running) -> None:
    import threading
    import time

    import httpx

    def long() -> None:
        with httpx.Client(base_url=engine.url, timeout=120) as client:
            client.post("/v1/completions", json={"prompt": "x" * 1900, "max_tokens": 64})

    thread = threading.Thread(target=long)
    thread.start()
    time.sleep(0.05)
    assert text(engine, max_tokens=1)["usage"]["completion_tokens"] == 1
    thread.join()


def test_plan_and_kernels_are_told(engine: Running) -> None:
    lines = "\n".join(engine.service.engine.info.lines)
    assert "kernels:" in lines and "cache:" in lines and "model:" in lines
    assert Path(engine.service.prepare.directory).name in lines
