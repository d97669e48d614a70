"""Text completions, tokens and metrics over HTTP."""

import json
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.running import Running, events

NAMES = {
    "oxplow_requests_running": "gauge",
    "oxplow_requests_waiting": "gauge",
    "oxplow_cache_use_ratio": "gauge",
    "oxplow_front_lag_seconds": "gauge",
    "oxplow_prompt_tokens": "counter",
    "oxplow_generated_tokens": "counter",
    "oxplow_prefix_query_tokens": "counter",
    "oxplow_prefix_hit_tokens": "counter",
    "oxplow_prefix_misses": "counter",
    "oxplow_engine_steps": "counter",
    "oxplow_engine_restarts": "counter",
    "oxplow_preemptions": "counter",
    "oxplow_http_responses": "counter",
    "oxplow_choices_finished": "counter",
    "oxplow_requests_cancelled": "counter",
    "oxplow_requests_refused": "counter",
    "oxplow_tool_calls_dropped": "counter",
    "oxplow_session_files": "counter",
    "oxplow_transfers_failed": "counter",
    "oxplow_time_to_first_token_seconds": "histogram",
    "oxplow_time_between_tokens_seconds": "histogram",
    "oxplow_queue_time_seconds": "histogram",
    "oxplow_request_seconds": "histogram",
}


def complete(server: Running, prompt: Any, **fields: Any) -> Any:
    return server.client.post("/v1/completions", json={"prompt": prompt, **fields})


def test_text_goes_on(server: Running) -> None:
    answer = complete(server, "once upon", max_tokens=30).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "once upon"  # the scripted engine repeats its prompt
    assert answer["usage"]["prompt_tokens"] == len("once upon")


def test_sixteen_tokens_are_the_default(server: Running) -> None:
    answer = complete(server, "x" * 40).json()
    assert answer["choices"][0]["text"] == "x" * 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_several_prompts_and_choices_count_prompt_by_prompt(server: Running) -> None:
    answer = complete(server, ["a@i@", "b@i@"], n=2).json()
    assert {c["index"]: c["text"] for c in answer["choices"]} == {
        0: "a0", 1: "a1", 2: "b0", 3: "b1",
    }  # fmt: skip
    stream = complete(server, ["a@i@", "b@i@"], n=2, stream=True)
    joined = {0: "", 1: "", 2: "", 3: ""}
    for text in events(stream)[:-1]:
        choice = json.loads(text)["choices"][0]
        joined[choice["index"]] += choice["text"]
    assert joined == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


def test_ids_are_taken_as_they_are(server: Running) -> None:
    ids = server.client.post("/tokenize", json={"prompt": "héllo"}).json()["tokens"]
    assert complete(server, ids).json()["choices"][0]["text"] == "héllo"
    answer = complete(server, [ids, ids]).json()
    assert [c["text"] for c in answer["choices"]] == ["héllo", "héllo"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_brings_the_prompt_and_its_log_probabilities(server: Running, stream: bool) -> None:
    response = complete(server, "abc", echo=True, logprobs=1, max_tokens=2, stream=stream)
    if stream:
        told = [json.loads(t)["choices"][0] for t in events(response)[:-1]]
        text = "".join(c["text"] for c in told)
        tokens = [t for c in told for t in c["logprobs"]["tokens"]]
        values = [v for c in told for v in c["logprobs"]["token_logprobs"]]
        offsets = [o for c in told for o in c["logprobs"]["text_offset"]]
    else:
        (choice,) = response.json()["choices"]
        text, found = choice["text"], choice["logprobs"]
        tokens, values = found["tokens"], found["token_logprobs"]
        offsets = found["text_offset"]
    assert text == "abcab"
    assert tokens == ["a", "b", "c", "a", "b"]
    assert values == [None, -1.0, -1.0, -0.5, -0.5]
    assert offsets == [0, 1, 2, 3, 4]


def test_a_prompt_can_be_scored_without_an_answer(server: Running) -> None:
    (choice,) = complete(server, "abc", echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 99}, "logprobs"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_a_wrong_field_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    response = server.client.post("/v1/completions", json={"prompt": "a", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_tokens_go_there_and_back(server: Running) -> None:
    text = "naïve <|user|> 日本"
    told = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    back = server.client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert server.client.post("/tokenize", json=chat).json()["count"] > 2
    for body in ({}, {"prompt": 7}, {"messages": []}):
        assert server.client.post("/tokenize", json=body).status_code == 400
    for body in ({}, {"tokens": "x"}, {"tokens": [10**9]}):
        assert server.client.post("/detokenize", json=body).status_code == 400


def test_the_sdk_reads_completions(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=3, logprobs=1)
    assert answer.choices[0].text == "abc"


def test_metrics_have_their_documented_names_and_types(server: Running) -> None:
    families = {
        f.name: f for f in text_string_to_metric_families(server.client.get("/metrics").text)
    }
    created = {n for n in families if n.endswith("_created")}
    assert {n: families[n].type for n in families if n not in created} == NAMES


def test_counters_never_fall(server: Running) -> None:
    def counts() -> dict[tuple[str, str], float]:
        return {
            (s.name, str(s.labels)): s.value
            for f in text_string_to_metric_families(server.client.get("/metrics").text)
            if f.type == "counter"
            for s in f.samples
        }

    before = counts()
    server.chat("</think>hi")
    server.chat("</think>@fail@")
    server.chat("hi", temperature=-1)
    after = counts()
    assert all(after[key] >= value for key, value in before.items())
    refused = ("oxplow_requests_refused_total", "{'code': 'invalid_value'}")
    assert after[refused] == before.get(refused, 0) + 1
    failed = ("oxplow_choices_finished_total", "{'reason': 'failed'}")
    assert after[failed] == before[failed] + 1
