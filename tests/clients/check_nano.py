"""The bundled model behind the whole server: what clients may rely on whatever the model says.

Enforced calls and schemas hold for a small model that would answer in prose; agent loops end;
streams count; a session's second turn is cached.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from oxplow.serve.engine_settings import EngineSettings
from oxplow.serve.model_files import default_model
from oxplow.serve.server import ServeOptions
from tests.serve.running import Running, running

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED: list[Any] = [{"role": "user", "content": "Use the tool to add 2 and 3."}]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = EngineSettings(
        directory=str(default_model()),
        cache_bytes=256 << 20,
        max_model_len=8192,
        settings={"compute.threads": 1},
    )
    folder = tmp_path_factory.mktemp("kept")
    with running(ServeOptions(engine=engine, names=("nano",), sessions_dir=folder)) as found:
        yield found


def openai_client(nano: Running) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{nano.url}/v1", api_key="x")


def test_openai_gets_a_call_a_schema_and_a_counted_stream(nano: Running) -> None:
    pydantic = pytest.importorskip("pydantic")
    chat = openai_client(nano).chat.completions
    told = chat.create(
        model="nano", messages=ASKED, tools=[ADD], tool_choice="required", max_tokens=256
    )
    (call, *_) = told.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    assert told.choices[0].finish_reason == "tool_calls"
    answer = pydantic.create_model("Answer", done=(bool, ...), number=(int, ...))
    parsed = chat.parse(model="nano", messages=ASKED, response_format=answer, max_tokens=512)
    assert isinstance(parsed.choices[0].message.parsed, answer)
    chunks = list(
        chat.create(
            model="nano", messages=ASKED, max_tokens=48, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].usage.completion_tokens <= 48
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


def test_openai_names_a_session_whose_next_turn_is_cached(nano: Running) -> None:
    chat = openai_client(nano).chat.completions
    named = {"X-Oxplow-Session": "clients"}
    asked: list[Any] = [{"role": "user", "content": "The quick brown fox jumps. " * 40}]
    first = chat.create(model="nano", messages=asked, max_tokens=32, extra_headers=named)
    asked += [
        {"role": "assistant", "content": first.choices[0].message.content or "yes"},
        {"role": "user", "content": "And then?"},
    ]
    second = chat.create(model="nano", messages=asked, max_tokens=8, extra_headers=named)
    assert second.usage.prompt_tokens_details.cached_tokens >= 256
    done = nano.client.post("/sessions/clients/save", json={}).json()
    assert done["tokens"] >= second.usage.prompt_tokens_details.cached_tokens


def test_agents_end_and_typed_outputs_are_typed(nano: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    create_agent = pytest.importorskip("langchain.agents").create_agent
    pydantic = pytest.importorskip("pydantic")
    chat = langchain.ChatOpenAI(
        model="nano", base_url=f"{nano.url}/v1", api_key="x", max_tokens=300, temperature=0
    )

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    told = create_agent(chat, [add]).invoke({"messages": ASKED}, {"recursion_limit": 12})
    assert told["messages"][-1].type == "ai"
    answer = pydantic.create_model("Answer", __doc__="An answer.", number=(int, ...))
    for method in ("json_schema", "function_calling"):
        shaped = chat.with_structured_output(answer, method=method)
        assert isinstance(shaped.invoke("five"), answer)


def test_responses_and_messages_end(nano: Running) -> None:
    client = openai_client(nano)
    with client.responses.stream(model="nano", input="Hi", max_output_tokens=48) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    body = {"model": "nano", "max_tokens": 48, "messages": [{"role": "user", "content": "Hi"}]}
    told = nano.client.post("/v1/messages?beta=true", json=body).json()
    assert told["stop_reason"] in ("end_turn", "max_tokens")
