"""Held-out text: installed packages and documents that the training corpus leaves out.

Owns where the text comes from. It reads what every install already has (torch needs networkx, rich
needs pygments, CPython ships pydoc_data), so nothing is downloaded and no text lies in the
repository. Invariant: `families.HELD_OUT_*` name all of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

from oxplow.feedback.exam.families import HELD_OUT_CODE, HELD_OUT_PROSE

SKIPPED = ("tests", "_mapping", "_builtins", "unistring")


def read_held_out(limit: int = 3_000_000) -> dict[str, str]:
    """Return {"code": text, "prose": text}, each at most `limit` characters, files in name order.

    Raises: ModuleNotFoundError, naming the package, when a held-out source is not installed.
    """
    return {"code": _read_packages()[:limit], "prose": _read_topics()[:limit]}


def _read_packages() -> str:
    texts = []
    for name in HELD_OUT_CODE:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"held-out package {name!r} is not installed", name=name)
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            if not any(part in str(path) for part in SKIPPED) and path.stat().st_size < 60_000:
                texts.append(path.read_text("utf-8", "replace"))
    return "\n".join(texts)


def _read_topics() -> str:
    texts = []
    for name in HELD_OUT_PROSE:
        topics: dict[str, str] = importlib.import_module(name).topics
        texts += [topics[key] for key in sorted(topics)]
    return "\n".join(texts)
