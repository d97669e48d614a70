"""Text and tokens: the chat template, encoding that a user cannot break, incremental decoding.

Owns the tokenizer files of a checkpoint. Knows no HTTP, no engine and no model.
Invariant: only the template writes control tokens. Text that came from outside is encoded without
the added vocabulary, so a message that spells `<|assistant|>` or `</think>` stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from oxplow.errors import ConfigError, RequestError
from oxplow.serve.slices import SlicedEncoder, too_long

__all__ = ["ChatText", "TextStream", "Vocabulary", "load_text"]

_MARK = "\ue0f1"  # a private-use character that breaks control strings inside outside text
_REPLACEMENT = "\ufffd"


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token table: ordinary tokens through `plain`, control tokens by exact string."""

    full: Tokenizer
    plain: SlicedEncoder
    control: Mapping[str, int]
    special_ids: frozenset[int]

    @property
    def size(self) -> int:
        """Number of ids, control tokens included."""
        return int(self.full.get_vocab_size(with_added_tokens=True))

    def encode_plain(self, text: str, most: int | None = None) -> list[int]:
        """Encode outside text; control strings in it become ordinary tokens.

        Raises RequestError as soon as there must be more than `most` tokens.
        """
        return self.plain.encode(text, most)

    def encode_template(self, text: str, most: int | None = None) -> list[int]:
        """Encode rendered text: control strings become their ids, marked ones stay text.

        Raises RequestError as soon as there must be more than `most` tokens.
        """
        ids: list[int] = []
        self._refuse_impossible(text, most)
        for piece in self._pieces(text):
            if piece in self.control:
                ids.append(self.control[piece])
            elif piece:
                ids.extend(self.plain.encode(piece.replace(_MARK, ""), most, len(ids)))
        if most is not None and len(ids) > most:
            raise too_long(most, len(ids))
        return ids

    def _refuse_impossible(self, text: str, most: int | None) -> None:
        """Refuse text that exceeds `most` even if every token were the longest one."""
        if most is None or not self.plain.is_byte_level:
            return
        longest = max([self.plain.longest_token, *map(len, self.control)])
        length = len(text) - text.count(_MARK)
        if length > most * longest:
            raise too_long(most, -(-length // longest))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text; half a character gives half its bytes."""
        name = self.full.id_to_token(token_id)
        if name is None:
            return b""
        if name in self.control or not all(c in _BYTE_OF for c in name):
            return self.decode([token_id], skip_special=False).encode()
        return bytes(_BYTE_OF[c] for c in name)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`; undecodable bytes become U+FFFD."""
        return str(self.full.decode(list(token_ids), skip_special_tokens=skip_special))

    def guard(self, text: str) -> str:
        """Break every control string in outside text, so that it never becomes a token."""
        clean = text.replace(_MARK, "")
        for word in self.control:
            if word in clean:
                clean = clean.replace(word, word[0] + _MARK + word[1:])
        return clean

    def _pieces(self, text: str) -> list[str]:
        if not self.control:
            return [text]
        words = sorted(self.control, key=len, reverse=True)
        return re.split("(" + "|".join(re.escape(w) for w in words) + ")", text)


class TextStream:
    """Turns token ids of one answer into text pieces, never splitting a character.

    A piece is withheld while its bytes are not yet a whole character; `finish` releases the rest.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._pending: list[int] = []
        self._context: list[int] = []

    def push(self, token_id: int) -> str:
        """Add one token; return the text that became certain."""
        self._pending.append(token_id)
        text = self._text()
        if (
            text.endswith(_REPLACEMENT) and len(self._pending) < 8
        ):  # a character has at most 4 bytes
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return what was withheld."""
        return self._release(self._text()) if self._pending else ""

    def _text(self) -> str:
        """Decode pending tokens after their context: word-start rules apply as in the whole."""
        decode = self._vocabulary.decode
        before = decode(self._context, skip_special=self._skip_special)
        both = decode(self._context + self._pending, skip_special=self._skip_special)
        return both[len(before) :]

    def _release(self, text: str) -> str:
        self._context = self._pending[-4:]
        self._pending = []
        return text


class ChatText:
    """A checkpoint's chat template over its vocabulary."""

    def __init__(
        self, vocabulary: Vocabulary, template: str | None, variables: Mapping[str, Any]
    ) -> None:
        self.vocabulary = vocabulary
        self._variables = dict(variables)
        self._source = template
        self._template = None if template is None else _environment().from_string(template)

    @property
    def has_template(self) -> bool:
        """False for a base model: chat is refused, completions work."""
        return self._template is not None

    def has_switch(self, name: str) -> bool:
        """Tell whether the template reads the variable `name`."""
        return self._source is not None and name in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages to prompt text; outside strings are guarded.

        `options` are template variables such as `enable_thinking` or `reasoning_effort`. Raises
        RequestError with the template's own message when the conversation does not fit it.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template", wanted="/v1/completions", code="no_chat_template"
            )
        try:
            return self._template.render(
                messages=self._guarded(messages),
                tools=self._guarded(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **(options or {})},
            )
        except RecursionError as error:  # in the walk here, in JSON, or in a template's macros
            raise RequestError(
                "the conversation or its tools are nested too deeply",
                param="messages",
                code="invalid_messages",
            ) from error
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error}",
                param="messages",
                code="invalid_messages",
            ) from error

    def encode(self, rendered: str, most: int | None = None) -> list[int]:
        """Encode rendered prompt text; raises RequestError for more than `most` tokens."""
        return self.vocabulary.encode_template(rendered, most)

    def _guarded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.vocabulary.guard(value)
        if isinstance(value, Mapping):
            return {self._guarded(k): self._guarded(v) for k, v in value.items()}
        if isinstance(value, Sequence):
            return [self._guarded(v) for v in value]
        return value


def load_text(directory: Path, template_file: Path | None = None) -> ChatText:
    """Read `tokenizer.json` and the chat template of a checkpoint.

    The template is `template_file`, else `chat_template.jinja`, else the one in
    `tokenizer_config.json`, else none. Raises ConfigError naming the file.
    """
    vocabulary = _load_vocabulary(directory / "tokenizer.json")
    settings = _read_json(directory / "tokenizer_config.json", required=False)
    variables = {
        key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")
    }
    return ChatText(vocabulary, _find_template(directory, settings, template_file), variables)


def _load_vocabulary(path: Path) -> Vocabulary:
    content = _read_json(path, required=True)
    added = content.get("added_tokens") or []
    try:
        full = Tokenizer.from_str(json.dumps(content))
        plain = Tokenizer.from_str(
            json.dumps(content | {"added_tokens": [], "post_processor": None})
        )
    except Exception as error:  # the library raises bare Exception for a damaged file
        raise ConfigError(f"the tokenizer does not load: {error}", where=path) from error
    return Vocabulary(
        full=full,
        plain=SlicedEncoder(plain, content),
        control={t["content"]: int(t["id"]) for t in added},
        special_ids=frozenset(int(t["id"]) for t in added if t.get("special")),
    )


def _find_template(
    directory: Path, settings: Mapping[str, Any], template_file: Path | None
) -> str | None:
    for path in (template_file, directory / "chat_template.jinja"):
        if path is not None and (path.exists() or path is template_file):
            try:
                return path.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"the chat template cannot be read: {error}", where=path
                ) from error
    stored = settings.get("chat_template")
    if isinstance(stored, list):  # named templates: the default one
        stored = next((t.get("template") for t in stored if t.get("name") == "default"), None)
    return stored if isinstance(stored, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Write JSON as the released templates expect it: no HTML escapes, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path.name}: {error}", where=path.parent) from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path.name} does not parse: {error}", where=path.parent) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} is not an object", got=type(content).__name__, where=path)
    return content
