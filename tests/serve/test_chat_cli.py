"""`oxplow chat`: lines and blocks in, answers out, commands, interrupts, and kept talks."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxplow.serve import cli
from tests.serve.running import SCRIPTED_MAIN, hear_interrupts


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


def chat(model_dir: Path, typed: str, *more: str) -> Any:
    args = ["chat", "--model", str(model_dir), *more]
    done = CliRunner().invoke(cli.app, args, input=typed)
    assert done.exit_code == 0, done.output
    return done


def told(done: Any) -> list[dict[str, Any]]:
    found = json.loads(done.stdout.strip().splitlines()[-1])["messages"]
    assert isinstance(found, list)
    return found


@pytest.mark.usefixtures("scripted")
def test_in_a_pipe_answers_and_thinking_part(model_dir: Path) -> None:
    done = chat(model_dir, "because</think>one\nwhy</think>two\n")
    assert done.stdout == "one\ntwo\n"
    assert "because" in done.stderr and "why" in done.stderr
    hidden = chat(model_dir, "because</think>one\n", "--hide-thinking")
    assert (hidden.stdout, hidden.stderr) == ("one\n", "")


@pytest.mark.usefixtures("scripted")
def test_no_think_lets_the_model_answer_at_once(model_dir: Path) -> None:
    (_, answer) = told(chat(model_dir, "at once\n", "--no-think", "--json"))
    assert answer == {"role": "assistant", "content": "at once"}


@pytest.mark.usefixtures("scripted")
def test_blocks_and_continued_lines_are_one_text(model_dir: Path) -> None:
    typed = '"""\na</think>b\nc\n"""\n</think>d\\\ne\n"""f</think>g"""\n//reset\n'
    messages = told(chat(model_dir, typed, "--json"))
    texts = [m["content"] for m in messages if m["role"] == "user"]
    assert texts == ["a</think>b\nc", "</think>d\ne", "f</think>g", "/reset"]
    assert messages[1]["content"] == "b\nc"


@pytest.mark.usefixtures("scripted")
def test_commands_are_told_and_unknown_ones_refused(model_dir: Path, tmp_path: Path) -> None:
    done = chat(model_dir, "/help\n/nope\n/save x\n</think>a\n/reset\n</think>b\n", "--json")
    assert "/image PATH" in done.stderr and "/reset" in done.stderr
    assert "unknown command; got /nope; wanted /help" in done.stderr
    assert "--sessions-dir" in done.stderr
    assert [m["content"] for m in told(done)] == ["</think>b", "b"]
    path = chat(model_dir, "/etc/hosts is</think>a path\n", "--json")
    assert told(path)[0]["content"] == "/etc/hosts is</think>a path"


@pytest.mark.usefixtures("scripted")
def test_a_refused_text_changes_nothing(model_dir: Path) -> None:
    done = chat(model_dir, f"{'x' * 9000}\n</think>ok\n", "--json")
    assert "context" in done.stderr
    assert [m["content"] for m in told(done)] == ["</think>ok", "ok"]


@pytest.mark.slow
def test_a_kept_talk_goes_on_in_another_run(glm_oracle: Any, tmp_path: Path) -> None:
    model = Path(glm_oracle(0))
    template = Path(__file__).resolve().parents[2] / "training/chat_template.jinja"
    more = ["--chat-template", str(template), "--cache-mib", "96", "--max-model-len", "2048"]
    more += ["--max-tokens", "70", "--no-think", "--threads", "1", "--json"]
    more += ["--sessions-dir", str(tmp_path / "kept")]
    long = "The quick brown fox jumps over the lazy dog. " * 5
    first = chat(model, f"{long}\n/save fox\n", *more)
    kept = {p.name for p in (tmp_path / "kept").iterdir()}
    assert kept == {"fox.safetensors", "fox.chat.json"}, first.stderr
    second = told(chat(model, "/load fox\nAnd then?\n", *more))
    assert second[:2] == told(first)
    assert [m["role"] for m in second] == ["user", "assistant"] * 2
    (tmp_path / "kept/fox.safetensors").write_bytes(b"cut")
    third = chat(model, "/load fox\nAnd then?\n/load never\n", *more)
    assert "computed anew" in third.stderr and "no such talk" in third.stderr
    assert len(told(third)) == 4


class Terminal:
    """The program on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPTED_MAIN, *args],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "NO_COLOR": "1"},
            preexec_fn=hear_interrupts,
        )  # fmt: skip
        os.close(slave)
        os.set_blocking(self.master, False)
        self.seen = ""

    def wait_for(self, text: str, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self.master, 65536).decode()
            except (BlockingIOError, OSError):
                time.sleep(0.02)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_an_interrupt_stops_the_answer_not_the_program(model_dir: Path) -> None:
    terminal = Terminal("chat", "--model", str(model_dir))
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("@slow:0.05@</think>" + "abcdefghij" * 20 + "\n")
    terminal.wait_for("\nabc")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("(stopped; the answer so far stays in the conversation)")
    # Two lines that are pasted at once are one text.
    terminal.type("</think>first\nsecond one\n")
    terminal.wait_for("\nfirst\r\nsecond one")
    terminal.type("</think>still here\n")
    terminal.wait_for("\nstill here")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(30) == 0
    assert "Traceback" not in terminal.seen
    os.close(terminal.master)
