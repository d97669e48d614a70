"""Conversations as weighted text, exactly as the chat template writes them.

Owns the mapping from turns to segments and the loss weights. It must not know topics. Invariant:
the joined text of a conversation equals `chat_template.jinja` rendered on the same messages
(tests/training/test_chat.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

CONTEXT, CORPUS, THINK, ANSWER, PICTURE = 0.0, 1.0, 2.0, 5.0, 6.0
Effort = Literal["Low", "High", "Max"]
JsonValue = str | int | float | bool | list[str] | list[int]
Segment = tuple[str | list[int], float]
TOOLS_HEAD = (
    "# Tools\nCall a tool as <tool_call>{name}<arg_key>{key}</arg_key>"
    "<arg_value>{value}</arg_value></tool_call>\n<tools>\n"
)
START = "[gMASK]<sop><|system|>Reasoning Effort: "


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: what the user says (text, or ready tokens for parts of it), the reasoning or
    None for thinking off, the answer, and optionally calls whose responses lead to the answer.
    """

    user: str | Sequence[str | list[int]]
    answer: str | list[int]
    reasoning: str | None = None
    weight: float = ANSWER
    calls: tuple[Call, ...] = ()
    responses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under one system head."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, object], ...] = ()
    system: str | None = None
    effort: Effort = "Max"
    images: list[object] = field(default_factory=list)


def write_call(call: Call) -> str:
    """Return a call in the released form: strings raw, everything else JSON, no newlines."""
    parts = []
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        parts.append(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>")
    return f"<tool_call>{call.name}{''.join(parts)}</tool_call>"


def head_text(conversation: Conversation) -> str:
    """Return everything before the first user turn."""
    text = START + conversation.effort
    if conversation.tools:
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in conversation.tools)
        text += f"<|system|>{TOOLS_HEAD}{lines}</tools>"
    return text if conversation.system is None else f"{text}<|system|>{conversation.system}"


def reply_segments(
    reasoning: str | None, answer: str | list[int], end: str, weight: float
) -> list[Segment]:
    """Return an assistant turn: the opened think part is given, its content learnt, or closed at
    once.
    """
    opened: list[Segment] = [("<|assistant|><think>", CONTEXT)]
    think: Segment = ("</think>", CONTEXT) if reasoning is None else (f"{reasoning}</think>", THINK)
    if isinstance(answer, str):
        return [*opened, think, (answer + end, weight)]
    return [*opened, think, (answer, weight), (end, weight)]


def segments_of(conversation: Conversation) -> list[Segment]:
    """Return the conversation as segments; it ends with the token that would open the next user
    turn.
    """
    out: list[Segment] = [(head_text(conversation) + "<|user|>", CONTEXT)]
    for turn in conversation.turns:
        pieces = [turn.user] if isinstance(turn.user, str) else turn.user
        out += [(piece, CONTEXT) for piece in pieces]
        reasoning = turn.reasoning
        if turn.calls:
            calls = "".join(write_call(call) for call in turn.calls)
            out += reply_segments(reasoning, calls, "<|observation|>", turn.weight)
            told = "".join(f"<tool_response>{text}</tool_response>" for text in turn.responses)
            out.append((told, CONTEXT))
            reasoning = None if reasoning is None else "The tool has answered."
        out += reply_segments(reasoning, turn.answer, "<|user|>", turn.weight)
    return out
