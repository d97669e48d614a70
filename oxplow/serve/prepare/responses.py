"""The form of OpenAI's responses API, brought into the chat form.

Owns the fields of `/v1/responses`. Knows no template and no tokens.
Invariant: items become messages in the order in which they were said; an assistant's reasoning,
text and calls that follow each other become one message. Nothing is stored between requests.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from oxplow.errors import RequestError
from oxplow.serve.prepare.fields import Fields, field_error

__all__ = ["responses_to_chat", "seal_reasoning"]

_SHARED = (
    "model", "temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls", "seed",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop", "cache_salt",
    "chat_template_kwargs", "enable_thinking",
)  # fmt: skip
_REPEATED = (
    "instructions", "metadata", "parallel_tool_calls", "temperature", "top_p", "text",
    "tool_choice", "max_output_tokens", "reasoning", "truncation", "user", "store",
)  # fmt: skip
_SEAL = "oxplow1:"


def responses_to_chat(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chat body and what the answer repeats. Raises RequestError."""
    fields = Fields(body)
    if fields.has("previous_response_id"):
        raise RequestError(
            "responses are not stored here, so none can be continued",
            wanted="the whole history in input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    chat: dict[str, Any] = {key: body[key] for key in _SHARED if body.get(key) is not None}
    budget = fields.integer("max_output_tokens", 1, 2**31 - 1)
    if budget is not None:
        chat["max_completion_tokens"] = budget
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str | list):
        raise field_error("instructions", instructions, "text")
    given, places = _input(body.get("input"))
    if instructions:
        given, places = (
            [{"role": "system", "content": instructions}, *given],
            [
                "instructions",
                *places,
            ],
        )
    chat["messages"] = given
    tools, namespaces = _tools(fields.items("tools") or [])
    if tools:
        chat["tools"] = tools
    elif chat.get("tool_choice") in ("auto", "none"):
        del chat["tool_choice"]
    _text_format(fields, chat)
    reasoning = fields.inner("reasoning")
    if reasoning is not None and reasoning.has("effort"):
        chat["reasoning_effort"] = reasoning.text("effort")
    top = fields.integer("top_logprobs", 0, 20)
    if top:
        chat["logprobs"], chat["top_logprobs"] = True, top
    include = fields.items("include") or []
    extra = {key: body[key] for key in _REPEATED if key in body}
    extra |= {
        "api": "responses",
        "places": places,
        "tools": body.get("tools") or [],
        "namespaces": namespaces,
        "seals_reasoning": "reasoning.encrypted_content" in include,
    }
    return chat, extra


def seal_reasoning(text: str) -> str:
    """Return reasoning as an opaque text that the client sends back with its history."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def _unseal(sealed: Any) -> str:
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(sealed[len(_SEAL) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _input(given: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages, and the item that each of them begins with."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    if not isinstance(given, list) or not given:
        raise field_error("input", given, "text or a list of items, not empty")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for number, item in enumerate(given):
        where = f"input.{number}"
        if isinstance(item, str):
            item = {"role": "user", "content": item}
        if not isinstance(item, Mapping):
            raise field_error(where, item, "an object")
        _add_item(item, where, messages)
        places += [where] * (len(messages) - len(places))
    return messages, places


def _add_item(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role == "assistant":
                _assistant(messages)["content"] += _parts(item.get("content"))
            else:
                messages.append({"role": role, "content": item.get("content")})
        case "reasoning":
            _assistant(messages)["reasoning_content"] += _reasoning(item)
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages)["tool_calls"].append(call)
        case "function_call_output":
            output, call_id = item.get("output"), item.get("call_id")
            if output is not None and not isinstance(output, str | list):
                raise field_error(f"{where}.output", output, "text or a list of parts")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "item_reference":
            raise field_error(where, item, "a whole item: nothing is stored here")
        case kind if isinstance(kind, str):
            return  # calls of tools that this server dropped leave no trace in the prompt
        case kind:
            raise field_error(f"{where}.type", kind, "text")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that is being put together; a new one after anything else."""
    if not messages or messages[-1].get("role") != "assistant":
        fresh = {"role": "assistant", "content": [], "reasoning_content": "", "tool_calls": []}
        messages.append(fresh)
    return messages[-1]


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _reasoning(item: Mapping[str, Any]) -> str:
    """Return an item's thinking: sealed, else in its content, else in its summary."""
    sealed = _unseal(item.get("encrypted_content"))
    if sealed:
        return sealed
    for key in ("content", "summary"):
        parts = item.get(key)
        if isinstance(parts, list) and parts:
            return "".join(str(p.get("text") or "") for p in parts if isinstance(p, Mapping))
    return ""


def _tools(listed: list[Any]) -> tuple[list[Any], dict[str, str]]:
    """Return the functions, those inside namespaces too, and each one's namespace."""
    tools: list[Any] = []
    namespaces: dict[str, str] = {}
    for tool in listed:
        if isinstance(tool, Mapping) and tool.get("type") == "namespace":
            nested = tool.get("tools")
            for inner in nested if isinstance(nested, list) else []:
                tools.append(inner)
                if isinstance(inner, Mapping) and isinstance(inner.get("name"), str):
                    namespaces[inner["name"]] = str(tool.get("name") or "")
        else:
            tools.append(tool)
    return [t for t in tools if not _is_other_kind(t)], namespaces


def _is_other_kind(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "function") != "function"


def _text_format(fields: Fields, chat: dict[str, Any]) -> None:
    text = fields.inner("text")
    form = None if text is None else text.inner("format")
    if form is None or form.values.get("type") in (None, "text"):
        return
    if form.values["type"] == "json_schema":
        inner = {k: form.values.get(k) for k in ("name", "schema", "strict") if k in form.values}
        chat["response_format"] = {"type": "json_schema", "json_schema": inner}
    else:
        chat["response_format"] = dict(form.values)
