"""Chat completions over HTTP: forms, usage, choices, stops, limits, errors."""

import json
from typing import Any

import httpx
import openai
import pytest

from oxplow.serve.api.service import Limits
from tests.serve.running import Running, events, options, running

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": True,
    },
}
CALL = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
ANSWER = "why</think>Hello, wörld"


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    told = events(response)
    assert told[-1] == "[DONE]"
    return [json.loads(text) for text in told[:-1]]


def test_plain_answer_has_the_whole_envelope(server: Running) -> None:
    answer = server.chat(ANSWER).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert isinstance(answer["created"], int)
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hello, wörld"
    assert choice["message"]["reasoning_content"] == "why"
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    # why, the mark, the text in bytes, the end token
    assert usage["completion_tokens"] == 3 + 1 + len("Hello, wörld".encode()) + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_stream_joins_to_the_plain_answer(server: Running) -> None:
    plain = server.chat(ANSWER).json()["choices"][0]["message"]
    told = chunks(server.chat(ANSWER, stream=True))
    deltas = [c["choices"][0]["delta"] for c in told]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d.get("content") or "" for d in deltas) == plain["content"]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == plain["reasoning_content"]
    assert len({c["id"] for c in told}) == 1
    reasons = [c["choices"][0]["finish_reason"] for c in told]
    assert reasons[:-1] == [None] * (len(told) - 1)
    assert reasons[-1] == "stop"


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("script", ["</think>", "hm</think>hi", f"</think>{CALL}"])
def test_usage_comes_once_and_only_when_asked_for(
    server: Running, asked: Any, n: int, script: str
) -> None:
    fields: dict[str, Any] = {"n": n, "tools": [TOOL]}
    told = chunks(server.chat(script, stream=True, stream_options=asked, **fields))
    empty = [c for c in told if not c["choices"]]
    assert all(c.get("usage") is None for c in told if c["choices"])
    if not (asked or {}).get("include_usage"):
        assert empty == []
        return
    assert empty == [told[-1]]
    plain = server.chat(script, **fields).json()["usage"]
    for usage in (plain, empty[0]["usage"]):
        usage.pop("prompt_tokens_details")  # the second run finds the first one's prefix
    assert empty[0]["usage"] == plain


def test_choices_are_told_apart(server: Running) -> None:
    answer = server.chat("</think>number @i@", n=3).json()
    texts = {c["index"]: c["message"]["content"] for c in answer["choices"]}
    assert texts == {0: "number 0", 1: "number 1", 2: "number 2"}
    one = server.chat("</think>number @i@", n=1).json()["usage"]
    assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    told = chunks(server.chat("</think>number @i@", n=3, stream=True))
    joined = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in told:
        choice = chunk["choices"][0]
        joined[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert joined == texts
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "left", "found"),
    [
        (", ", "Hello", ", "),
        (["zz", "rl"], "Hello, wö", "rl"),
        (["wörld", "ö"], "Hello, w", "ö"),
        ("why", "Hello, wörld", None),
        ("nowhere", "Hello, wörld", None),
    ],
)
def test_stop_texts_end_the_visible_answer(
    server: Running, stop: Any, left: str, found: str | None, stream: bool
) -> None:
    response = server.chat(ANSWER, stop=stop, stream=stream)
    if stream:
        told = chunks(response)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in told) == left
        assert told[-1]["choices"][0]["finish_reason"] == "stop"
        return
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"] == left
    assert choice["finish_reason"] == "stop"
    assert choice.get("stop_reason") == found


def test_stop_text_can_be_kept(server: Running) -> None:
    answer = server.chat(ANSWER, stop=", ", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, "


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_cover_the_visible_text(server: Running, stream: bool) -> None:
    response = server.chat(ANSWER, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        found = [c["choices"][0]["logprobs"] for c in chunks(response)]
        entries = [e for f in found if f for e in f["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "Hello, wörld"
    assert all(len(e["top_logprobs"]) == 2 and e["logprob"] == -0.5 for e in entries)


def test_calls_are_streamed_in_the_sdk_s_form(server: Running) -> None:
    script = f"hm</think>{CALL}{CALL}"
    told = chunks(server.chat(script, stream=True, tools=[TOOL]))
    pieces = [c["choices"][0]["delta"]["tool_calls"][0] for c in told if _calls(c)]
    firsts = [p for p in pieces if "id" in p]
    assert [p["index"] for p in firsts] == [0, 1]
    assert len({p["id"] for p in firsts}) == 2
    assert all(p["type"] == "function" for p in firsts)
    assert all(p["function"] == {"name": "f", "arguments": ""} for p in firsts)
    assert all(set(p["function"]) == {"arguments"} for p in pieces if "id" not in p)
    for index in (0, 1):
        text = "".join(p["function"]["arguments"] for p in pieces if p["index"] == index)
        assert json.loads(text) == {"a": 1}
    assert told[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls",
    }  # fmt: skip


def _calls(chunk: dict[str, Any]) -> bool:
    return bool(chunk["choices"] and chunk["choices"][0]["delta"].get("tool_calls"))


def test_plain_calls_leave_the_content_null(server: Running) -> None:
    message = server.chat(f"</think>{CALL}", tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_no_call_leaves_where_calls_are_forbidden(server: Running) -> None:
    answer = server.chat(f"</think>ok{CALL}", tools=[TOOL], tool_choice="none").json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "ok"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    # The opening token is forbidden, so that the model says something instead; the tools stay.
    spent = answer["usage"]["completion_tokens"]
    assert spent == len("ok") + 2
    shown = server.chat(f"</think>ok{CALL}", tools=[TOOL]).json()["usage"]
    assert shown["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert shown["completion_tokens"] > spent


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}},
    ],
)
def test_a_call_is_enforced(server: Running, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 200}
    answer = server.chat("</think>I would rather talk", **fields).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda t: json.loads(t) is not None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}},
                }
            },
            lambda t: json.loads(t) in ("yes", "no"),
        ),
        ({"response_format": {"type": "regex", "pattern": "[0-9]{4}"}}, str.isdigit),
        ({"response_format": {"type": "grammar", "grammar": 'start: "k"'}}, "k".__eq__),
        ({"guided_choice": ["a.b", "c"]}, lambda t: t in ("a.b", "c")),
        ({"structured_outputs": {"regex": "q+"}}, lambda t: set(t) == {"q"}),
        ({"guided_json": {"type": "integer", "maximum": 9, "minimum": 0}}, str.isdigit),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_s_form_is_enforced(
    server: Running, fields: dict[str, Any], check: Any, stream: bool
) -> None:
    response = server.chat("hm</think>no!", max_tokens=300, stream=stream, **fields)
    if stream:
        told = chunks(response)
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in told)
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert check(text), text


@pytest.mark.parametrize("script", ["plan</think>The capital of France is Paris.", "</think>ab cd"])
@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9])
def test_an_answer_can_be_continued(server: Running, script: str, cut: float) -> None:
    """The prompt of the continuation is the prompt and answer so far, to the character."""
    message = server.chat(script).json()["choices"][0]["message"]
    thought, content = message.get("reasoning_content", ""), message["content"]
    given = content[: max(1, int(len(content) * cut))]
    messages = [
        {"role": "user", "content": script},
        {"role": "assistant", "content": given, "reasoning_content": thought},
    ]
    body = {"messages": messages, "continue_final_message": True}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    whole = server.client.post("/tokenize", json={"messages": messages[:1]}).json()["tokens"]
    told = server.client.post("/tokenize", json=body).json()["tokens"]
    ends = server.client.post("/detokenize", json={"tokens": told[len(whole) :]}).json()["prompt"]
    assert told[: len(whole)] == whole
    assert ends == f"{thought}</think>{given}"


def test_open_thinking_can_be_continued(server: Running) -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "reasoning_content": "so far "},
    ]
    body = {"messages": messages, "continue_final_message": True}
    told = server.client.post("/tokenize", json=body).json()["tokens"]
    text = server.client.post("/detokenize", json={"tokens": told}).json()["prompt"]
    assert text.endswith("<think>so far ")
    answer = server.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "go"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"seed": "x"}, "seed"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tools": "x"}, "tools"),
    ({"tools": [7]}, "tools.0"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": 7}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"priority": "high"}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_wrong_field_is_named_in_openai_s_shape(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = server.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"] and error["code"]


def test_unknown_fields_and_tool_types_change_nothing(server: Running) -> None:
    extra = {
        "store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto",
        "prompt_cache_key": "k", "client_metadata": {}, "reasoning": {"effort": "low"},
        "include": ["x"], "thinking": {"type": "adaptive"}, "context_management": {},
        "output_config": {}, "tools": [{"type": "web_search"}, TOOL], "x": None,
        "parallel_tool_calls": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = server.chat(ANSWER, **extra).json()
    assert answer["choices"][0]["message"]["content"] == "Hello, wörld"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": ' + b"[" * 5000, "invalid_json"),
    ],
)
def test_a_body_that_is_no_object_is_refused(server: Running, body: bytes, code: str) -> None:
    response = server.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code


def test_an_unknown_model_is_404(server: Running) -> None:
    response = server.chat("hi", model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert server.chat("</think>hi", model="org/other").json()["model"] == "org/other"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [1, 1000])
@pytest.mark.parametrize("what", ["prompt", "budget"])
def test_what_does_not_fit_is_refused_before_any_byte(
    server: Running, what: str, over: int, stream: bool
) -> None:
    limit = server.service.engine.info.max_model_len
    used = server.chat("</think>").json()["usage"]["prompt_tokens"] - len("</think>")
    fields: dict[str, Any] = {"stream": stream}
    text = "x"
    if what == "prompt":
        text = "x" * (limit - used + over - 1)
    else:
        fields["max_tokens"] = limit - used - 1 + over
    response = server.chat(text, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert str(limit) in error["message"] and "context length" in error["message"]
    assert response.headers["content-type"] == "application/json"


def test_a_budget_that_fits_exactly_is_served(server: Running) -> None:
    limit = server.service.engine.info.max_model_len
    used = server.chat("</think>").json()["usage"]["prompt_tokens"]
    assert server.chat("</think>", max_tokens=limit - used).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nope"), ("POST", "/nope")])
def test_an_unknown_path_is_404_in_shape(server: Running, method: str, path: str) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "TRACE", "BREW"])
def test_an_unknown_method_is_405(server: Running, method: str) -> None:
    response = server.client.request(method, "/v1/chat/completions")
    assert response.status_code == 405


def test_every_answer_carries_a_request_id(server: Running) -> None:
    assert server.client.get("/health").headers["x-request-id"]
    for given, kept in (("mine-1", True), ("bad id!", False), ("x" * 99, False)):
        headers = {"X-Request-Id": given}
        shown = server.client.get("/v1/models", headers=headers).headers["x-request-id"]
        assert (shown == given) is kept


def test_keys_bodies_and_origins_are_bounded(model_dir: Any) -> None:
    limits = Limits(api_key="s3cret", max_body_bytes=1000, allow_origins=("https://chat.test",))
    with running(options(model_dir, limits=limits)) as guarded:
        client = guarded.client
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        bad = client.get("/v1/models", headers={"Authorization": "Bearer nope"})
        assert bad.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        key = {"Authorization": "Bearer s3cret"}
        large = client.post("/v1/chat/completions", content=b"x" * 1001, headers=key)
        assert large.status_code == 413
        parts = client.post("/v1/chat/completions", content=iter([b"x" * 600] * 2), headers=key)
        assert parts.status_code == 413
        asked = {
            "Origin": "https://chat.test",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-stainless-os",
        }
        allowed = client.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 200
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]


def test_models_are_listed_and_found(server: Running) -> None:
    listed = server.client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["tiny", "org/other"]
    assert all(m["max_model_len"] == 8192 for m in listed["data"])
    assert server.client.get("/v1/models/org/other").json()["id"] == "org/other"
    assert server.client.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


def test_the_openai_client_reads_it_all(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    assert client.models.retrieve("tiny").id == "tiny"
    messages: Any = [{"role": "user", "content": ANSWER}]
    plain = client.chat.completions.create(model="tiny", messages=messages)
    assert plain.choices[0].message.content == "Hello, wörld"
    stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "Hello, wörld"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)


def test_a_failed_choice_fails_its_request_only(server: Running) -> None:
    response = server.chat("</think>half@fail@")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the script says so"
    told = events(server.chat("</think>half@fail@", stream=True))
    assert told[-1] == "[DONE]"
    assert json.loads(told[-2])["error"]["message"] == "the script says so"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    messages: Any = [{"role": "user", "content": "</think>half@fail@"}]
    with pytest.raises(openai.APIError, match="the script says so"):
        list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
    assert server.chat(ANSWER).status_code == 200


def test_thinking_can_be_switched_off(server: Running) -> None:
    for fields in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ):
        message = server.chat("straight", **fields).json()["choices"][0]["message"]
        assert message["content"] == "straight"
        assert "reasoning_content" not in message
