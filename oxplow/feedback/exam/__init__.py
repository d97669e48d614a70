"""The examination: what a trained checkpoint is asked, the right answers, the run and its figures.

Owns the held-out half of every family (templates, words, tools, schemas, sources, picture seeds),
builds items from it, runs them on an examinee that the caller gives, scores and compares.
It knows no model, no tokenizer and no torch: a haystack is sized through a callable.
Invariants: the same seed gives the same items, and nothing here is shared with
`training/families.py` (tests/feedback/test_exam_families.py intersects both).
"""

from oxplow.feedback.exam.held_out import read_held_out
from oxplow.feedback.exam.needle import Haystack, Needle, build_haystacks
from oxplow.feedback.exam.outcomes import (
    DraftRun,
    ExamResult,
    Outcome,
    TextWindow,
    item_name,
    load_result,
    save_result,
)
from oxplow.feedback.exam.pictures import PictureItem, build_pictures
from oxplow.feedback.exam.runner import FULL, PARTS, QUICK, Chat, Examinee, ExamPlan, run_exam
from oxplow.feedback.exam.score import Answer, ToolCall
from oxplow.feedback.exam.structured import JsonItem, build_json_items
from oxplow.feedback.exam.tools import ToolItem, build_tool_items

__all__ = [
    "FULL",
    "PARTS",
    "QUICK",
    "Answer",
    "Chat",
    "DraftRun",
    "ExamPlan",
    "ExamResult",
    "Examinee",
    "Haystack",
    "JsonItem",
    "Needle",
    "Outcome",
    "PictureItem",
    "TextWindow",
    "ToolCall",
    "ToolItem",
    "build_haystacks",
    "build_json_items",
    "build_pictures",
    "build_tool_items",
    "item_name",
    "load_result",
    "read_held_out",
    "run_exam",
    "save_result",
]
