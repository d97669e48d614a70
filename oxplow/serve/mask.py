"""From a grammar to the tokens that may come next.

Owns the binding of llguidance. Knows no API field: `grammar` writes the grammars.
Invariant: a mask allows a token exactly if the text so far, with it, can still become whole; a
grammar that does not compile, or outgrows its limits, is a RequestError.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np

from oxplow.errors import RequestError
from oxplow.serve.engine_port import GrammarSpec

__all__ = ["GrammarMask", "LateMask", "MaskFactory", "grammar_fault"]

log = logging.getLogger(__name__)

_KEPT = 32  # compiled grammars


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


class LateMask:
    """A grammar that holds from a certain token on until it is complete, each time it comes.

    Before and after that everything is allowed; with `once` the token is forbidden after the first
    time. The answer never ends because of it.
    """

    def __init__(self, grammar: GrammarMask, after: int, vocab_size: int, *, once: bool) -> None:
        self._grammar, self._after, self._vocab_size, self._once = grammar, after, vocab_size, once
        self._inside: GrammarMask | None = None
        self._is_spent = False

    def allowed_words(self) -> Sequence[int] | None:
        """Return what the grammar allows while it holds; None where everything is allowed."""
        if self._inside is not None:
            return self._inside.allowed_words()
        if not self._is_spent:
            return None
        words = np.full(-(-self._vocab_size // 32), -1, dtype=np.int32)
        words.view(np.uint32)[self._after // 32] ^= np.uint32(1 << (self._after % 32))
        found: Sequence[int] = words.tolist()
        return found

    def advance(self, token_id: int) -> None:
        """Take an emitted token in."""
        if self._inside is None:
            if token_id == self._after:
                self._inside = self._grammar.copy()
            return
        self._inside.advance(token_id)
        if self._inside.is_complete():
            self._inside, self._is_spent = None, self._once

    def is_complete(self) -> bool:
        """Tell that the answer may go on."""
        return False

    def copy(self) -> LateMask:
        """Return an independent mask at the same position."""
        twin = LateMask(self._grammar, self._after, self._vocab_size, once=self._once)
        twin._inside = None if self._inside is None else self._inside.copy()
        twin._is_spent = self._is_spent
        return twin


class MaskFactory:
    """Makes masks over one vocabulary; the tokenizer is read on first use.

    Compiled grammars are kept: agents send the same tools with every turn.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, GrammarMask] = OrderedDict()

    def of(self, grammar: GrammarSpec) -> GrammarMask | LateMask:
        """Make what a work asks for. Raises RequestError as `make` does."""
        made = self.make(grammar.text)
        if grammar.after is None:
            return made
        return LateMask(made, grammar.after, self._vocab_size, once=grammar.once)

    def make(self, grammar: str) -> GrammarMask:
        """Compile a grammar. Raises RequestError with llguidance's reason."""
        known = self._compiled.get(grammar)
        if known is None:
            known = self._compiled[grammar] = self._compile(grammar)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known.copy()

    def _compile(self, grammar: str) -> GrammarMask:
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
