"""Many requests from a file, their answers to a file, resumable.

Owns the two file forms and the order of work. Knows no engine beyond `LLM`.
Invariant: a line of the output is one whole answer; a line of the input whose answer is there is
not asked again; answers come in the order in which they end.

Input lines are OpenAI's batch form ({"custom_id", "url", "body"}) or a bare body with `messages` or
`prompt`, which is named by its line number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxplow.errors import CapacityError, ConfigError, OxplowError, RequestError

__all__ = ["BatchItem", "BatchReport", "finished_names", "read_items", "run_batch"]

Answer = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
_ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request: its name, its endpoint (chat or completions) and its body."""

    name: str
    endpoint: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class BatchReport:
    """Count what became of a file."""

    asked: int = 0
    skipped: int = 0
    failed: int = 0
    completion_tokens: int = 0


def read_items(path: Path) -> list[BatchItem]:
    """Read the input file. Raises ConfigError that names the line."""
    items: list[BatchItem] = []
    names: set[str] = set()
    for number, line in _lines(path):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                "a line is not JSON", got=str(error), where=f"{path}:{number}"
            ) from None
        item = _item(value, number, path)
        if item.name in names:
            raise ConfigError("custom_id is not unique", got=item.name, where=f"{path}:{number}")
        names.add(item.name)
        items.append(item)
    return items


def finished_names(path: Path) -> set[str]:
    """Return the names that the output answers already; a last line that was cut is removed."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    names: set[str] = set()
    for line in whole.decode("utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError as error:
            raise ConfigError("the output holds a line that is not ours", where=path) from error
        names.add(str(told.get("custom_id")))
    return names


async def run_batch(
    items: list[BatchItem],
    output: Path,
    answer: Answer,
    *,
    concurrency: int,
    on_done: Callable[[BatchReport], None],
) -> BatchReport:
    """Answer `items` that the output lacks, `concurrency` at a time, and append the answers."""
    done = finished_names(output)
    left = [item for item in items if item.name not in done]
    report = BatchReport(skipped=len(items) - len(left))
    places = asyncio.Semaphore(concurrency)
    with output.open("a", encoding="utf-8") as file:

        async def one(item: BatchItem) -> None:
            async with places:
                told = await _answered(item, answer)
            report.asked += 1
            report.failed += told["error"] is not None
            usage = (told["response"].get("body") or {}).get("usage") or {}
            report.completion_tokens += usage.get("completion_tokens", 0)
            file.write(json.dumps(told, ensure_ascii=False) + "\n")
            file.flush()
            on_done(report)

        await asyncio.gather(*(one(item) for item in left))
    return report


async def _answered(item: BatchItem, answer: Answer) -> dict[str, Any]:
    """Return one output line; a full queue is waited for."""
    while True:
        try:
            body = await answer(item.endpoint, item.body)
        except CapacityError:
            await asyncio.sleep(1.0)
            continue
        except OxplowError as error:
            code = error.code if isinstance(error, RequestError) else None
            told = {"code": code, "message": str(error)}
            status = 400 if isinstance(error, RequestError) else 500
            return {
                "custom_id": item.name,
                "response": {"status_code": status, "body": None},
                "error": told,
            }
        response = {"status_code": 200, "body": body}
        return {"custom_id": item.name, "response": response, "error": None}


def _item(value: Any, number: int, path: Path) -> BatchItem:
    where = f"{path}:{number}"
    if not isinstance(value, dict):
        raise ConfigError("a line is no object", got=type(value).__name__, where=where)
    body = value.get("body", value)
    if not isinstance(body, dict):
        raise ConfigError("body is no object", got=type(body).__name__, where=where)
    name = str(value.get("custom_id", f"line-{number}"))
    if "url" in value:
        if str(value["url"]) not in _ENDPOINTS:
            wanted = ", ".join(_ENDPOINTS)
            raise ConfigError("unknown url", got=value["url"], wanted=wanted, where=where)
        return BatchItem(name, _ENDPOINTS[value["url"]], body)
    body = {k: v for k, v in body.items() if k != "custom_id"}
    if "messages" not in body and "prompt" not in body:
        raise ConfigError("a line asks nothing", wanted="messages or prompt", where=where)
    return BatchItem(name, "chat" if "messages" in body else "completions", body)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the input cannot be read", got=str(error), where=path) from error
