"""The sampling fields of a request.

Owns their names, ranges and the defaults of the model. Knows no message and no engine beyond its
parameter record. Invariant: each field changes the answer as documented or is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxplow.engine.request import MAX_LOGPROBS, SamplingParams
from oxplow.serve.prepare.fields import Fields, field_error

__all__ = ["MAX_STOPS", "Defaults", "read_defaults", "read_sampling"]

MAX_STOPS = 16
_MOST = 2**31 - 1
_SEEDS = 2**63

Defaults = Mapping[str, float]


def read_defaults(directory: Path) -> Defaults:
    """Return what `generation_config.json` says of temperature, top_p, top_k and penalties."""
    path = directory / "generation_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {n: content[n] for n in names if isinstance(content.get(n), int | float)}


def read_sampling(fields: Fields, defaults: Defaults, vocab_size: int) -> SamplingParams:
    """Read the fields that chat and text completions share.

    Log-probabilities differ between the two and are added by the caller.
    """

    def number(key: str, low: float, high: float, plain: float) -> float:
        value = fields.number(key, low, high)
        return float(defaults.get(key, plain)) if value is None else value

    top_k = fields.integer("top_k", -1, _MOST)
    if top_k is None:
        top_k = int(defaults.get("top_k", 0))
    top_p = number("top_p", 0.0, 1.0, 1.0)
    budget = fields.integer("max_completion_tokens", 0, _MOST)
    if budget is None:
        budget = fields.integer("max_tokens", 0, _MOST)
    seed = fields.integer("seed", -_SEEDS, _SEEDS * 2 - 1)
    temperature = number("temperature", 0.0, 100.0, 1.0)
    penalty = number("repetition_penalty", 0.0, 100.0, 1.0)
    return SamplingParams(
        # A top_p of 0 keeps the most likely token only, which is what greedy does.
        temperature=0.0 if top_p == 0 else temperature,
        top_p=1.0 if top_p == 0 else top_p,
        top_k=max(0, top_k),
        min_p=number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=penalty,
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0) or 0.0,
        logit_bias=_logit_bias(fields, vocab_size),
        seed=None if seed is None else seed % _SEEDS,
        n=fields.integer("n", 1, 128) or 1,
        max_tokens=budget,
        min_tokens=fields.integer("min_tokens", 0, _MOST) or 0,
        stop_token_ids=fields.ids("stop_token_ids", vocab_size),
        ignore_eos=fields.flag("ignore_eos") or False,
    )


def top_alternatives(fields: Fields, key: str) -> int | None:
    """Read how many alternatives are wanted."""
    return fields.integer(key, 0, MAX_LOGPROBS)


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    found = fields.inner("logit_bias")
    if found is None:
        return {}
    bias: dict[int, float] = {}
    values: Mapping[str, Any] = found.values
    for key in values:
        if not key.isascii() or not key.isdigit() or int(key) >= vocab_size:
            raise field_error("logit_bias", key, f"token ids from 0 to {vocab_size - 1} as keys")
        bias[int(key)] = found.number(key, -100.0, 100.0) or 0.0
    return bias
