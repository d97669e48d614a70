"""The published description of the API, for clients and fuzzers.

Owns the document. Knows no handler.
Invariant: `model` is an enum of the served names, so that generated requests reach the handlers;
unknown fields are allowed everywhere, as they are in the handlers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["openapi_document"]

_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_ANY: dict[str, Any] = {"type": "object"}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "minimum": low, "maximum": high}


def _sampling() -> dict[str, Any]:
    return {
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "top_k": _whole(-1, 1000),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.1, 2),
        "seed": _whole(0, 2**31),
        "stream": _FLAG,
        "stop": {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]},
    }


def _chat(names: Sequence[str]) -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role", "content"],
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
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        "max_completion_tokens": _whole(1, 16),
        "n": _whole(1, 3),
        "logprobs": _FLAG,
        "top_logprobs": _whole(0, 20),
        **_sampling(),
    }
    return {"type": "object", "required": ["model", "messages"], "properties": properties}


def _completion(names: Sequence[str]) -> dict[str, Any]:
    some = {"type": "string", "minLength": 1}
    prompt = {"oneOf": [some, {"type": "array", "items": some, "minItems": 1, "maxItems": 4}]}
    properties = {
        "model": {"enum": list(names)},
        "prompt": prompt,
        "max_tokens": _whole(0, 16),
        "echo": _FLAG,
        "logprobs": _whole(0, 5),
        **_sampling(),
    }
    return {"type": "object", "required": ["model", "prompt"], "properties": properties}


def _responses(names: Sequence[str]) -> dict[str, Any]:
    properties = {
        "model": {"enum": list(names)},
        "input": _TEXT,
        "instructions": _TEXT,
        "max_output_tokens": _whole(1, 16),
        "stream": _FLAG,
        "temperature": _number(0, 2),
    }
    return {"type": "object", "required": ["model", "input"], "properties": properties}


def _messages(names: Sequence[str]) -> dict[str, Any]:
    message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
    }
    properties = {
        "model": {"enum": list(names)},
        "messages": {"type": "array", "items": message, "minItems": 1},
        "system": _TEXT,
        "max_tokens": _whole(1, 16),
        "stream": _FLAG,
    }
    required = ["model", "messages", "max_tokens"]
    return {"type": "object", "required": required, "properties": properties}


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
    answers = {"200": {"description": "done"}, "503": {"description": "not ready"}}
    return {"get": {"summary": summary, "responses": answers}}


def openapi_document(names: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server that serves `names`."""
    tokens = {"type": "object", "required": ["prompt"], "properties": {"prompt": _TEXT}}
    ids = {
        "type": "object",
        "required": ["tokens"],
        "properties": {"tokens": {"type": "array", "items": _whole(0, 100)}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Oxplow", "version": "1"},
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation", _chat(names)),
            "/v1/completions": _post("Continue a text", _completion(names)),
            "/v1/responses": _post("Answer items", _responses(names)),
            "/v1/messages": _post("Answer messages", _messages(names)),
            "/tokenize": _post("Text to token ids", tokens),
            "/detokenize": _post("Token ids to text", ids),
            "/v1/models": _get("List the served models"),
            "/health": _get("Is the server alive"),
            "/ready": _get("Are requests served in time"),
            "/metrics": _get("Numbers for Prometheus"),
        },
    }
