"""A text completion: raw text or token ids in, their continuation out.

Owns the fields of `/v1/completions`. Knows no chat template.
Invariant: every prompt of a request becomes one work; choices count prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from oxplow.engine.request import SamplingParams
from oxplow.errors import RequestError
from oxplow.serve.engine_port import GrammarSpec, Work, pack_ids
from oxplow.serve.grammar import answer_grammar
from oxplow.serve.mask import grammar_fault
from oxplow.serve.model_files import ModelFiles
from oxplow.serve.prepare.chat import check_model
from oxplow.serve.prepare.fields import Fields, field_error, token_ids
from oxplow.serve.prepare.prepared import AnswerShape, Prepared, PrepareSettings
from oxplow.serve.prepare.sampling import (
    MAX_STOPS,
    Defaults,
    read_sampling,
    top_alternatives,
)
from oxplow.serve.prepare.tools import Toolbox, answer_rule
from oxplow.serve.slices import too_long
from oxplow.serve.text import Vocabulary

__all__ = ["CompletionPreparer"]

_MOST_PROMPTS = 256
_DEFAULT_TOKENS = 16  # the API's own default


class CompletionPreparer:
    """Prepares text completions for one model."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        files: ModelFiles,
        defaults: Defaults,
        settings: PrepareSettings,
    ) -> None:
        self._vocabulary, self._files = vocabulary, files
        self._defaults, self._settings = defaults, settings

    def prepare(self, body: Mapping[str, Any], most: int | None = None) -> Prepared:
        """Prepare one request whose prompts have at most `most` tokens. Raises RequestError."""
        fields = Fields(body)
        model = check_model(fields, self._settings.names)
        _refuse_unsupported(fields)
        prompts = self.read_prompts(body.get("prompt"), most)
        params = read_sampling(fields, self._defaults, self._files.vocab_size)
        if params.max_tokens is None:
            params = replace(params, max_tokens=max(_DEFAULT_TOKENS, params.min_tokens))
        num_top = top_alternatives(fields, "logprobs")
        echoes = fields.flag("echo") or False
        options = fields.inner("stream_options")
        params = replace(
            params,
            logprobs=num_top,
            prompt_logprobs=num_top if echoes else None,
        )
        grammar = self._grammar(fields)
        works = tuple(self._work(fields, ids, params, grammar) for _, ids in prompts)
        texts = (
            self._vocabulary.decode(ids, skip_special=False) if text is None else text
            for text, ids in (prompts if echoes else ())
        )
        shape = AnswerShape(
            is_chat=False,
            is_stream=fields.flag("stream") or False,
            includes_usage=options is not None and (options.flag("include_usage") or False),
            stops=fields.texts("stop", MAX_STOPS),
            keeps_stop=fields.flag("include_stop_str_in_output") or False,
            num_top=num_top,
            echoes=tuple(texts),
            skips_special=fields.flag("skip_special_tokens") is not False,
        )
        return Prepared(model=model, works=works, shape=shape)

    def read_prompts(
        self, prompt: Any, most: int | None = None
    ) -> list[tuple[str | None, list[int]]]:
        """Read text, ids, or a list of either, as pairs of text (None for ids) and ids.

        Control strings in the text become control tokens: here the caller writes the whole prompt.
        """
        if isinstance(prompt, str):
            return [self._from_text(prompt, most)]
        if not isinstance(prompt, list) or not prompt:
            raise field_error("prompt", prompt, "text, token ids, or a list of one of them")
        if len(prompt) > _MOST_PROMPTS and not isinstance(prompt[0], int):
            raise field_error("prompt", f"{len(prompt)} prompts", f"at most {_MOST_PROMPTS}")
        if all(isinstance(item, str) for item in prompt):
            return [self._from_text(item, most) for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return [self._from_ids(item, f"prompt.{n}", most) for n, item in enumerate(prompt)]
        return [self._from_ids(prompt, "prompt", most)]

    def _from_text(self, text: str, most: int | None) -> tuple[str, list[int]]:
        return text, self._vocabulary.encode_template(text, most)

    def _from_ids(self, ids: Any, name: str, most: int | None) -> tuple[None, list[int]]:
        if isinstance(ids, list) and most is not None and len(ids) > most:
            raise too_long(most, len(ids))
        return None, token_ids(ids, name, self._files.vocab_size)

    def _work(
        self,
        fields: Fields,
        ids: list[int],
        params: SamplingParams,
        grammar: GrammarSpec | None,
    ) -> Work:
        return Work(
            request_id="",
            prompt=pack_ids(ids),
            params=params,
            priority=fields.integer("priority", -1000, 1000) or 0,
            salt=fields.text("cache_salt") or "",
            grammar=grammar,
            reuse_prefix=fields.flag("reuse_prefix") is not False,
        )

    def _grammar(self, fields: Fields) -> GrammarSpec | None:
        rule = answer_rule(fields, Toolbox())
        if rule is None:
            return None
        grammar = answer_grammar(rule, self._vocabulary.control)
        fault = grammar_fault(grammar)
        if fault:
            raise RequestError(
                "the answer's form cannot be enforced",
                got=fault,
                param="response_format",
                code="invalid_grammar",
            )
        return GrammarSpec(text=grammar)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("suffix"):
        raise RequestError(
            "text cannot be filled in before a suffix", param="suffix", code="unsupported"
        )
    best_of = fields.integer("best_of", 1, 128)
    if best_of is not None and best_of != (fields.integer("n", 1, 128) or 1):
        raise field_error("best_of", best_of, "the same as n: no choices are drawn and thrown away")
