"""`LLM`, and `oxplow generate`, which stands on it."""

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxplow import LLM, ConfigError, RequestError
from oxplow.serve import cli


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
    # a shell that starts the tests in the background has interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with LLM(model_dir) as llm:
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream("@slow:0.02@</think>" + "x" * 300))
        signal.signal(signal.SIGINT, before)
        assert llm._open.engine.num_open == 0
        assert llm.generate("ok") == ["ok"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(tmp_path)


@pytest.mark.usefixtures("scripted")
def test_generate_prints_the_text_alone(model_dir: Path) -> None:
    args = ["generate", "abc", "--model", str(model_dir), "--max-tokens", "2"]
    cut = CliRunner().invoke(cli.app, args)
    assert (cut.stdout, cut.stderr) == ("ab\n", "(--max-tokens 2 cut the answer)\n")
    args = ["generate", "abc</think>d", "--chat", "--model", str(model_dir), "--max-tokens", "2"]
    cut = CliRunner().invoke(cli.app, args)
    assert (cut.stdout, "cut the thinking" in cut.stderr) == ("\n", True)
    args = ["generate", "-", "--chat", "--model", str(model_dir)]
    assert CliRunner().invoke(cli.app, args, input="</think>hi").stdout == "hi\n"
