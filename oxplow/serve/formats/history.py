"""Conversations as clients send them, brought into the one form that chat templates take.

Owns roles, content parts, tool calls and their arguments. Knows no template and no pixels: pictures
and clips become places in the text, in order, and their sources are handed back.
Invariant: every message list that the OpenAI API allows gives one list of plain messages; different
spellings of the same history give the same list, so that they render to the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oxplow.errors import RequestError

__all__ = ["Conversation", "MediaSource", "normalise"]

_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "summary_text"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_VIDEO_PARTS = frozenset({"video_url", "input_video", "video"})
_THINKING_PARTS = frozenset({"thinking", "reasoning", "reasoning_text"})
_IGNORED_PARTS = frozenset({"redacted_thinking"})


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Say where a picture or clip comes from, a data URL or an address, and the field of it."""

    kind: Literal["image", "video"]
    url: str
    param: str


@dataclass(slots=True)
class Conversation:
    """Hold messages for the template and the sources of their pictures and clips, in order."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    media: list[MediaSource] = field(default_factory=list)


def normalise(messages: Any, param: str = "messages", places: Sequence[str] = ()) -> Conversation:
    """Read a message list. Raises RequestError that names the message at fault.

    `places` names each message as its client knows it, where it came in another form.
    """
    if not isinstance(messages, list):
        raise _refusal("messages must be a list", type(messages).__name__, "a list", param)
    if not messages:
        raise _refusal("messages is empty", "[]", "at least one message", param)
    conversation = Conversation()
    for number, message in enumerate(messages):
        where = places[number] if number < len(places) else f"{param}.{number}"
        if not isinstance(message, Mapping):
            raise _refusal("a message must be an object", type(message).__name__, "object", where)
        conversation.messages.append(_message(message, where, conversation.media))
    return conversation


def _message(message: Mapping[str, Any], where: str, media: list[MediaSource]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        wanted = "one of " + ", ".join(_ROLES)
        raise _refusal("unknown role", repr(role), wanted, f"{where}.role")
    thoughts: list[str] = []
    content = _content(message.get("content"), f"{where}.content", thoughts, media)
    plain: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if isinstance(message.get("name"), str):
        plain["name"] = message["name"]
    if plain["role"] == "tool":
        call_id = message.get("tool_call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise _refusal("tool_call_id must be text", call_id, "text", f"{where}.tool_call_id")
        plain["tool_call_id"] = call_id or ""
    if plain["role"] == "assistant":
        plain["reasoning_content"] = _thinking(message, where) + "".join(thoughts)
        plain["tool_calls"] = _tool_calls(message, where)
    return plain


def _thinking(message: Mapping[str, Any], where: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if isinstance(value, str):
            return value
        if value is not None and name == "reasoning_content":
            raise _refusal(f"{name} must be text", type(value).__name__, "text", f"{where}.{name}")
    return ""


def _content(
    content: Any, where: str, thoughts: list[str], media: list[MediaSource]
) -> str | list[dict[str, str]]:
    """Return text, or a part list where there are pictures; thinking parts go to `thoughts`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        wanted = "text, a list of parts, or null"
        raise _refusal("content has the wrong type", type(content).__name__, wanted, where)
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        parts += _part(part, f"{where}.{number}", thoughts, media)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(
    part: Any, where: str, thoughts: list[str], media: list[MediaSource]
) -> list[dict[str, str]]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    if not isinstance(part, Mapping):
        raise _refusal("a content part must be an object", type(part).__name__, "object", where)
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str):
        raise _refusal("a content part has no type", repr(kind), "text", f"{where}.type")
    if kind in _IGNORED_PARTS:
        return []
    if kind in _TEXT_PARTS:
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise _refusal("a text part has no text", type(text).__name__, "text", f"{where}.text")
        return [{"type": "text", "text": text}]
    if kind in _THINKING_PARTS:
        thoughts.append(str(part.get("thinking") or part.get("text") or ""))
        return []
    if kind in _IMAGE_PARTS:
        media.append(MediaSource("image", _address(part, "image", where), where))
        return [{"type": "image"}]
    if kind in _VIDEO_PARTS:
        media.append(MediaSource("video", _address(part, "video", where), where))
        return [{"type": "video"}]
    wanted = "text, image_url or video_url"
    raise _refusal("this type of content part is not supported", repr(kind), wanted, where)


def _address(part: Mapping[str, Any], kind: str, where: str) -> str:
    """Find the URL: `image_url: {url}`, `image_url: "..."`, or Anthropic's `source`."""
    value = part.get(f"{kind}_url", part.get("source", part.get(kind, part.get("url"))))
    if isinstance(value, Mapping):
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return f"data:{value.get('media_type', 'image/png')};base64,{value['data']}"
        value = value.get("url")
    if not isinstance(value, str) or not value:
        wanted = "a data URL"
        raise _refusal(f"the {kind} has no address", type(value).__name__, wanted, where)
    return value


def _tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), Mapping):
        calls = [{"function": message["function_call"]}]
    if calls is None:
        return []
    if not isinstance(calls, list):
        wanted = "a list"
        name = type(calls).__name__
        raise _refusal("tool_calls must be a list", name, wanted, f"{where}.tool_calls")
    return [_tool_call(call, f"{where}.tool_calls.{n}") for n, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _refusal("a tool call must be an object with a function", call, "object", where)
    if not isinstance(name, str) or not name:
        raise _refusal("a tool call has no name", name, "text", f"{where}.function.name")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return arguments as a mapping, decoded once; what is no JSON object stays readable."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            decoded = json.loads(arguments)
        except (ValueError, RecursionError):
            decoded = arguments
    else:
        decoded = arguments or {}
    if isinstance(decoded, Mapping):
        return {str(k): v for k, v in decoded.items()}
    return {"arguments": decoded}  # cut short by a length limit, or not an object


def _refusal(what: str, got: object, wanted: object, where: str) -> RequestError:
    return RequestError(
        what, got=got, wanted=wanted, where=where, param=where, code="invalid_messages"
    )
