"""A chat request: messages, tools and fields become one prompt and the rules of its answer.

Owns the fields of `/v1/chat/completions`; the other chat endpoints are brought into this form
first. Knows no HTTP. Invariant: unknown fields change nothing; a field that is known either has its
documented effect or is a RequestError.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oxplow.engine.request import SamplingParams
from oxplow.errors import RequestError
from oxplow.serve.engine_port import GrammarSpec, Work, pack_ids
from oxplow.serve.formats.history import Conversation, normalise
from oxplow.serve.formats.markup import Mark
from oxplow.serve.grammar import AnswerRule, ToolShape, answer_grammar, call_grammar
from oxplow.serve.mask import grammar_fault
from oxplow.serve.model_files import ModelFiles
from oxplow.serve.prepare.fields import Fields, field_error
from oxplow.serve.prepare.media import place_media
from oxplow.serve.prepare.prepared import AnswerShape, Prepared, PrepareSettings
from oxplow.serve.prepare.sampling import (
    MAX_STOPS,
    Defaults,
    read_sampling,
    top_alternatives,
)
from oxplow.serve.prepare.tools import Toolbox, answer_rule, read_tools
from oxplow.serve.text import ChatText

__all__ = ["ChatPreparer", "check_model"]

_EFFORTS: Mapping[str, str] = {"minimal": "low", "low": "low", "medium": "high", "high": "high"}
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "self"})
_NEVER = -1e9  # a logit that cannot be drawn
_THINKING_SHARE = 2  # enforced answers keep at least half of the budget for themselves
_THINKING_TOKENS = 4096
_CALL_MARKS = (Mark.CALL, Mark.CALL_END, Mark.KEY, Mark.KEY_END, Mark.VALUE, Mark.VALUE_END)
_KEPT_GRAMMARS = 32  # agents send the same tools with every turn


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A rendered prompt and how the model's answer begins."""

    text: str
    starts_in_reasoning: bool


class ChatPreparer:
    """Prepares chat requests for one model."""

    def __init__(
        self, text: ChatText, files: ModelFiles, defaults: Defaults, settings: PrepareSettings
    ) -> None:
        self._text, self._files = text, files
        self._defaults, self._settings = defaults, settings
        self._late_grammars: OrderedDict[str, str] = OrderedDict()

    def prepare(
        self,
        body: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> Prepared:
        """Prepare one request of at most `most` prompt tokens. Raises RequestError."""
        fields = Fields(body)
        model = check_model(fields, self._settings.names)
        places = (extra or {}).get("places", ())
        conversation = normalise(body.get("messages"), places=places)
        box = read_tools(fields)
        params = read_sampling(fields, self._defaults, self._files.vocab_size)
        prompt = self.prompt(fields, conversation, box)
        num_top = _num_top(fields)
        shape = AnswerShape(
            is_chat=True,
            is_stream=fields.flag("stream") or False,
            includes_usage=_includes_usage(fields),
            stops=fields.texts("stop", MAX_STOPS),
            keeps_stop=fields.flag("include_stop_str_in_output") or False,
            num_top=num_top,
            tools=box.shapes if box.may_call else (),
            starts_in_reasoning=prompt.starts_in_reasoning,
            hides_reasoning=fields.flag("include_reasoning") is False,
            skips_special=fields.flag("skip_special_tokens") is not False,
            # Agents send their usual budget to every model; there it is a ceiling, not a demand.
            bounds_answer=extra is None,
        )
        ids, pictures = self.encode(prompt.text, conversation, most)
        work = Work(
            request_id="",
            prompt=pack_ids(ids),
            params=self._bounded(replace(params, logprobs=num_top), box),
            pictures=pictures,
            priority=fields.integer("priority", -1000, 1000) or 0,
            salt=fields.text("cache_salt") or "",
            grammar=self._grammar(answer_rule(fields, box), prompt, params) or self._late(box),
            reuse_prefix=fields.flag("reuse_prefix") is not False,
        )
        return Prepared(model=model, works=(work,), shape=shape, extra=extra or {})

    def encode(
        self, text: str, conversation: Conversation, most: int | None = None
    ) -> tuple[list[int], Any]:
        """Encode a rendered prompt and put its pictures in; `most` counts without them."""
        return place_media(
            self._text.encode(text, most),
            conversation.media,
            self._files,
            self._settings.media_domains,
            self._text.vocabulary.encode_plain,
        )

    def prompt(self, fields: Fields, conversation: Conversation, box: Toolbox) -> _Prompt:
        """Render the conversation, or let its last message be continued."""
        continues = fields.flag("continue_final_message") or False
        generates = fields.flag("add_generation_prompt")
        if continues and generates:
            raise field_error(
                "continue_final_message", True, "add_generation_prompt to be false beside it"
            )
        rendered = self._text.render(
            conversation.messages,
            tools=box.shown,
            add_generation_prompt=not continues and generates is not False,
            options=self._options(fields),
        )
        if continues:
            return self._continued(rendered, conversation.messages[-1])
        return _Prompt(rendered, rendered.rstrip().endswith(Mark.THINK.value))

    def _continued(self, rendered: str, last: Mapping[str, Any]) -> _Prompt:
        """Cut the prompt after the last message's own text: the model goes on from there."""
        if last["role"] != "assistant" or last["tool_calls"]:
            wanted = "a last message of the assistant without tool calls"
            raise field_error("continue_final_message", True, wanted)
        content = last["content"]
        is_open = not content and bool(last["reasoning_content"])
        given = last["reasoning_content"] if is_open else content
        given = self._text.vocabulary.guard(given) if isinstance(given, str) else ""
        at = rendered.rfind(given) if given else -1
        if at < 0:
            wanted = "a last message whose text the chat template writes as it is"
            raise field_error("continue_final_message", True, wanted)
        return _Prompt(rendered[: at + len(given)], is_open)

    def _options(self, fields: Fields) -> dict[str, Any]:
        """Collect template variables; to switch off what the template cannot is refused."""
        given = fields.inner("chat_template_kwargs")
        options = dict(given.values) if given is not None else {}
        for name in options:
            if name in _RESERVED or not name.isidentifier():
                raise field_error(f"chat_template_kwargs.{name}", name, "a template variable")
        thinks = fields.flag("enable_thinking")
        asked = fields.inner("thinking")
        if thinks is None and asked is not None and asked.values.get("type") == "disabled":
            thinks = False
        effort = fields.text("reasoning_effort")
        if effort == "none" and thinks is None and self._text.has_switch("enable_thinking"):
            thinks = False
        if thinks is not None:
            options["enable_thinking"] = thinks
        if options.get("enable_thinking") is False and not self._text.has_switch("enable_thinking"):
            raise RequestError(
                "this model's chat template cannot switch thinking off",
                param="enable_thinking",
                code="unsupported",
            )
        if effort is not None and effort in _EFFORTS:
            options.setdefault("reasoning_effort", _EFFORTS[effort])
        clears = fields.flag("clear_thinking")
        if clears is not None:
            options["clear_thinking"] = clears
        return options

    def _grammar(
        self, rule: AnswerRule | None, prompt: _Prompt, params: SamplingParams
    ) -> GrammarSpec | None:
        """Write the grammar of an enforced answer; thinking before it is bounded."""
        if rule is None:
            return None
        if prompt.starts_in_reasoning:
            budget = params.max_tokens
            tokens = _THINKING_TOKENS if budget is None else budget // _THINKING_SHARE
            rule = replace(rule, thinking_tokens=min(tokens, _THINKING_TOKENS))
        grammar = answer_grammar(rule, self._text.vocabulary.control)
        fault = grammar_fault(grammar)
        if fault:
            param = "tools" if rule.calls and rule.schema is None else "response_format"
            raise RequestError(
                "the answer's form cannot be enforced",
                got=fault,
                param=param,
                code="invalid_grammar",
            )
        return GrammarSpec(text=grammar)

    def _late(self, box: Toolbox) -> GrammarSpec | None:
        """Hold a call that the model begins by itself to the declared functions.

        None where there are no tools, or the model has no tokens for calls. A function whose schema
        cannot be enforced is held to its name only.
        """
        control = self._text.vocabulary.control
        if not box.shapes or not box.may_call or any(m.value not in control for m in _CALL_MARKS):
            return None
        key = json.dumps([(t.name, t.parameters) for t in box.shapes])
        text = self._late_grammars.get(key)
        if text is None:
            text = call_grammar(box.shapes, control)
            if grammar_fault(text):
                text = call_grammar([_enforceable(t, control) for t in box.shapes], control)
            self._late_grammars[key] = text
            while len(self._late_grammars) > _KEPT_GRAMMARS:
                self._late_grammars.popitem(last=False)
        self._late_grammars.move_to_end(key)
        return GrammarSpec(text=text, after=control[Mark.CALL.value], once=not box.is_parallel)

    def _bounded(self, params: SamplingParams, box: Toolbox) -> SamplingParams:
        """Forbid the opening token of calls where tools are shown but must not be called."""
        token = self._text.vocabulary.control.get(Mark.CALL.value)
        if box.may_call or not box.shown or token is None:
            return params
        return replace(params, logit_bias={**params.logit_bias, token: _NEVER})


def _enforceable(tool: ToolShape, control: Mapping[str, int]) -> ToolShape:
    """Return a tool as it is, or with any arguments where its schema does not compile."""
    fault = grammar_fault(call_grammar([tool], control))
    return ToolShape(name=tool.name, parameters={"type": "object"}) if fault else tool


def check_model(fields: Fields, names: tuple[str, ...]) -> str:
    """Return the asked model's name; raises RequestError for one that is not served."""
    asked = fields.text("model")
    if not asked:
        return names[0]
    if asked not in names:
        raise RequestError(
            f"the model {asked[:200]!r} does not exist here",
            wanted="one of " + ", ".join(names),
            param="model",
            code="model_not_found",
        )
    return asked


def _includes_usage(fields: Fields) -> bool:
    options = fields.inner("stream_options")
    return options is not None and (options.flag("include_usage") or False)


def _num_top(fields: Fields) -> int | None:
    """Read `logprobs` and `top_logprobs`; None: no log-probabilities."""
    wanted = fields.flag("logprobs") or False
    top = top_alternatives(fields, "top_logprobs")
    if top and not wanted:
        raise field_error("top_logprobs", top, "logprobs to be true beside it")
    return (top or 0) if wanted else None
