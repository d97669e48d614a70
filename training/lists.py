"""Word lists as plain strings, which read better than one quoted word a line.

Owns the one function; it knows nothing else.
"""

from __future__ import annotations


def words(text: str, mark: str | None = None) -> tuple[str, ...]:
    """Return the words of a text, split at blanks or at the mark."""
    return tuple(text.split(mark))
