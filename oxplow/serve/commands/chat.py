"""`oxplow chat`: a conversation in the terminal.

Owns the options and the reading of lines; one conversation is `oxplow.serve.terminal_chat`, the
work is `LLM`'s.
Invariant: an interrupt stops the answer, at the prompt it leaves; standard output carries answers
only where it is no terminal.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from oxplow.serve.console import AsJson, session
from oxplow.serve.flags import MODEL_FLAGS, SESSIONS_FLAG, Given, parameter, with_flags

__all__ = ["register"]

_SYSTEM = Annotated[str | None, typer.Option("--system", help="What the model is told first.")]
_TOKENS = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")
]
_HIDE = Annotated[bool, typer.Option("--hide-thinking", help="Show the answers only.")]
_NO_THINK = Annotated[bool, typer.Option("--no-think", help="Have the model answer at once.")]
_BLOCK = '"""'


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (
        parameter("system", _SYSTEM, None),
        parameter("max_tokens", _TOKENS, None),
        parameter("hides_thinking", _HIDE, False),
        parameter("no_think", _NO_THINK, False),
        parameter("as_json", AsJson, False),
    )
    example = "Example: oxplow chat --system 'Answer in one line.' --no-think"
    app.command("chat", epilog=example)(with_flags(_chat, (*MODEL_FLAGS, SESSIONS_FLAG), own))


def _chat(
    context: typer.Context,
    given: Given,
    *,
    system: str | None,
    max_tokens: int | None,
    hides_thinking: bool,
    no_think: bool,
    as_json: bool,
) -> None:
    """Talk to a model in the terminal, without a server; lines may come from a pipe.

    /help lists what else can be typed: pictures, texts of several lines, saving and loading.
    Ctrl-C stops an answer; at the prompt, it leaves. In a pipe standard output has the answers,
    thinking goes to standard error; --json prints the whole conversation at the end.
    """
    from oxplow.serve.llm import open_llm
    from oxplow.serve.terminal_chat import TerminalChat

    loaded = session(context).load(given)
    folder = loaded.runtime.serve.sessions_dir
    with open_llm(loaded) as llm:
        talk = TerminalChat(
            llm,
            system=system,
            fields={"max_tokens": max_tokens, "enable_thinking": False if no_think else None},
            sessions_dir=Path(folder) if folder else None,
            shows=None if as_json else "answer" if hides_thinking else "all",
        )
        if sys.stdin.isatty():
            sys.stderr.write("Write and press Enter; /help lists the commands.\n")
        for text in _texts():
            if not talk.take(text):
                break
    if as_json:
        sys.stdout.write(json.dumps({"messages": talk.messages}, ensure_ascii=False) + "\n")


def _texts() -> Iterator[str]:
    """Yield what is typed: a line, lines that end in a backslash, a block, or one paste.

    Ends with the input, or at an interrupt.
    """
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if is_terminal else "")
            while text.endswith("\\"):
                text = text[:-1] + "\n" + input(". " if is_terminal else "")
            if text.strip().startswith(_BLOCK):
                text = _block(text.strip()[len(_BLOCK) :], ". " if is_terminal else "")
            elif is_terminal:
                text = "\n".join([text, *_pasted()])
        except (EOFError, KeyboardInterrupt):
            return
        yield text


def _block(text: str, prompt: str) -> str:
    """Read up to the line that closes a block."""
    lines = [text] if text else []
    while not text.rstrip().endswith(_BLOCK):
        text = input(prompt)
        lines.append(text)
    lines[-1] = lines[-1].rstrip()[: -len(_BLOCK)]
    return "\n".join(lines).rstrip("\n")


def _pasted() -> list[str]:
    """Return the lines that stand in the terminal's buffer already: the rest of one paste."""
    import select

    lines: list[str] = []
    while select.select([sys.stdin], [], [], 0.02)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        lines.append(line.rstrip("\n"))
    return lines
