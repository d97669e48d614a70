"""`/v1/responses` and `/v1/messages`: the order of events, histories, tools, as agents use them."""

import json
from typing import Any

import httpx
import openai
import pytest

from oxplow.serve.engine_port import unpack_ids
from oxplow.serve.prepare.messages import messages_to_chat
from oxplow.serve.prepare.responses import responses_to_chat
from tests.serve.running import Running

CALL = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
SCRIPT = f"plan</think>Hello{CALL}{CALL}"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}
CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": PARAMETERS}


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events, checking that each is named by its type."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        if not lines:
            continue
        assert lines[0].startswith("event: ") and lines[1].startswith("data: ")
        event = json.loads(lines[1].removeprefix("data: "))
        assert event["type"] == lines[0].removeprefix("event: ")
        found.append(event)
    return found


def respond(server: Running, given: Any, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/responses", json={"input": given, "model": "tiny", **fields})


def message(server: Running, text: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    body = {"messages": messages, "model": "tiny", "max_tokens": 200, **fields}
    return server.client.post("/v1/messages?beta=true", json=body)


def test_response_events_come_in_their_exact_order(server: Running) -> None:
    told = named_events(respond(server, SCRIPT, stream=True, tools=[FLAT_TOOL]))
    assert [e["sequence_number"] for e in told] == list(range(len(told)))
    item = ["response.output_item.added", "response.content_part.added"]
    ends = ["response.content_part.done", "response.output_item.done"]
    call = [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    expected = [
        "response.created", "response.in_progress",
        *item, "response.reasoning_text.delta", "response.reasoning_text.done", *ends,
        *item, "response.output_text.delta", "response.output_text.done", *ends,
        *call, *call, "response.completed",
    ]  # fmt: skip
    kinds = [e["type"] for e in told]
    assert [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]] == expected
    for event in told[2:-1]:
        assert isinstance(event["output_index"], int)
        assert event.get("item_id") or event["item"]["id"]
        if "content_part" in event["type"] or "_text." in event["type"]:
            assert event["content_index"] == 0
    output = told[-1]["response"]["output"]
    assert [o["type"] for o in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [e["item"] for e in told if e["type"] == "response.output_item.done"] == output
    assert json.loads(output[2]["arguments"]) == {"a": 1}
    assert told[-1]["response"]["usage"]["output_tokens"] > 0


def test_plain_response_is_what_the_stream_ends_with(server: Running) -> None:
    plain = respond(server, SCRIPT, tools=[FLAT_TOOL]).json()
    streamed = named_events(respond(server, SCRIPT, stream=True, tools=[FLAT_TOOL]))[-1]["response"]
    assert plain["status"] == streamed["status"] == "completed"
    for left, right in zip(plain["output"], streamed["output"], strict=True):
        assert left["type"] == right["type"]
        assert left.get("content") == right.get("content")
        assert left.get("arguments") == right.get("arguments")


def test_a_cut_response_is_incomplete(server: Running) -> None:
    told = named_events(respond(server, "</think>long", stream=True, max_output_tokens=3))
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_that_breaks_says_so(server: Running) -> None:
    told = named_events(respond(server, "</think>ha@fail@", stream=True))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["message"] == "the script says so"


def test_the_sdk_s_stream_helper_reads_responses(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    tool: Any = FLAT_TOOL
    with client.responses.stream(model="tiny", input=SCRIPT, tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hello"
    assert client.responses.create(model="tiny", input="</think>hi").output_text == "hi"


def test_an_agent_s_history_comes_back_whole(server: Running) -> None:
    """Everything that we sent goes back as input and renders to the very tokens we produced."""
    first = respond(server, SCRIPT, tools=[FLAT_TOOL], include=["reasoning.encrypted_content"])
    output = first.json()["output"]
    for item in output:
        item.pop("content", None) if item["type"] == "reasoning" else None
        item["id"] = "never-issued"
    results = [
        {"type": "function_call_output", "call_id": o["call_id"], "output": "done"}
        for o in output
        if o["type"] == "function_call"
    ]
    history = [{"type": "message", "role": "user", "content": SCRIPT}, *output, *results]
    chat, _ = responses_to_chat({"input": history, "tools": [FLAT_TOOL]})
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "tool", "tool"]
    assert chat["messages"][1]["reasoning_content"] == "plan"
    told = server.client.post("/tokenize", json=chat).json()["tokens"]
    text = server.client.post("/detokenize", json={"tokens": told}).json()["prompt"]
    assert f"<think>{SCRIPT}" in text.replace("hm", "")


def test_codex_s_body_is_taken(server: Running) -> None:
    body = {
        "instructions": "You are Codex.",
        "tools": [
            FLAT_TOOL,
            {"type": "namespace", "name": "mcp", "tools": [{**FLAT_TOOL, "name": "inner"}]},
            {"type": "web_search"},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "client_metadata": {"a": "b"},
    }  # fmt: skip
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "</think>"}],
        },
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "x"},
    ]
    assert named_events(respond(server, items, **body))[-1]["type"] == "response.completed"
    named = f"</think>{CALL.replace('>f<', '>inner<')}"
    (call,) = [
        o
        for o in named_events(respond(server, named, **body))[-1]["response"]["output"]
        if o["type"] == "function_call"
    ]
    assert (call["name"], call["namespace"]) == ("inner", "mcp")


def test_a_schema_beside_tools_is_enforced(server: Running) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    fields = {
        "tools": [FLAT_TOOL],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
    }
    answer = respond(server, "</think>prose", max_output_tokens=100, **fields).json()
    kinds = [o["type"] for o in answer["output"]]
    assert "function_call" in kinds or json.loads(answer["output"][-1]["content"][0]["text"]) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": []},
        {"input": [7]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": 7}]},
        {"input": [{"role": "wizard", "content": "x"}]},
        {"previous_response_id": "resp_1"},
        {"max_output_tokens": 0},
        {"text": {"format": {"type": "json_schema"}}},
        {"tools": [{"type": "function"}]},
        {"reasoning": "much"},
    ],
)
def test_a_wrong_response_request_is_400(server: Running, fields: dict[str, Any]) -> None:
    response = server.client.post("/v1/responses", json={"input": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_message_events_come_in_their_exact_order(server: Running) -> None:
    told = named_events(message(server, SCRIPT, stream=True, tools=[CLAUDE_TOOL]))
    kinds = [e["type"] for e in told]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]] == [
        "message_start", *block * 4, "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[0]["message"]["usage"]["input_tokens"] > 0
    starts = [e["content_block"]["type"] for e in told if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = {e["delta"]["type"] for e in told if e["type"] == "content_block_delta"}
    assert deltas == {"thinking_delta", "text_delta", "input_json_delta"}
    assert [e["index"] for e in told if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    (end,) = [e for e in told if e["type"] == "message_delta"]
    assert end["delta"]["stop_reason"] == "tool_use"
    assert end["usage"]["output_tokens"] > 0


def test_plain_message_holds_the_blocks(server: Running) -> None:
    answer = message(server, SCRIPT, tools=[CLAUDE_TOOL]).json()
    assert [b["type"] for b in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][2]["input"] == {"a": 1}
    assert answer["content"][2]["id"] != answer["content"][3]["id"]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "end_turn"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"stop_sequences": ["ng"]}, "stop_sequence"),
    ],
)
def test_stop_reasons_are_anthropic_s(server: Running, fields: Any, reason: str) -> None:
    answer = message(server, "</think>a long one", **fields).json()
    assert answer["stop_reason"] == reason
    assert answer["stop_sequence"] == ("ng" if reason == "stop_sequence" else None)


def test_a_budget_beyond_the_room_is_cut_to_it(server: Running) -> None:
    assert message(server, "</think>ok", max_tokens=10**6).status_code == 200


def prompt_of(server: Running) -> str:
    """Return the prompt that the engine saw last."""
    core = server.service.engine._transport._driver._core  # type: ignore[attr-defined]
    return server.service.text.vocabulary.decode(
        unpack_ids(core.works[-1].prompt), skip_special=False
    )


def claude_code(version: str) -> dict[str, Any]:
    return {
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{version};"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "x"}},
        ],
        "tools": [CLAUDE_TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
        "context_management": {}, "output_config": {"effort": "high"}, "stream": True,
    }  # fmt: skip


def test_the_billing_line_does_not_reach_the_prompt(server: Running) -> None:
    prompts = []
    for version in ("197.0df", "197.f3c"):
        named_events(message(server, "</think>ok", **claude_code(version)))
        prompts.append(prompt_of(server))
    assert prompts[0] == prompts[1]
    assert "billing" not in prompts[0] and "You are Claude Code." in prompts[0]


def test_claude_s_history_arrives_in_order(server: Running) -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "first"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "two"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "reminder"},
        {"role": "user", "content": "</think>end"},
    ]
    assert message(server, history, tools=[CLAUDE_TOOL]).status_code == 200
    assert prompt_of(server).endswith(
        "<|user|>first<|assistant|><think>hm</think>calling"
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        "<tool_call>f</tool_call>"
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response>"
        "<|user|>go on<|system|>reminder<|user|></think>end<|assistant|><think>"
    )


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "any"}, "tool_use"),
        ({"type": "tool", "name": "f"}, "tool_use"),
        ({"type": "none"}, "end_turn"),
        ({"type": "auto", "disable_parallel_tool_use": True}, "end_turn"),
    ],
)
def test_tool_choice_is_anthropic_s(server: Running, choice: Any, reason: str) -> None:
    answer = message(server, "</think>prose", tools=[CLAUDE_TOOL], tool_choice=choice).json()
    assert answer["stop_reason"] == reason


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [7]}]},
        {"system": 7},
        {"tools": [{}]},
        {"tools": [{"name": 7}]},
        {"tool_choice": {"type": "sometimes"}},
        {"stop_sequences": [7]},
    ],
)
def test_a_wrong_message_request_has_anthropic_s_shape(server: Running, fields: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, **fields}
    response = server.client.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    told = response.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"


def test_a_broken_message_stream_ends_with_an_error(server: Running) -> None:
    told = named_events(message(server, "</think>ha@fail@", stream=True))
    assert told[-1]["type"] == "error"
    assert told[-1]["error"]["message"] == "the script says so"


def test_message_tokens_are_counted(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    counted = server.client.post("/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == server.chat("hello").json()["usage"]["prompt_tokens"]


def test_documents_and_stops_become_chat_parts() -> None:
    document = {"type": "document", "source": {"type": "text", "data": "page"}}
    chat, _ = messages_to_chat(
        {"max_tokens": 1, "messages": [{"role": "user", "content": [document]}]}
    )
    assert chat["messages"][0]["content"] == [{"type": "text", "text": "page"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("responses", {"input": [{"role": "nobody", "content": "x"}]}, "input.0.role"),
        (
            "responses",
            {"instructions": "be brief", "input": ["hi", {"role": "user", "content": 3}]},
            "input.1.content",
        ),
        (
            "responses",
            {
                "input": [
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "name": 5, "call_id": "c"},
                    {"role": "user", "content": [{"type": "hologram"}]},
                ]
            },
            "input.0.tool_calls.0.function.name",
        ),
        ("responses", {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        (
            "messages",
            {
                "max_tokens": 5,
                "system": "be brief",
                "messages": [{"role": "user", "content": [{"type": "hologram"}]}],
            },
            "messages.0.content.0",
        ),
    ],
)
def test_errors_name_items_as_the_client_wrote_them(
    server: Running, path: str, body: dict[str, object], param: str
) -> None:
    refused = server.client.post(f"/v1/{path}", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error.get("param", param) == param
    assert param in error["message"] or error.get("param") == param
