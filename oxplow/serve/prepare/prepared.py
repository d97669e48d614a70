"""What a prepared request is: work for the engine, and how its answer is to be told.

Owns the records that cross from a worker process to the front. Knows no JSON and no HTTP.
Invariant: a record holds plain values only, so it can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oxplow.serve.engine_port import Work
from oxplow.serve.grammar import ToolShape

__all__ = ["AnswerShape", "PrepareSettings", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """Say what workers must know. `names` are the served model names, the first is the default."""

    directory: Path
    names: tuple[str, ...]
    template_file: Path | None = None
    media_domains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """Say how the tokens of an answer become text and events.

    `is_chat` answers have reasoning and calls; `starts_in_reasoning` says that the prompt opened
    the thinking. `bounds_answer` False lets a budget that does not fit be cut to what fits.
    """

    is_chat: bool
    is_stream: bool = False
    includes_usage: bool = False
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    num_top: int | None = None
    echoes: tuple[str, ...] = ()
    tools: tuple[ToolShape, ...] = ()
    starts_in_reasoning: bool = False
    hides_reasoning: bool = False
    skips_special: bool = True
    bounds_answer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Hold one request, ready. `extra` carries what an API repeats in its answer."""

    model: str
    works: tuple[Work, ...]
    shape: AnswerShape
    extra: Mapping[str, Any] = field(default_factory=dict)
