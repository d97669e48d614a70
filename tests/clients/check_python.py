"""Python clients: openai, litellm, LangChain agents, pydantic-ai, instructor, LlamaIndex, llm."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CALL
from tests.serve.running import Running


def test_openai_runs_a_tool_loop(served: Running) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x")
    tool = {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    messages: list[Any] = [{"role": "user", "content": CALL}]
    first = client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    (call,) = first.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    messages += [
        first.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": str(sum(arguments.values()))},
    ]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    assert second.choices[0].message.content == "The tool said: 5"


def test_openai_parses_a_schema(served: Running) -> None:
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", done=(bool, ...))
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x")
    parsed = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": '</think>{"done": true}'}],
        response_format=answer,
    )
    assert parsed.choices[0].message.parsed.done is True


def test_litellm_streams_and_counts(served: Running) -> None:
    litellm = pytest.importorskip("litellm")
    fields = {
        "model": "openai/tiny",
        "api_base": f"{served.url}/v1",
        "api_key": "x",
        "messages": [{"role": "user", "content": "hm</think>Hello"}],
    }
    plain = litellm.completion(**fields)
    assert plain.choices[0].message.content == "Hello"
    assert plain.usage.total_tokens > 0
    pieces = litellm.completion(**fields, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == "Hello"


def test_langchain_runs_an_agent_loop(served: Running) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        model="tiny", base_url=f"{served.url}/v1", api_key="x"
    )
    create_agent = pytest.importorskip("langchain.agents").create_agent

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agent = create_agent(chat, [add])
    told = agent.invoke({"messages": [{"role": "user", "content": CALL}]})
    assert told["messages"][-1].content == "The tool said: 5"
    assert "".join(c.content for c in chat.stream("</think>Hello")) == "Hello"


def test_langchain_enforces_a_structure(served: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", __doc__="An answer.", done=(bool, ...))
    chat = langchain.ChatOpenAI(model="tiny", base_url=f"{served.url}/v1", api_key="x")
    for method in ("json_schema", "function_calling"):
        shaped = chat.with_structured_output(answer, method=method)
        assert isinstance(shaped.invoke("</think>no, prose"), answer)


def test_pydantic_ai_gets_typed_output(served: Running) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", done=(bool, ...))
    provider = providers.OpenAIProvider(base_url=f"{served.url}/v1", api_key="x")
    model = models.OpenAIChatModel("tiny", provider=provider)
    agent = ai.Agent(model, output_type=answer)
    assert isinstance(agent.run_sync("</think>no, prose").output, answer)


def test_instructor_gets_typed_output(served: Running) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    pydantic = pytest.importorskip("pydantic")
    answer = pydantic.create_model("Answer", done=(bool, ...))
    client = instructor.from_openai(openai.OpenAI(base_url=f"{served.url}/v1", api_key="x"))
    messages = [{"role": "user", "content": "</think>no, prose"}]
    told = client.chat.completions.create(model="tiny", messages=messages, response_model=answer)
    assert isinstance(told, answer)


def test_llama_index_calls_tools(served: Running) -> None:
    likes = pytest.importorskip("llama_index.llms.openai_like")
    tools = pytest.importorskip("llama_index.core.tools")
    chat = likes.OpenAILike(
        model="tiny",
        api_base=f"{served.url}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
    )

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tool = tools.FunctionTool.from_defaults(add)
    assert str(chat.predict_and_call([tool], user_msg=CALL)) == "5"
    forced = chat.chat_with_tools([tool], user_msg="</think>no", tool_required=True)
    (call,) = chat.get_tool_calls_from_response(forced)
    assert call.tool_name == "add"


def test_the_llm_program_answers(served: Running, tmp_path: Path) -> None:
    program = shutil.which("llm")
    if program is None:
        pytest.skip("the llm program is not installed")
    entry = f"- model_id: tiny\n  model_name: tiny\n  api_base: {served.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    done = subprocess.run(
        [program, "-m", "tiny", "--no-log", "</think>Hello"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "x", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip() == "Hello", done.stderr
