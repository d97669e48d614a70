"""Which requests can be served at all.

Owns the checks that need the model's sizes. Knows no queue and no cache contents: a request that
passes here fits an empty engine. Invariant: every refusal is a RequestError with the field, the
numbers and a code.
"""

from __future__ import annotations

from oxplow.engine.request import Request
from oxplow.errors import RequestError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError for a request that can never be served."""
    prompt, params = len(request.prompt_ids), request.params
    if prompt == 0:
        raise RequestError("the prompt is empty", param="prompt", code="empty_prompt")
    wanted = params.max_tokens or 0
    if prompt >= max_model_len or prompt + wanted > max_model_len:
        raise RequestError(
            f"this model's maximum context length is {max_model_len} tokens",
            got=f"{prompt} in the prompt and {wanted} for the answer",
            wanted=f"a prompt under {max_model_len} tokens and at most {max_model_len} in all",
            param="messages" if prompt >= max_model_len else "max_tokens",
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= vocab_size:
        raise _unknown("prompt", low if low < 0 else high, vocab_size)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise _unknown(name, token, vocab_size)
    _check_pictures(request)


def max_len_of(request: Request, max_model_len: int) -> int:
    """Return the most tokens that prompt and answer may have together."""
    if request.params.max_tokens is None:
        return max_model_len
    return len(request.prompt_ids) + request.params.max_tokens


def _check_pictures(request: Request) -> None:
    end = 0
    for picture in request.pictures:
        span = picture.span
        if span.start < end or span.num_tokens < 1 or span.end > len(request.prompt_ids):
            raise RequestError(
                "picture places must be in order, apart, and inside the prompt",
                got=f"[{span.start}, {span.end})",
                wanted=f"from {end} to {len(request.prompt_ids)}",
                param="messages",
                code="invalid_image",
            )
        end = span.end


def _unknown(name: str, token: int, vocab_size: int) -> RequestError:
    return RequestError(
        "this token id is not in the vocabulary",
        got=token,
        wanted=f"0 to {vocab_size - 1}",
        param=name,
        code="invalid_value",
    )
