"""`LLM`, and the commands that stand on it: chat, generate, batch."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import oxplow.serve.engine_settings as settings_module
from oxplow import LLM, ConfigError, RequestError
from oxplow.serve import cli
from oxplow.serve.batch import finished_names, read_items
from tests.serve.running import SCRIPTED


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine of this process be the scripted one."""
    make = settings_module.engine_settings
    monkeypatch.setattr(
        settings_module,
        "engine_settings",
        lambda *given: msgspec.structs.replace(make(*given), factory=SCRIPTED),
    )


@pytest.mark.usefixtures("scripted")
def test_one_object_does_it_all(model_dir: Path) -> None:
    with LLM(model_dir) as llm:
        answer = llm.chat("why</think>Hello", stop="lo")
        assert answer["choices"][0]["message"]["content"] == "Hel"
        pieces = list(llm.stream("why</think>Hello"))
        assert "".join(p.text for p in pieces if p.is_reasoning) == "why"
        assert "".join(p.text for p in pieces if not p.is_reasoning) == "Hello"
        assert llm.generate(["one", "two"]) == ["one", "two"]
        assert llm.complete("abc", max_tokens=1)["choices"][0]["finish_reason"] == "length"
        with pytest.raises(RequestError) as caught:
            llm.chat("x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(RequestError) as caught:
            llm.chat("x", max_tokens=10**6)
        assert caught.value.code == "context_length_exceeded"

        async def both() -> list[Any]:
            return await asyncio.gather(llm.achat("</think>a"), llm.agenerate("b"))

        chat, generated = asyncio.run(both())
        assert chat["choices"][0]["message"]["content"] == "a"
        assert generated == ["b"]
        for piece in llm.stream("@slow:0.02@</think>" + "x" * 300):
            assert piece.text
            break  # the request must end here, not in the background
        assert llm._open.engine.num_open == 0
    with pytest.raises(RequestError, match="closed"):
        llm.chat("x")
    llm.close()


@pytest.mark.usefixtures("scripted")
def test_an_interrupt_ends_a_stream_and_leaves_the_model_usable(model_dir: Path) -> None:
    with LLM(model_dir) as llm:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream("@slow:0.02@</think>" + "x" * 300))
        assert llm._open.engine.num_open == 0
        assert llm.generate("ok") == ["ok"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)


LINES = [
    {"messages": [{"role": "user", "content": "</think>one"}]},
    {
        "custom_id": "mine",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "two", "max_tokens": 9},
    },
    {"prompt": "three", "n": 0},
]


@pytest.mark.usefixtures("scripted")
def test_a_batch_goes_on_where_it_stopped(model_dir: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    args = ["batch", str(source), str(output), "--model", str(model_dir), "--json"]

    def run() -> Any:
        done = CliRunner().invoke(cli.app, args)
        return done.exit_code, json.loads(done.stdout.strip().splitlines()[-1])

    code, told = run()
    assert code == 1
    assert (told["asked"], told["skipped"], told["failed"]) == (3, 0, 1)
    answers = {a["custom_id"]: a for a in map(json.loads, output.read_text().splitlines())}
    chat = answers["line-1"]["response"]["body"]
    assert chat["choices"][0]["message"]["content"] == "one"
    assert answers["mine"]["response"]["body"]["choices"][0]["text"] == "two"
    assert answers["line-3"]["error"]["code"] == "invalid_value"
    # Interrupted in the middle of the last line: that line, and no other, is asked again.
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:2]) + whole[2][:20])
    code, told = run()
    assert (told["asked"], told["skipped"]) == (1, 2)
    assert finished_names(output) == {"line-1", "mine", "line-3"}


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"url": "/v1/nope", "body": {}}', '{"body": 1}', None]
)
def test_a_wrong_batch_line_is_named(tmp_path: Path, line: str | None) -> None:
    path = tmp_path / "in.jsonl"
    if line is not None:
        path.write_text('{"prompt": "ok"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_items(path)
    assert line is None or str(caught.value.where).endswith(":2")


def test_names_of_a_batch_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a", "prompt": "x"}\n' * 2)
    with pytest.raises(ConfigError, match="unique"):
        read_items(path)


@pytest.mark.usefixtures("scripted")
def test_the_terminal_holds_a_conversation(model_dir: Path, tmp_path: Path) -> None:
    from PIL import Image

    picture = tmp_path / "red.png"
    Image.new("RGB", (40, 40), "red").save(picture)
    typed = f"a</think>one\n/image {picture}\n</think>two\n/image /nowhere.png\n/exit\n"
    args = ["chat", "--model", str(model_dir), "--system", "Be brief.", "--json"]
    done = CliRunner().invoke(cli.app, args, input=typed)
    assert done.exit_code == 0, done.output
    messages = json.loads(done.stdout.strip().splitlines()[-1])["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["one", "two"]
    assert messages[2]["reasoning_content"] == "a"
    assert messages[3]["content"][0]["type"] == "image_url"
    assert "cannot be read" in done.stderr
    shown = CliRunner().invoke(cli.app, args[:-1], input="</think>hello\n")
    assert "hello" in shown.stdout


@pytest.mark.usefixtures("scripted")
def test_generate_prints_the_text_alone(model_dir: Path) -> None:
    args = ["generate", "abc", "--model", str(model_dir), "--max-tokens", "2"]
    assert CliRunner().invoke(cli.app, args).stdout == "ab\n"
    args = ["generate", "-", "--chat", "--model", str(model_dir)]
    assert CliRunner().invoke(cli.app, args, input="</think>hi").stdout == "hi\n"
