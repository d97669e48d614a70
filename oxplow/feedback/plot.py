"""Curves as SVG text: axes, ticks, lines with marks and a legend, in one self-contained figure.

Owns the drawing of one `Curve`. Knows no finding and no page. Invariant: what is not finite, and
what a logarithmic axis cannot show, is left out and counted in a note under the plot; every text is
escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from oxplow.feedback.finding import Curve

__all__ = ["draw"]

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 14, 46
_COLOURS = ("#2563c9", "#c2410c", "#15803d", "#9333ea", "#b91c6b", "#0e7490", "#854d0e", "#475569")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_TICKS = 5

Point = tuple[float, float]


class _Axis:
    """Maps values to places on one side of the plot, evenly or by logarithm."""

    def __init__(self, values: Sequence[float], start: float, end: float, is_log: bool) -> None:
        self.is_log, self._start, self._end = is_log, start, end
        placed = [math.log10(v) if is_log else v for v in values] or [0.0]
        low, high = min(placed), max(placed)
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = low - 0.5, high + 0.5
        margin = 0.04 * (high - low)
        self.low, self.high = low - margin, high + margin

    def place(self, value: float) -> float:
        """Return the place of a value."""
        at = math.log10(value) if self.is_log else value
        return self._start + (at - self.low) / (self.high - self.low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return round values inside the axis."""
        if self.is_log:
            first, last = math.ceil(self.low), math.floor(self.high)
            stride = max(1, (last - first + _TICKS) // _TICKS)
            decades = [10.0**e for e in range(first, last + 1, stride)]
            if len(decades) >= 2:
                return decades
            shares = [self.low + (self.high - self.low) * i / 4 for i in range(5)]
            return sorted({float(f"{10**s:.1e}") for s in shares if self._holds(10**s)})
        raw = (self.high - self.low) / _TICKS
        scale = 10.0 ** math.floor(math.log10(raw))
        step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= raw)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]

    def _holds(self, value: float) -> bool:
        return self.low <= math.log10(float(f"{value:.1e}")) <= self.high


def draw(curve: Curve) -> str:
    """Return one `<figure>` with the plot and its data as a folded table."""
    series, dropped = _drawable(curve)
    points = [p for line in series.values() for p in line]
    note = f"<p class='note'>{dropped} points cannot be shown on these axes</p>" if dropped else ""
    title = f"<figcaption>{escape(curve.title)}</figcaption>"
    if not points:
        return f"<figure>{title}<p class='note'>no points to show</p>{note}</figure>"
    across = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, curve.log_x)
    up = _Axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP, curve.log_y)
    parts = [*_frame(curve, across, up)]
    for number, (name, line) in enumerate(series.items()):
        parts += _line(name, line, across, up, number)
    size = f"viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(curve.title)}'"
    body = "\n".join(parts)
    return f"<figure>{title}<svg {size}>{body}</svg>{_legend(series)}{note}{_table(curve)}</figure>"


def _drawable(curve: Curve) -> tuple[dict[str, list[Point]], int]:
    kept: dict[str, list[Point]] = {}
    total = 0
    for name, line in curve.series.items():
        total += len(line)
        kept[name] = [(x, y) for x, y in line if _fits(x, curve.log_x) and _fits(y, curve.log_y)]
    return kept, total - sum(map(len, kept.values()))


def _fits(value: float, is_log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not is_log)


def _frame(curve: Curve, across: _Axis, up: _Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f"<path class='axis' d='M{_LEFT} {_TOP}V{bottom}H{right}'/>"]
    for value in across.ticks():
        x = across.place(value)
        parts.append(f"<path class='grid' d='M{x:.1f} {_TOP}V{bottom}'/>")
        parts.append(f"<text x='{x:.1f}' y='{bottom + 16}' class='mid'>{_short(value)}</text>")
    for value in up.ticks():
        y = up.place(value)
        parts.append(f"<path class='grid' d='M{_LEFT} {y:.1f}H{right}'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' class='end'>{_short(value)}</text>")
    middle = (_LEFT + right) / 2
    label = escape(curve.x_label)
    parts.append(f"<text x='{middle}' y='{_HEIGHT - 8}' class='mid'>{label}</text>")
    height = (_TOP + bottom) / 2
    turned = f"transform='rotate(-90 14 {height})'"
    parts.append(f"<text x='14' y='{height}' class='mid' {turned}>{escape(curve.y_label)}</text>")
    return parts


def _line(name: str, line: list[Point], across: _Axis, up: _Axis, number: int) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    places = [(across.place(x), up.place(y), x, y) for x, y in sorted(line)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in places)
    parts = [f"<path d='M{path}' fill='none' stroke='{colour}' stroke-dasharray='{dash}'/>"]
    for at_x, at_y, x, y in places:
        told = f"<title>{escape(name)}: {_short(x)}, {_short(y)}</title>"
        parts.append(
            f"<circle cx='{at_x:.1f}' cy='{at_y:.1f}' r='3' fill='{colour}'>{told}</circle>"
        )
    return parts if places else []


def _legend(series: dict[str, list[Point]]) -> str:
    keys = [
        f"<li><span style='background:{_COLOURS[i % len(_COLOURS)]}'></span>{escape(name)}</li>"
        for i, name in enumerate(series)
    ]
    return f"<ul class='legend'>{''.join(keys)}</ul>"


def _table(curve: Curve) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td>{_short(x)}</td><td>{_short(y)}</td></tr>"
        for name, line in curve.series.items()
        for x, y in line
    ]
    head = (
        f"<tr><th>series</th><th>{escape(curve.x_label)}</th><th>{escape(curve.y_label)}</th></tr>"
    )
    return f"<details><summary>data</summary><table>{head}{''.join(rows)}</table></details>"


def _short(value: float) -> str:
    return f"{value:.4g}"
