"""Plain, redacted values: what may be written into a log or a trace.

Owns the list of secret names and the conversion to JSON values. It must not know who writes.
Invariant: a value under a secret name never leaves this module, and `plain` returns only what JSON
can hold.
"""

import math
import re
from collections.abc import Mapping

__all__ = ["REDACTED", "is_secret", "plain", "redact_text"]

REDACTED = "[redacted]"

_NAMES = (
    "api_key|apikey|authorization|password|passwd|secret|cookie|credentials?|private_key"
    "|(?:access|refresh|auth|bearer|session|hf|api)_token"
)
# The whole name or its last words: openai_api_key is secret, num_tokens is not.
_SECRET_NAME = re.compile(rf"(?:^|_)(?:{_NAMES})$")
_NAME_IN_TEXT = _NAMES.replace("_", "[-_ ]?")
_SECRET_TEXT = (
    # name=value, name: value, "name": "Bearer value"
    re.compile(
        rf"""((?:{_NAME_IN_TEXT})["']?\s*[:=]\s*)(?:(?:bearer|basic)\s+)?"[^"]*"
        |((?:{_NAME_IN_TEXT})["']?\s*[:=]\s*)(?:(?:bearer|basic)\s+)?'[^']*'
        |((?:{_NAME_IN_TEXT})["']?\s*[:=]\s*)(?:(?:bearer|basic)\s+)?[^\s,;&"'}}]+""",
        re.IGNORECASE | re.VERBOSE,
    ),
    re.compile(r"(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"()\b(?:sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{16,}"),
)


def is_secret(name: str) -> bool:
    """Tell whether a value of this name must never be written; case and dashes do not matter."""
    return _SECRET_NAME.search(name.lower().replace("-", "_").replace(" ", "_")) is not None


def redact_text(text: str) -> str:
    """Return `text` with the values of secret names, bearer values and known key shapes removed."""
    for pattern in _SECRET_TEXT:
        text = pattern.sub(_keep_name, text)
    return text


def plain(value: object, depth: int = 6) -> object:
    """Return `value` as JSON can hold it, secrets redacted; unknown objects become their repr.

    Non-finite numbers become text, since JSON has none. Below `depth` levels the repr is taken.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redact_text(str(value))
    if isinstance(value, Mapping) and depth:
        return {
            str(k): REDACTED if is_secret(str(k)) else plain(v, depth - 1) for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [plain(v, depth - 1) for v in value]
    return redact_text(repr(value))


def _keep_name(match: re.Match[str]) -> str:
    name = next((group for group in match.groups() if group is not None), "")
    return name + REDACTED
