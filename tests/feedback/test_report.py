"""The report page: whole, escaped, without a network, and with the plots of its findings."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oxplow.errors import ConfigError
from oxplow.feedback.finding import Curve, Effect, Finding, Locus, Verdict
from oxplow.feedback.plot import draw
from oxplow.feedback.report import report_html, write_report

_NASTY = "<script>alert('&')</script>"


def _curve(log: bool = False) -> Curve:
    series = {_NASTY: ((1.0, 2.0), (10.0, 30.0), (100.0, math.nan)), "b": ((1.0, 1.0),)}
    return Curve(title=_NASTY, x_label="n", y_label="s", series=series, log_x=log, log_y=log)


def _finding(verdict: Verdict, probe: str = _NASTY) -> Finding:
    return Finding(
        probe=probe,
        verdict=verdict,
        summary=_NASTY,
        locus=Locus(component=_NASTY, op="linear"),
        effect=Effect(name="error", value=3.0, unit="bounds", low=2.0, high=4.0, bound=1.0),
        repro=f"oxplow check {_NASTY}",
        evidence={_NASTY: [_NASTY, 1.5]},
        curves=(_curve(), _curve(log=True)),
    )


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in {"src", "href"}]


def test_nothing_of_a_finding_becomes_markup_and_nothing_is_fetched() -> None:
    text = report_html([_finding(Verdict.FAIL)], _NASTY, {_NASTY: _NASTY})
    page = _Tags()
    page.feed(text)
    assert "script" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", text)
    assert "url(" not in text and "@import" not in text


def test_failures_come_first() -> None:
    text = report_html([_finding(Verdict.PASS, "one"), _finding(Verdict.FAIL, "two")], "t")
    assert text.index(">two</a>") < text.index(">one</a>")


@pytest.mark.parametrize("log", [False, True])
def test_a_plot_is_well_formed_and_counts_what_it_cannot_show(log: bool) -> None:
    figure = ElementTree.fromstring(draw(_curve(log)))
    svg = figure.find("svg")
    assert svg is not None
    assert len(svg.findall("circle")) == 3
    assert "1 points cannot be shown" in "".join(figure.itertext())
    for mark in svg.findall("circle"):
        assert 0 <= float(mark.attrib["cx"]) <= 640
        assert 0 <= float(mark.attrib["cy"]) <= 320


@pytest.mark.parametrize("points", [(), ((1.0, 5.0),), ((1.0, 5.0), (2.0, 5.0)), ((0.0, -1.0),)])
@pytest.mark.parametrize("log", [False, True])
def test_odd_curves_are_drawn(points: tuple[tuple[float, float], ...], log: bool) -> None:
    curve = Curve(title="t", x_label="x", y_label="y", series={"a": points}, log_x=log, log_y=log)
    ElementTree.fromstring(draw(curve))


def test_larger_values_stand_higher_and_further_right() -> None:
    svg = ElementTree.fromstring(draw(_curve())).find("svg")
    assert svg is not None
    first, second = svg.findall("circle")[:2]
    assert float(first.attrib["cx"]) < float(second.attrib["cx"])
    assert float(first.attrib["cy"]) > float(second.attrib["cy"])


def test_the_file_is_written_whole_and_a_bad_place_is_an_error(tmp_path: Path) -> None:
    path = write_report([_finding(Verdict.PASS)], tmp_path / "r.html", "t")
    assert path.read_text().endswith("</html>\n")
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([], tmp_path / "none" / "r.html", "t")
