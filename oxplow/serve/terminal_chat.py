"""One conversation in a terminal or a pipe: what is typed, what it means, what is shown.

Owns the slash commands, the messages, pictures by path and the files of saved talks. Knows no
option of a command and no engine beyond `LLM`.
Invariant: what was said stays in the conversation, also where an answer was interrupted; a failure
changes nothing and is told in one sentence.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from oxplow.errors import OxplowError, RequestError, TransferError
from oxplow.serve.sessions import check_name

if TYPE_CHECKING:
    from oxplow.serve.llm import LLM

__all__ = ["TerminalChat"]

_HELP = """\
/help           this list
/image PATH     a picture that goes with the next text; may be repeated
/reset          a new conversation under the same --system text
/save NAME      keep the conversation and its cached state in --sessions-dir
/load NAME      go on with a kept one; what was computed is not computed again
/exit           leave; so does the end of input
A line that ends in a backslash goes on in the next; \"\"\" opens a text of several lines and closes
it; several lines that are pasted at once are one text. A text that begins with a slash: // first.
"""


class TerminalChat:
    """Takes texts and commands one at a time; `shows` None is quiet, answer leaves thinking out."""

    def __init__(
        self,
        llm: LLM,
        *,
        system: str | None,
        fields: Mapping[str, Any],
        sessions_dir: Path | None,
        shows: Literal["all", "answer"] | None,
    ) -> None:
        self._llm, self._fields, self._folder, self._shows = llm, fields, sessions_dir, shows
        self._first = [{"role": "system", "content": system}] if system else []
        self._is_terminal = sys.stdout.isatty()
        self._out = Console(highlight=False, markup=False)
        self._pictures: list[dict[str, Any]] = []
        self._session = "chat" if sessions_dir is not None else None
        self.messages: list[dict[str, Any]] = list(self._first)

    def take(self, text: str) -> bool:
        """Answer a text or do a command; False where it was told to leave."""
        command, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        try:
            match command:
                case "/exit" | "/quit":
                    return False
                case "/help":
                    sys.stderr.write(_HELP)
                case "/reset" | "/new":
                    self.messages, self._pictures = list(self._first), []
                    self._say("a new conversation")
                case "/image":
                    self._pictures.append(_picture(Path(rest.strip("'\"")).expanduser()))
                    self._say(f"{rest} goes with the next text")
                case "/save":
                    self._save(rest)
                case "/load":
                    self._load(rest)
                case _ if command.startswith("/") and not command.startswith("//"):
                    if "/" not in command[1:]:
                        raise RequestError("unknown command", got=command, wanted="/help")
                    self._answer(text)  # a path is a text
                case _ if command:
                    self._answer(text.replace("//", "/", 1) if command.startswith("//") else text)
        except OxplowError as error:
            sys.stderr.write(f"oxplow: {error}\n")
        return True

    def _answer(self, text: str) -> None:
        part = {"type": "text", "text": text}
        content: Any = [*self._pictures, part] if self._pictures else text
        asked = [*self.messages, {"role": "user", "content": content}]
        said: dict[bool, list[str]] = {True: [], False: []}
        pieces = self._llm.stream(asked, session=self._session, **self._fields)
        was_cut = False
        try:
            for piece in pieces:
                self._show(piece.text, is_reasoning=piece.is_reasoning, said=said)
                said[piece.is_reasoning].append(piece.text)
        except KeyboardInterrupt:
            was_cut = True  # the answer so far stays
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        if self._shows is not None:
            self._out.print()
        if was_cut:
            self._say("stopped; the answer so far stays in the conversation")
        self._pictures = []
        answer = {"role": "assistant", "content": "".join(said[False])}
        if said[True]:
            answer["reasoning_content"] = "".join(said[True])
        self.messages = [*asked, answer]

    def _show(self, text: str, *, is_reasoning: bool, said: Mapping[bool, list[str]]) -> None:
        """Show a piece: thinking dim on a terminal, on standard error in a pipe."""
        if self._shows is None or (is_reasoning and self._shows == "answer"):
            return
        if is_reasoning and not self._is_terminal:
            sys.stderr.write(text)
            sys.stderr.flush()
            return
        if not is_reasoning and said[True] and not said[False]:
            if self._is_terminal and self._shows == "all":
                self._out.print("\n")
            elif self._shows == "all":
                sys.stderr.write("\n")
            text = text.lstrip("\n")
        self._out.print(text, end="", style="dim" if is_reasoning else None, soft_wrap=True)

    def _say(self, text: str) -> None:
        """Say something that is no answer, where somebody watches."""
        if sys.stdin.isatty():
            sys.stderr.write(f"({text})\n")

    def _save(self, name: str) -> None:
        path = self._talk_file(name)
        tokens = 0
        try:
            tokens = self._llm.save_session(self._session or "", as_name=name)
        except (RequestError, TransferError) as error:
            # Too short for a whole block, or nothing said: the messages alone are kept.
            sys.stderr.write(f"oxplow: only the messages are kept: {error}\n")
        try:
            part = path.with_name(f".{path.name}.{os.getpid()}.part")
            mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(os.open(part, mode, 0o600), "w", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False)
            part.replace(path)
        except OSError as error:
            why = error.strerror
            raise TransferError("the talk cannot be kept", got=why, where=path) from error
        self._say(f"kept as {name}: {len(self.messages)} messages, {tokens} tokens of state")

    def _load(self, name: str) -> None:
        path = self._talk_file(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["messages"]
        except OSError as error:
            raise RequestError("no such talk is kept", got=name, where=path.parent) from error
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError("the file of the talk is damaged", where=path) from error
        if not isinstance(found, list):
            raise TransferError("the file of the talk is damaged", where=path)
        self.messages, self._pictures = found, []
        tokens = 0
        try:
            tokens = self._llm.load_session(name)
        except OxplowError as error:
            sys.stderr.write(f"oxplow: its state is computed anew: {error}\n")
        self._say(f"{name}: {len(found)} messages, {tokens} tokens of state")

    def _talk_file(self, name: str) -> Path:
        if self._folder is None:
            raise RequestError(
                "there is nowhere to keep it", wanted="oxplow chat --sessions-dir DIR"
            )
        return self._folder / f"{check_name(name)}.chat.json"


def _picture(path: Path) -> dict[str, Any]:
    """Read a picture as a message part. Raises RequestError where the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError("the picture cannot be read", got=error.strerror, where=path) from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
