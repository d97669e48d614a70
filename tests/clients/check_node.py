"""Clients from npm: openai, OpenCode, Codex, Claude Code, found in `node_modules` or on the path.

Each runs with a home of its own and an address on loopback, so nothing of the user's is read.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.running import Running

MODULES = Path(os.environ.get("OXPLOW_CLIENT_NODE_MODULES", "node_modules")).resolve()


def find(name: str) -> str:
    found = shutil.which(name, path=f"{MODULES}/.bin{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed in {MODULES}")
    return found


def run(
    command: list[str], home: Path, timeout_s: int = 180, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG")}
    work = home / "work"
    work.mkdir(exist_ok=True)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=work,
        stdin=subprocess.DEVNULL,
        env={**kept, "HOME": str(home), "NO_COLOR": "1", **variables},
    )


NODE_SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: "x" });
const messages = [{ role: "user", content: process.env.SCRIPT }];
const tool = {
  type: "function",
  function: {
    name: "add", parse: JSON.parse, function: ({ a, b }) => String(a + b),
    parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } },
  },
};
const runner = client.chat.completions.runTools({ model: "tiny", messages, tools: [tool] });
const final = await runner.finalContent();
let streamed = "";
const hello = [{ role: "user", content: "hm</think>Hello" }];
for await (const chunk of await client.chat.completions.create(
  { model: "tiny", messages: hello, stream: true })) {
  streamed += chunk.choices[0].delta.content ?? "";
}
const response = await client.responses.create({ model: "tiny", input: "hm</think>Hi" });
console.log(JSON.stringify({ final, streamed, response: response.output_text }));
"""


def test_openai_for_node(served: Running, tmp_path: Path) -> None:
    if not (MODULES / "openai").exists():
        pytest.skip(f"openai is not installed in {MODULES}")
    from tests.clients.conftest import CALL

    (tmp_path / "node_modules").symlink_to(MODULES)
    (tmp_path / "check.mjs").write_text(NODE_SCRIPT)
    done = run([find("node"), str(tmp_path / "check.mjs")], tmp_path, URL=served.url, SCRIPT=CALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "final": "The tool said: 5", "streamed": "Hello", "response": "Hi",
    }  # fmt: skip


SHELL = "<tool_call>exec_command<arg_key>cmd</arg_key><arg_value>echo forty-two</arg_value>"


@pytest.mark.parametrize(
    ("script", "shown"),
    [("hm</think>Hello from it", "Hello from it"), (f"hm</think>{SHELL}</tool_call>", "forty-two")],
)
def test_codex_answers_and_runs_a_tool(
    served: Running, tmp_path: Path, script: str, shown: str
) -> None:
    codex = find("codex")
    home = tmp_path / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "oxplow"\n'
        "[model_providers.oxplow]\n"
        f'name = "oxplow"\nbase_url = "{served.url}/v1"\nwire_api = "responses"\n'
        'env_key = "OXPLOW_KEY"\n'
    )
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    done = run(
        [codex, *flags, script],
        tmp_path, CODEX_HOME=str(home), OXPLOW_KEY="x",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert shown in done.stdout


def test_claude_code_answers(served: Running, tmp_path: Path) -> None:
    claude = find("claude")
    done = run(
        [claude, "-p", "hm</think>Hello from the engine", "--model", "tiny"],
        tmp_path,
        ANTHROPIC_BASE_URL=served.url,
        ANTHROPIC_API_KEY="x",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Hello from the engine" in done.stdout


def test_claude_code_runs_a_tool(served: Running, tmp_path: Path) -> None:
    claude = find("claude")
    (tmp_path / "work").mkdir()
    (tmp_path / "work/note.txt").write_text("forty-two")
    script = (
        "hm</think><tool_call>Bash<arg_key>command</arg_key>"
        "<arg_value>cat note.txt</arg_value><arg_key>description</arg_key>"
        "<arg_value>read a note</arg_value></tool_call>"
    )
    flags = ["--allowedTools", "Bash", "--model", "tiny"]
    done = run(
        [claude, "-p", script, *flags],
        tmp_path,
        ANTHROPIC_BASE_URL=served.url,
        ANTHROPIC_API_KEY="x",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "The tool said: " in done.stdout
    assert "forty-two" in done.stdout


def test_opencode_answers(served: Running, tmp_path: Path) -> None:
    opencode = find("opencode")
    config = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "oxplow": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "oxplow",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": "x"},
                "models": {"tiny": {"name": "tiny", "tool_call": True}},
            }
        },
        "model": "oxplow/tiny",
    }
    (tmp_path / "work").mkdir()
    (tmp_path / "work/opencode.json").write_text(json.dumps(config))
    done = run(
        [opencode, "run", "hm</think>Hello from the engine"],
        tmp_path,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Hello from the engine" in done.stdout
