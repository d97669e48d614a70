"""The published description is what the handlers do: ranges, null, names."""

from collections.abc import Iterator
from typing import Any

import pytest

from oxplow.serve.api import app
from tests.serve.model_dir import VOCAB_SIZE
from tests.serve.running import Running

MESSAGES = [{"role": "user", "content": "</think>hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "</think>hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
# Their upper end is the context's, not the field's.
BUDGETS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
BESIDE = {"top_logprobs": {"logprobs": True}}


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    found = server.client.get("/openapi.json").json()
    assert isinstance(found, dict)
    return found


def fields(document: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, schema and whether null is allowed, of each field of a body."""
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    for name, told in schema["properties"].items():
        choices = told.get("anyOf", [told])
        yield name, choices[0], {"type": "null"} in choices


@pytest.mark.parametrize("path", BODIES)
def test_ranges_are_those_that_are_checked(
    server: Running, document: dict[str, Any], path: str
) -> None:
    def status(name: str, value: object) -> int:
        body = {**BODIES[path], **BESIDE.get(name, {}), name: value}
        return server.client.post(path, json=body).status_code

    checked = 0
    for name, schema, may_be_null in fields(document, path):
        if may_be_null:
            assert status(name, None) == 200, name
        if schema.get("type") not in ("integer", "number") or name in BUDGETS:
            continue
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        assert status(name, schema["maximum"]) == 200, name
        assert status(name, schema["maximum"] + 1) == 400, name
        assert status(name, low) == (200 if "minimum" in schema else 400), name
        assert status(name, low - 1) == 400, name
        checked += 1
    assert checked >= (7 if path.endswith("completions") else 0)


def test_ids_and_names_are_this_server_s(server: Running, document: dict[str, Any]) -> None:
    (_, told, _) = next(fields(document, "/detokenize"))
    assert told["items"]["maximum"] == VOCAB_SIZE - 1
    for tokens, status in (([VOCAB_SIZE - 1, 33.0], 200), ([VOCAB_SIZE], 400), ([0.5], 400)):
        answer = server.client.post("/detokenize", json={"tokens": tokens})
        assert answer.status_code == status, tokens
    names = {name: schema for name, schema, _ in fields(document, "/v1/chat/completions")}
    assert names["model"]["enum"] == ["tiny", "org/other"]


def test_every_served_path_is_described(document: dict[str, Any]) -> None:
    plain = {"/", "/openapi.json", "/version", "/v1/models/{name:path}"}
    served = {path for path, _ in (*app._POSTS, *app._GETS)}
    assert served - plain == set(document["paths"])
