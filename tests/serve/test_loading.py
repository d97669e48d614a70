"""A load tells how far it is: a bar on a terminal, lines elsewhere, nothing when it is quick."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from oxplow.serve import loading


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with loading.told_progress("nano") as tell:
        tell(5 << 20, 10 << 20)
    assert "loading nano" in screen.getvalue()


def test_elsewhere_a_long_load_writes_lines_and_a_quick_one_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(loading.time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO), loading.told_progress("big") as tell:
        tell(1 << 20, 100 << 20)
        assert caplog.messages == []
        now = 6.0
        tell(50 << 20, 100 << 20)
    assert caplog.messages == ["loading big: 50% of 100 MiB"]
