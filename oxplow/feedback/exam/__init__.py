"""The examination's questions: what a trained checkpoint is asked, and the right answers.

Owns the held-out half of every family (templates, words, tools, schemas, sources, picture seeds) and builds items from it.
It knows no model, no tokenizer and no torch: a haystack is sized through a callable. Invariants: the same seed gives the
same items, and nothing here is shared with `training/families.py` (tests/training/test_families.py intersects both).
"""

from oxplow.feedback.exam.held_out import read_held_out
from oxplow.feedback.exam.needle import Haystack, Needle, build_haystacks
from oxplow.feedback.exam.pictures import PictureItem, build_pictures
from oxplow.feedback.exam.structured import JsonItem, build_json_items
from oxplow.feedback.exam.tools import ToolItem, build_tool_items

__all__ = [
    "Haystack",
    "JsonItem",
    "Needle",
    "PictureItem",
    "ToolItem",
    "build_haystacks",
    "build_json_items",
    "build_pictures",
    "build_tool_items",
    "read_held_out",
]
