"""Many requests from a file, their answers to a file, resumable.

Owns the two file forms and the order of work. Knows no engine beyond `LLM`.
Invariant: a line of the output is one whole answer, or a failure with its error; a line of the
input whose line is there is not asked again, unless failures are to be; answers come in the order
in which they end.

Input lines are OpenAI's batch form ({"custom_id", "url", "body"}) or a bare body with `messages` or
`prompt`, which is named by its line number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from oxplow.errors import CapacityError, ConfigError, OxplowError, RequestError

__all__ = ["Answerer", "BatchItem", "BatchReport", "read_answers", "read_items", "run_batch"]

_ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}


class Answerer(Protocol):
    """What answers the lines: `LLM`, or a test's stand-in."""

    @property
    def is_alive(self) -> bool:
        """Tell whether a later request can be answered."""
        ...

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        """Answer a whole request body of `endpoint`, chat or completions."""
        ...


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request: its name, its endpoint (chat or completions) and its body."""

    name: str
    endpoint: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class BatchReport:
    """Count what became of a file.

    `failed` of those `asked` now, `failed_before` of those `skipped` because the output holds them.
    """

    total: int = 0
    asked: int = 0
    skipped: int = 0
    failed: int = 0
    failed_before: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        """Lines whose answer or failure is in the output."""
        return self.asked + self.skipped


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


def read_answers(path: Path, *, drop_failed: bool = False) -> dict[str, bool]:
    """Return the names in the output, each with whether its request failed.

    A last line that was cut is removed from the file; so are, with `drop_failed`, failures. Raises
    ConfigError where the file is not ours or cannot be written.
    """
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
        kept: list[bytes] = []
        names: dict[str, bool] = {}
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            told = json.loads(line)
            name, has_failed = str(told["custom_id"]), told["error"] is not None
            if not (drop_failed and has_failed):
                names[name] = has_failed
                kept.append(line)
        whole = b"".join(kept)
        if whole != data:
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(whole)
            part.replace(path)
    except OSError as error:
        raise ConfigError("the output cannot be used", got=error.strerror, where=path) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("the output holds a line that is not ours", where=path) from error
    return names


async def run_batch(
    items: list[BatchItem],
    output: Path,
    llm: Answerer,
    report: BatchReport,
    *,
    concurrency: int,
    retries_failed: bool = False,
) -> None:
    """Answer the `items` that the output lacks, `concurrency` at a time, and append the answers.

    `report` is kept up to date meanwhile. Raises ConfigError where the output cannot be written,
    OxplowError where the engine has stopped; what was answered is in the output then.
    """
    found = read_answers(output, drop_failed=retries_failed)
    left = [item for item in items if item.name not in found]
    report.total, report.skipped = len(items), len(items) - len(left)
    report.failed_before = sum(found.get(item.name, False) for item in items)
    places = asyncio.Semaphore(concurrency)
    try:
        with output.open("a", encoding="utf-8") as file:

            async def one(item: BatchItem) -> None:
                async with places:
                    told = await _answered(item, llm)
                file.write(json.dumps(told, ensure_ascii=False) + "\n")
                file.flush()
                report.asked += 1
                report.failed += told["error"] is not None
                usage = (told["response"].get("body") or {}).get("usage") or {}
                report.completion_tokens += usage.get("completion_tokens", 0)

            await _all([one(item) for item in left])
    except OSError as error:
        raise ConfigError("the output cannot be written", got=error.strerror, where=output) from (
            error
        )


async def _all(work: list[Any]) -> None:
    """Run everything; the first failure ends the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answered(item: BatchItem, llm: Answerer) -> dict[str, Any]:
    """Return one output line; a full queue is waited for. Raises OxplowError without an engine."""
    while True:
        try:
            body = await llm.answer(item.endpoint, item.body)
        except OxplowError as error:
            if not llm.is_alive:
                raise OxplowError("the engine has stopped", got=error) from error
            if isinstance(error, CapacityError):
                await asyncio.sleep(1.0)
                continue
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
