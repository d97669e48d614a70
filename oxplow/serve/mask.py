"""From a grammar to the tokens that may come next.

Owns the binding of llguidance. Knows no API field: `grammar` writes the grammars.
Invariant: a mask allows a token exactly if the text so far, with it, can still become whole; a
grammar that does not compile, or outgrows its limits, is a RequestError.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import llguidance

from oxplow.errors import RequestError

__all__ = ["GrammarMask", "MaskFactory", "grammar_fault"]


log = logging.getLogger(__name__)


class GrammarMask:
    """The position of one answer in its grammar; follows the engine's `TokenMask`.

    Where llguidance gives up in the middle of an answer (its limits of work in one step), the
    answer ends there and the log says why.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed_words(self) -> Sequence[int]:
        """Return int32 words, bit i % 32 of word i // 32 set where token i is allowed."""
        return memoryview(self._matcher.compute_bitmask()).cast("i")

    def advance(self, token_id: int) -> None:
        """Take an emitted token in."""
        if not self._matcher.consume_token(token_id):
            log.warning("an enforced answer ends early: %s", _first_line(self._matcher.get_error()))

    def is_complete(self) -> bool:
        """Tell whether nothing may follow but an end token."""
        return bool(self._matcher.is_stopped() or self._matcher.is_error())

    def copy(self) -> GrammarMask:
        """Return an independent mask at the same position."""
        return GrammarMask(self._matcher.deep_copy())


class MaskFactory:
    """Makes masks over one vocabulary; the tokenizer is read on first use."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None

    def make(self, grammar: str) -> GrammarMask:
        """Compile a grammar. Raises RequestError with llguidance's reason."""
        if self._tokenizer is None:
            self._tokenizer = llguidance.LLTokenizer(
                _without_control_text(self._path.read_text(encoding="utf-8")),
                n_vocab=self._vocab_size,
                eos_token=self._eos or None,
            )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(
                "the grammar does not compile",
                got=_first_line(matcher.get_error()),
                param="response_format",
                code="invalid_grammar",
            )
        return GrammarMask(matcher)


def _without_control_text(tokenizer: str) -> str:
    """Return the tokenizer with added tokens that no text can spell.

    llguidance turns text that must come next into tokens, control tokens too, where a schema's own
    text spells one; grammars name control tokens by id, so their text is not needed.
    """
    content = json.loads(tokenizer)
    for token in content.get("added_tokens") or []:
        token["content"] = f"\ue0f1{token['id']}\ue0f1"
        token["special"] = True
    return json.dumps(content)


def grammar_fault(grammar: str) -> str:
    """Return why a grammar does not compile, empty where it does; needs no tokenizer."""
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    return _first_line(messages[0]) if is_error and messages else ""


def _first_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else "unknown fault"
