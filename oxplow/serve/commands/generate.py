"""`oxplow generate`: one continuation or one answer, printed.

Owns the options and the printing; the work is `LLM`'s.
Invariant: standard output carries the text only, or one JSON object.
"""

import json
import sys
from typing import Annotated, Any

import typer

from oxplow.serve.console import AsJson, session
from oxplow.serve.flags import MODEL_FLAGS, Given, parameter, with_flags

__all__ = ["register"]

_TEXT = Annotated[str, typer.Argument(help="The text; - reads standard input.")]
_CHAT = Annotated[bool, typer.Option("--chat", help="Answer it as a message, not continue it.")]
_TOKENS = Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")]
_TEMPERATURE = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; the model's own if none.")
]
_SEED = Annotated[int | None, typer.Option("--seed", help="Fixes the draw.")]


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    own = (
        parameter("text", _TEXT),
        parameter("is_chat", _CHAT, False),
        parameter("max_tokens", _TOKENS, 128),
        parameter("temperature", _TEMPERATURE, None),
        parameter("seed", _SEED, None),
        parameter("as_json", AsJson, False),
    )
    example = 'Example: oxplow generate --chat "What is 2 + 2?" --temperature 0'
    app.command("generate", epilog=example)(with_flags(_generate, MODEL_FLAGS, own))


def _generate(
    context: typer.Context,
    given: Given,
    *,
    text: str,
    is_chat: bool,
    as_json: bool,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
) -> None:
    """Continue a text, or answer a message, without a server.

    Standard output gets the text alone, without the model's thinking; --json has all of it. Where
    the longest answer ended it, standard error says so.
    """
    from oxplow.serve.llm import open_llm

    text = sys.stdin.read() if text == "-" else text
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with open_llm(session(context).load(given)) as llm:
        if is_chat:
            answer = llm.chat(text, **fields)
            shown = answer["choices"][0]["message"]["content"] or ""
        else:
            answer = llm.complete(text, **fields)
            shown = answer["choices"][0]["text"]
    if answer["choices"][0]["finish_reason"] == "length":
        where = "the answer" if shown or not is_chat else "the thinking, before an answer"
        sys.stderr.write(f"(--max-tokens {max_tokens} cut {where})\n")
    sys.stdout.write((json.dumps(answer) if as_json else shown) + "\n")
