"""Training prompts are what the chat template renders; the tokenizer gives texts back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.chat import Call, Conversation, Turn, head_text, segments_of
from training.corpus import SPECIAL_TOKENS, VOCAB_SIZE
from training.families import training_words
from training.generators.source import Source
from training.generators.talk import talk_conversation
from training.generators.tools import json_conversation, tool_conversation

NANO = Path(__file__).parents[2] / "oxplow" / "models" / "nano"
WORDS = training_words("river mountain paper copy table winter simple letter " * 3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(NANO)


def messages_of(conversation: Conversation) -> list[dict[str, object]]:
    """Return a conversation as an OpenAI client would send it."""
    out: list[dict[str, object]] = []
    if conversation.system is not None:
        out.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        out.append({"role": "user", "content": turn.user})
        reasoning = turn.reasoning
        if turn.calls:
            calls = [
                {"id": f"c{i}", "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(turn.calls)
            ]
            out.append({"role": "assistant", "reasoning_content": reasoning, "tool_calls": calls})
            out += [
                {"role": "tool", "tool_call_id": f"c{i}", "content": text}
                for i, text in enumerate(turn.responses)
            ]
            reasoning = None if reasoning is None else "The tool has answered."
        out.append({"role": "assistant", "reasoning_content": reasoning, "content": turn.answer})
    return out


@pytest.mark.parametrize("maker", [talk_conversation, tool_conversation, json_conversation])
def test_segments_equal_the_template(maker, tokenizer: PreTrainedTokenizerBase) -> None:
    source = Source(random.Random(3), WORDS, np.zeros(500, np.uint16))
    for _ in range(40):
        conversation = maker(source)
        text = "".join(segment for segment, _ in segments_of(conversation))
        rendered = tokenizer.apply_chat_template(
            messages_of(conversation),
            tools=list(conversation.tools) or None,
            reasoning_effort=conversation.effort.lower(),
            tokenize=False,
        )
        assert rendered + "<|user|>" == text


def test_thinking_is_opened_or_closed_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    ask = [{"role": "user", "content": "Hello!"}]
    head = head_text(Conversation(())) + "<|user|>Hello!<|assistant|><think>"
    render = tokenizer.apply_chat_template
    assert render(ask, add_generation_prompt=True, tokenize=False) == head
    closed = render(ask, add_generation_prompt=True, enable_thinking=False, tokenize=False)
    assert closed == head + "</think>"


def test_earlier_reasoning_is_dropped_only_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = (Turn("One?", "1", "first"), Turn("Two?", "2", "second"))
    messages = messages_of(Conversation(turns))
    render = tokenizer.apply_chat_template
    assert "first" in render(messages, tokenize=False)
    cleared = render(messages, clear_thinking=True, tokenize=False)
    assert "<think></think>1" in cleared
    assert "<think>second</think>2" in cleared


def test_tool_results_come_in_call_order(tokenizer: PreTrainedTokenizerBase) -> None:
    turn = Turn("Both.", "Done.", calls=(Call("a", {}), Call("b", {})), responses=("A", "B"))
    messages = messages_of(Conversation((turn,)))
    swapped = [*messages[:2], messages[3], messages[2], messages[4]]
    render = tokenizer.apply_chat_template
    assert render(swapped, tokenize=False) == render(messages, tokenize=False)
    for message in swapped[2:4]:
        message["tool_call_id"] = "unknown"
    assert "<|observation|><tool_response>B</tool_response>" in render(swapped, tokenize=False)


def test_strings_stay_raw_and_everything_else_is_json(tokenizer: PreTrainedTokenizerBase) -> None:
    call = Call("f", {"s": "1", "n": 1, "b": True, "l": ["x"], "t": 'a "b" <c>'})
    turn = Turn("Do it.", "Done.", calls=(call,), responses=(json.dumps({"ok": True}),))
    text = tokenizer.apply_chat_template(messages_of(Conversation((turn,))), tokenize=False)
    assert "<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>n</arg_key>" in text
    assert "<arg_value>true</arg_value>" in text
    assert '<arg_value>["x"]</arg_value>' in text
    assert '<arg_value>a "b" <c></arg_value>' in text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " two  blanks\tand\r\nlines\n\n",
        "def f(x):\n    return x[1:] + 12345\n",
        "naïve ☃ 漢字 🦊",
    ],
)
def test_tokens_give_the_text_back(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_specials_close_the_vocabulary(tokenizer: PreTrainedTokenizerBase) -> None:
    first = VOCAB_SIZE - len(SPECIAL_TOKENS)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(first, VOCAB_SIZE))
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
