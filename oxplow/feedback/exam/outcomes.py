"""What an examination found, item by item, and the file that keeps it.

Owns the records and their JSON form. Knows no question's wording, no model and no statistics.
Invariant: an item's name contains a hash of what was asked and of the right answer, so two runs
pair items of equal names and nothing else; a file that was written reads back equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from oxplow.errors import ConfigError

__all__ = [
    "DraftRun",
    "ExamResult",
    "Outcome",
    "TextWindow",
    "item_name",
    "load_result",
    "save_result",
]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One question's result.

    `part` is the figure it counts for, `group` a finer division of it (depth, kind). `is_valid`
    tells of JSON alone whether the form was right; elsewhere it equals `is_right`. `got` and
    `wanted` are kept for wrong answers only, cut short.
    """

    part: str
    item: str
    is_right: bool
    is_valid: bool
    group: str = ""
    got: str = ""
    wanted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWindow:
    """One stretch of held-out text, read by teacher forcing.

    `nats` is the summed loss over `num_tokens` tokens, which spell `num_bytes` bytes. Of `drafted`
    guesses of the draft block `accepted` were what the model itself would have said there.
    """

    part: str
    item: str
    nats: float
    num_bytes: int
    num_tokens: int
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRun:
    """One greedy continuation by the model itself, and how many of the guesses came true.

    `distinct` counts different tokens: a model that repeats itself is easy to guess.
    """

    part: str
    item: str
    drafted: int
    accepted: int
    distinct: int


@dataclass(slots=True, kw_only=True)
class ExamResult:
    """Everything one run found.

    `about` says what was examined and where (model, revision, settings, machine); `sources` names
    the held-out text; `skipped` maps parts that were left out to the reason; `prompt_tokens` counts
    the questions', `cached_tokens` those of them that a shared prefix saved.
    """

    about: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    windows: list[TextWindow] = field(default_factory=list)
    drafts: list[DraftRun] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def parts(self) -> list[str]:
        """Return the parts that have questions, in the order in which they were asked."""
        return list(dict.fromkeys(o.part for o in self.outcomes))


def item_name(index: int, asked: object, wanted: object) -> str:
    """Name an item by its number and a hash of question and answer, equal on every machine."""
    text = json.dumps([asked, wanted], sort_keys=True, ensure_ascii=False, default=str)
    return f"{index:04d}-{blake2b(text.encode(), digest_size=6).hexdigest()}"


def save_result(result: ExamResult, path: Path) -> None:
    """Write a result; raises ConfigError where the file cannot be written."""
    content = {"version": _VERSION, **asdict(result)}
    try:
        path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("the result cannot be written", got=error.strerror, where=path) from error


def load_result(path: Path) -> ExamResult:
    """Read what `save_result` wrote; raises ConfigError for any other file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the result cannot be read: {error}", where=path) from error
    if not isinstance(content, Mapping) or content.get("version") != _VERSION:
        raise ConfigError(
            "this file holds no examination result",
            wanted=f"one written by `oxplow eval --save`, version {_VERSION}",
            where=path,
        )
    try:
        return _read(content)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"the result is damaged: {error}", where=path) from error


def _read(content: Mapping[str, Any]) -> ExamResult:
    fields: dict[str, Any] = {k: v for k, v in content.items() if k != "version"}
    fields["outcomes"] = [Outcome(**row) for row in fields["outcomes"]]
    fields["windows"] = [TextWindow(**row) for row in fields["windows"]]
    fields["drafts"] = [DraftRun(**row) for row in fields["drafts"]]
    return ExamResult(**fields)
