"""The published description of the API, for clients and fuzzers.

Owns the document. Knows no handler.
Invariant: `model` is an enum of the served names, so that generated requests reach the handlers;
unknown fields are allowed everywhere, and null where a field may be absent, as they are in the
handlers; a range that is published is the one that is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["openapi_document"]

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_SOME: dict[str, Any] = {"type": "string", "minLength": 1}
_ANY: dict[str, Any] = {"type": "object"}
_MOST = 2**31 - 1
_COUNTED = ("messages", "system")  # what the number of prompt tokens depends on


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _object(required: Sequence[str], properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object's schema; null is the same as absent for what is not required."""
    told = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    return {"type": "object", "required": list(required), "properties": told}


def _sampling() -> dict[str, Any]:
    return {
        "temperature": _number(0, 100),
        "top_p": _number(0, 1),
        "top_k": _whole(-1, _MOST),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        "seed": _whole(-(2**63), 2**64 - 1),
        "stream": _FLAG,
        "stop": {"oneOf": [_SOME, {"type": "array", "items": _SOME, "maxItems": 16}]},
    }


def _chat(names: Sequence[str]) -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {
                "oneOf": [
                    _TEXT,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
                        },
                    },
                ]
            },
        },
    }
    tool = {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": _TEXT, "description": _TEXT, "parameters": _ANY},
            },
        },
    }
    properties = {
        "model": {"enum": list(names)},
        "messages": {"type": "array", "items": message, "minItems": 1},
        "tools": {"type": "array", "items": tool},
        "tool_choice": {"enum": ["auto", "none", "required"]},
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        "max_completion_tokens": _whole(0, _MOST),
        "n": _whole(1, 128),
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, 20),
        **_sampling(),
    }
    return _object(["messages"], properties)


def _completion(names: Sequence[str], vocab_size: int) -> dict[str, Any]:
    ids = {"type": "array", "items": _whole(0, vocab_size - 1), "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": 256}
    prompt = {"anyOf": [_SOME, ids, *({**several, "items": each} for each in (_SOME, ids))]}
    properties = {
        "model": {"enum": list(names)},
        "prompt": prompt,
        "max_tokens": _whole(0, _MOST),
        "echo": _FLAG,
        "logprobs": _whole(0, 20),
        **_sampling(),
    }
    return _object(["prompt"], properties)


def _responses(names: Sequence[str]) -> dict[str, Any]:
    properties = {
        "model": {"enum": list(names)},
        "input": _TEXT,
        "instructions": _TEXT,
        "max_output_tokens": _whole(1, _MOST),
        "stream": _FLAG,
        "temperature": _number(0, 100),
    }
    return _object(["input"], properties)


def _messages(names: Sequence[str], *, needs_budget: bool = True) -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [_TEXT, {"type": "null"}]},
        },
    }
    properties = {
        "model": {"enum": list(names)},
        "messages": {"type": "array", "items": message, "minItems": 1},
        "system": _TEXT,
        "max_tokens": _whole(1, _MOST),
        "stream": _FLAG,
    }
    if not needs_budget:
        return _object(["messages"], {name: properties[name] for name in _COUNTED})
    return _object(["messages", "max_tokens"], properties)


def _post(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers = {
        "200": {"description": "the answer; server-sent events when stream is true"},
        "400": {"description": "the request is wrong"},
        "404": {"description": "the model is not served here"},
        "429": {"description": "the queue is full"},
        "503": {"description": "the engine is not there"},
    }
    return {"post": {"summary": summary, "requestBody": body, "responses": answers}}


def _get(summary: str) -> dict[str, Any]:
    answers = {
        "200": {"description": "done"},
        "404": {"description": "the server has none"},
        "503": {"description": "not ready"},
    }
    return {"get": {"summary": summary, "responses": answers}}


def _session(method: str, summary: str) -> dict[str, Any]:
    name = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
    answers = {
        "200": {"description": "done"},
        "400": {"description": "the name or the body is none"},
        "404": {"description": "there is no such session, or the server keeps none"},
        "409": {"description": "the file does not fit this server, or nothing is cached"},
        "415": {"description": "the body is not JSON"},
        "429": {"description": "there is no room"},
        "503": {"description": "the engine is not there"},
    }
    told: dict[str, Any] = {
        "summary": summary,
        "parameters": [{"name": "name", "in": "path", "required": True, "schema": name}],
        "responses": answers,
    }
    if method == "post":
        content = {"application/json": {"schema": _ANY}}
        told["requestBody"] = {"required": True, "content": content}
    return {method: told}


def openapi_document(names: Sequence[str], vocab_size: int) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server that serves `names`."""
    tokens = {"type": "object", "required": ["prompt"], "properties": {"prompt": _TEXT}}
    ids = {
        "type": "object",
        "required": ["tokens"],
        "properties": {"tokens": {"type": "array", "items": _whole(0, vocab_size - 1)}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Oxplow", "version": "1"},
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation", _chat(names)),
            "/v1/completions": _post("Continue a text", _completion(names, vocab_size)),
            "/v1/responses": _post("Answer items", _responses(names)),
            "/v1/messages": _post("Answer messages", _messages(names)),
            "/v1/messages/count_tokens": _post(
                "Count a prompt", _messages(names, needs_budget=False)
            ),
            "/tokenize": _post("Text to token ids", tokens),
            "/detokenize": _post("Token ids to text", ids),
            "/v1/models": _get("List the served models"),
            "/sessions": _get("List the named sessions"),
            "/sessions/{name}": _session("get", "Describe a session"),
            "/sessions/{name}/save": _session("post", "Save a session to its file"),
            "/sessions/{name}/load": _session("post", "Load a session from its file"),
            "/health": _get("Is the server alive"),
            "/ready": _get("Are requests served in time"),
            "/metrics": _get("Numbers for Prometheus"),
        },
    }
