"""`oxplow chat`: a conversation in the terminal.

Owns the reading of lines, pictures by path, and the printing; the work is `LLM`'s.
Invariant: an interrupt stops the answer, a second one at the prompt leaves; what was said stays in
the conversation.
"""

import base64
import json
import mimetypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from oxplow.errors import OxplowError, RequestError
from oxplow.serve.console import AsJson, session
from oxplow.serve.flags import MODEL_FLAGS, Given, parameter, with_flags

if TYPE_CHECKING:
    from oxplow.serve.llm import LLM

__all__ = ["register"]

_SYSTEM = Annotated[str | None, typer.Option("--system", help="What the model is told first.")]
_TOKENS = Annotated[int | None, typer.Option("--max-tokens", help="Longest answer in tokens.")]
_HIDE = Annotated[bool, typer.Option("--hide-thinking", help="Show the answers only.")]
_HELP = "Write and press Enter. /image PATH adds a picture, /new starts anew, /exit leaves."


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (
        parameter("system", _SYSTEM, None),
        parameter("max_tokens", _TOKENS, None),
        parameter("hides_thinking", _HIDE, False),
        parameter("as_json", AsJson, False),
    )
    example = "Example: oxplow chat --system 'Answer in one line.'"
    app.command("chat", epilog=example)(with_flags(_chat, MODEL_FLAGS, own))


def _chat(
    context: typer.Context,
    given: Given,
    *,
    system: str | None,
    max_tokens: int | None,
    hides_thinking: bool,
    as_json: bool,
) -> None:
    """Talk to a model in the terminal, without a server; lines may come from a pipe."""
    from oxplow.serve.llm import open_llm

    with open_llm(session(context).load(given)) as llm:
        talk = _Talk(llm, system, max_tokens, hides_thinking=hides_thinking or as_json)
        if sys.stdin.isatty():
            sys.stderr.write(_HELP + "\n")
        talk.run(is_quiet=as_json)
    if as_json:
        sys.stdout.write(json.dumps({"messages": talk.messages}) + "\n")


class _Talk:
    """One conversation."""

    def __init__(
        self, llm: "LLM", system: str | None, max_tokens: int | None, *, hides_thinking: bool
    ) -> None:
        self._llm, self._max_tokens = llm, max_tokens
        self._hides_thinking = hides_thinking
        self._first = [{"role": "system", "content": system}] if system else []
        self._console = Console(highlight=False, markup=False)
        self._pictures: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = list(self._first)

    def run(self, *, is_quiet: bool) -> None:
        """Read lines until the end of input, an interrupt, or /exit."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return
            if line.strip() == "/exit":
                return
            try:
                self._take(line, is_quiet=is_quiet)
            except OxplowError as error:
                sys.stderr.write(f"oxplow: {error}\n")

    def _take(self, line: str, *, is_quiet: bool) -> None:
        command, _, rest = line.strip().partition(" ")
        if command == "/new":
            self.messages, self._pictures = list(self._first), []
        elif command == "/image":
            self._pictures.append(_picture(Path(rest.strip()).expanduser()))
        elif line.strip():
            self._answer(line, is_quiet=is_quiet)

    def _answer(self, line: str, *, is_quiet: bool) -> None:
        text = {"type": "text", "text": line}
        content: Any = [*self._pictures, text] if self._pictures else line
        self._pictures = []
        asked = [*self.messages, {"role": "user", "content": content}]
        said: dict[bool, list[str]] = {True: [], False: []}
        pieces = self._llm.stream(asked, max_tokens=self._max_tokens)
        try:
            for piece in pieces:
                said[piece.is_reasoning].append(piece.text)
                if not is_quiet and not (piece.is_reasoning and self._hides_thinking):
                    style = "dim" if piece.is_reasoning else None
                    self._console.print(piece.text, end="", style=style, soft_wrap=True)
        except KeyboardInterrupt:
            pass  # the answer so far stays
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        if not is_quiet:
            self._console.print()
        told = {"role": "assistant", "content": "".join(said[False])}
        self.messages = [*asked, {**told, "reasoning_content": "".join(said[True])}]


def _picture(path: Path) -> dict[str, Any]:
    """Read a picture as a message part. Raises RequestError where the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError("the picture cannot be read", got=error.strerror, where=path) from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
