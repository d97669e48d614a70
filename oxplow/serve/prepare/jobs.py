"""The jobs that worker processes run: one request's bytes in, prepared work out.

Owns the choice of a preparer by endpoint and the one copy of tokenizer and template in a process.
Knows no HTTP and no pool.
Invariant: a job depends on its arguments only; whatever the client sent, it ends in a result or in
a RequestError.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from oxplow.serve.formats.history import normalise
from oxplow.serve.model_files import read_model_files
from oxplow.serve.prepare.chat import ChatPreparer
from oxplow.serve.prepare.completions import CompletionPreparer
from oxplow.serve.prepare.fields import Fields, field_error, parse_object, token_ids
from oxplow.serve.prepare.messages import messages_to_chat
from oxplow.serve.prepare.prepared import Prepared, PrepareSettings
from oxplow.serve.prepare.responses import responses_to_chat
from oxplow.serve.prepare.sampling import read_defaults
from oxplow.serve.prepare.tools import read_tools
from oxplow.serve.text import load_text

__all__ = ["count_tokens", "detokenize", "prepare", "tokenize", "warm_up"]


class _Kitchen:
    """A model's tokenizer, template and facts, read once in a process."""

    def __init__(self, settings: PrepareSettings) -> None:
        self.files = read_model_files(settings.directory)
        self.text = load_text(settings.directory, settings.template_file)
        defaults = read_defaults(settings.directory)
        self.chat = ChatPreparer(self.text, self.files, defaults, settings)
        self.completions = CompletionPreparer(self.text.vocabulary, self.files, defaults, settings)


@lru_cache(maxsize=4)
def _kitchen(settings: PrepareSettings) -> _Kitchen:
    return _Kitchen(settings)


def warm_up(settings: PrepareSettings) -> bool:
    """Read the model's files ahead of the first request."""
    _kitchen(settings).text.vocabulary.encode_plain("ready")
    return True


def prepare(
    settings: PrepareSettings, body: bytes, endpoint: str, most: int | None = None
) -> Prepared:
    """Prepare a request of `endpoint`: chat, completions, responses or messages.

    Raises RequestError early where the prompt has more than `most` tokens.
    """
    kitchen = _kitchen(settings)
    values = parse_object(body)
    match endpoint:
        case "completions":
            return kitchen.completions.prepare(values, most)
        case "responses":
            chat, extra = responses_to_chat(values)
            return kitchen.chat.prepare(chat, extra, most)
        case "messages":
            chat, extra = messages_to_chat(values)
            return kitchen.chat.prepare(chat, extra, most)
    return kitchen.chat.prepare(values, most=most)


def tokenize(settings: PrepareSettings, body: bytes, most: int | None = None) -> dict[str, Any]:
    """Return the token ids of `prompt`, or of `messages` through the chat template.

    Raises RequestError early for more than `most`; here and in `count_tokens`.
    """
    kitchen = _kitchen(settings)
    values = parse_object(body)
    if values.get("messages") is not None:
        ids = _chat_ids(kitchen, values, most)
    else:
        prompt = values.get("prompt")
        if not isinstance(prompt, str):
            raise field_error("prompt", prompt, "text, or messages in its place")
        ids = kitchen.text.vocabulary.encode_template(prompt, most)
    answer: dict[str, Any] = {"count": len(ids), "tokens": ids}
    if Fields(values).flag("return_token_strs"):
        vocabulary = kitchen.text.vocabulary
        answer["token_strs"] = [vocabulary.decode([i], skip_special=False) for i in ids]
    return answer


def detokenize(settings: PrepareSettings, body: bytes) -> dict[str, Any]:
    """Return the text of `tokens`."""
    kitchen = _kitchen(settings)
    values = parse_object(body)
    ids = token_ids(values.get("tokens"), "tokens", kitchen.files.vocab_size)
    return {"prompt": kitchen.text.vocabulary.decode(ids, skip_special=False)}


def count_tokens(settings: PrepareSettings, body: bytes, most: int | None = None) -> dict[str, Any]:
    """Count the prompt tokens of a `/v1/messages` body."""
    chat, _ = messages_to_chat(parse_object(body), needs_budget=False)
    return {"input_tokens": len(_chat_ids(_kitchen(settings), chat, most))}


def _chat_ids(kitchen: _Kitchen, values: Mapping[str, Any], most: int | None) -> list[int]:
    fields = Fields(values)
    conversation = normalise(values["messages"])
    prompt = kitchen.chat.prompt(fields, conversation, read_tools(fields))
    ids, _ = kitchen.chat.encode(prompt.text, conversation, most)
    return ids
