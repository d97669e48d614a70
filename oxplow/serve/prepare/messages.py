"""Anthropic's message form, brought into the chat form.

Owns the fields of `/v1/messages`. Knows no template and no tokens.
Invariant: what the two forms share arrives unchanged, in the order in which it was said; a tool
type that cannot be served is dropped.

The first system block of Claude Code is a billing line that differs between sessions. It stands
before everything else and would cost each session the whole prefix cache, so it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oxplow.serve.prepare.fields import Fields, field_error

__all__ = ["messages_to_chat"]

_BILLING = "x-anthropic-billing-header:"
_SHARED = ("model", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "cache_salt")
_EFFORTS: Mapping[str, str] = {"low": "low", "medium": "medium", "high": "high"}


def messages_to_chat(
    body: Mapping[str, Any], *, needs_budget: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chat body and what the answer repeats. Raises RequestError."""
    fields = Fields(body)
    budget = fields.integer("max_tokens", 1, 2**31 - 1)
    if budget is None and needs_budget:
        raise field_error("max_tokens", None, "a whole number from 1 on")
    messages = fields.items("messages")
    if not messages:
        raise field_error("messages", messages, "at least one message")
    chat: dict[str, Any] = {key: body[key] for key in _SHARED if key in body}
    if budget is not None:
        chat["max_tokens"] = budget
    chat["messages"] = _system(body.get("system"))
    places = ["system"] * len(chat["messages"])
    for number, message in enumerate(messages):
        chat["messages"] += _message(message, f"messages.{number}")
        places += [f"messages.{number}"] * (len(chat["messages"]) - len(places))
    stops = fields.texts("stop_sequences", 64)
    if stops:
        chat["stop"] = list(stops)[:16]
    chat |= _tools(fields)
    _thinking(fields, chat)
    return chat, {"api": "messages", "places": places}


def _system(system: Any) -> list[dict[str, Any]]:
    """Return the system message; one for all blocks, without the billing line."""
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    if not isinstance(blocks, list):
        raise field_error("system", system, "text or a list of text blocks")
    texts: list[str] = []
    for number, block in enumerate(blocks):
        text = block.get("text") if isinstance(block, Mapping) else None
        if not isinstance(text, str):
            raise field_error(f"system.{number}", block, "a text block")
        if not text.startswith(_BILLING):
            texts.append(text)
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _message(message: Any, where: str) -> list[dict[str, Any]]:
    """Return one message as one or more: tool results become messages of their own."""
    if not isinstance(message, Mapping):
        raise field_error(where, message, "an object")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise field_error(f"{where}.role", role, "user, assistant or system")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list):
        raise field_error(f"{where}.content", content, "text or a list of blocks")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise field_error(f"{where}.content.{number}", block, "an object")
    if role == "assistant":
        return [_assistant(content, where)]
    results = [_result(b, where) for b in content if b.get("type") == "tool_result"]
    others = [_block(b) for b in content if b.get("type") != "tool_result"]
    return results + ([{"role": role, "content": others}] if others else [])


def _assistant(content: list[Mapping[str, Any]], where: str) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    parts: list[Any] = []
    for number, block in enumerate(content):
        if block.get("type") != "tool_use":
            parts.append(_block(block))
            continue
        name, given = block.get("name"), block.get("input", {})
        if not isinstance(name, str) or not isinstance(given, Mapping):
            raise field_error(f"{where}.content.{number}", block, "a name and an input object")
        function = {"name": name, "arguments": dict(given)}
        calls.append({"id": block.get("id"), "type": "function", "function": function})
    return {"role": "assistant", "content": parts, "tool_calls": calls}


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = [_block(part) if isinstance(part, Mapping) else part for part in content]
    elif content is not None and not isinstance(content, str):
        raise field_error(f"{where}.content", content, "text or a list of blocks")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a block as a chat part; a text document becomes its text."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, Mapping):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return {"type": "text", "text": source["data"]}
        if source.get("type") == "content":
            inner = source.get("content")
            return {"type": "text", "text": inner if isinstance(inner, str) else ""}
    return block


def _tools(fields: Fields) -> dict[str, Any]:
    listed = fields.items("tools")
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(listed or []):
        if not isinstance(tool, Mapping):
            raise field_error(f"tools.{number}", tool, "an object")
        if tool.get("type", "custom") != "custom" or "name" not in tool:
            if "type" not in tool:
                raise field_error(f"tools.{number}.name", None, "text")
            continue  # a tool of the other vendor's servers
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool.get("input_schema") or {}
        tools.append({"type": "function", "function": function})
    chat: dict[str, Any] = {"tools": tools} if tools else {}
    choice = fields.inner("tool_choice")
    if choice is None:
        return chat
    match choice.values.get("type"):
        case "auto" | "none" as kind:
            chat["tool_choice"] = kind
        case "any":
            chat["tool_choice"] = "required"
        case "tool":
            function = {"name": choice.values.get("name")}
            chat["tool_choice"] = {"type": "function", "function": function}
        case kind:
            raise field_error("tool_choice.type", kind, "auto, any, tool or none")
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _thinking(fields: Fields, chat: dict[str, Any]) -> None:
    """Bring `thinking` and `output_config` over; thinking goes off where that is possible."""
    thinking = fields.inner("thinking")
    if thinking is not None and thinking.values.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    config = fields.inner("output_config")
    if config is None:
        return
    effort = config.text("effort")
    if effort is not None and "reasoning_effort" not in chat:
        chat["reasoning_effort"] = _EFFORTS.get(effort, "max")
    form = config.inner("format")
    if form is not None and form.values.get("type") == "json_schema":
        schema = {"name": "answer", "schema": form.values.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
