"""A report that opens anywhere: findings and their curves in one HTML file.

Owns the page. Knows findings, no probe. Invariant: the file asks no network for anything, every
text that came from a finding is escaped, and failures come first.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from oxplow.errors import ConfigError
from oxplow.feedback.finding import Effect, Finding, Locus, Verdict
from oxplow.feedback.plot import draw

__all__ = ["report_html", "write_report"]

_ORDER = {Verdict.FAIL: 0, Verdict.INVALID: 1, Verdict.INCONCLUSIVE: 2, Verdict.PASS: 3}
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2530;--soft:#5b6673;--line:#d8dde3;--page:#fff;--box:#f6f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa5b1;--line:#39424d;--page:#14181d;
--box:#1c2229}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:2rem auto;
max-width:64rem;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;
border-bottom:1px solid var(--line)}th{color:var(--soft);font-weight:600}
.pass{color:#15803d}.fail{color:#c81e1e}.inconclusive{color:#a16207}.invalid{color:#9333ea}
.pass,.fail,.inconclusive,.invalid{font-weight:600}
code,pre{font:13px/1.45 ui-monospace,monospace;background:var(--box);padding:.1rem .3rem;
overflow-wrap:anywhere;white-space:pre-wrap}
section{border-top:1px solid var(--line);padding-top:.4rem}figure{margin:1rem 0}
figcaption{font-weight:600}svg{max-width:40rem;width:100%;height:auto}
svg text{font-size:11px;fill:var(--soft)}.mid{text-anchor:middle}.end{text-anchor:end}
.axis{stroke:var(--soft);fill:none}.grid{stroke:var(--line);fill:none}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.legend span{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}
.note,dt{color:var(--soft)}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}
dd{margin:0}
"""


def write_report(
    findings: Sequence[Finding],
    path: Path,
    title: str,
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    `facts` (machine, versions, command) stand above the findings. Raises ConfigError where the file
    cannot be written.
    """
    text = report_html(findings, title, facts)
    spare = path.with_name(f".{path.name}.part")
    try:
        spare.write_text(text, encoding="utf-8")
        os.replace(spare, path)
    except OSError as error:
        raise ConfigError(f"the report cannot be written: {error}", where=str(path)) from error
    return path


def report_html(
    findings: Sequence[Finding], title: str, facts: Mapping[str, object] | None = None
) -> str:
    """Return the page as text."""
    ordered = sorted(findings, key=lambda f: _ORDER[f.verdict])
    counts = {v: sum(f.verdict is v for f in ordered) for v in _ORDER}
    told = ", ".join(
        f"<span class='{v.value}'>{n} {v.value}</span>" for v, n in counts.items() if n
    )
    rows = "".join(_row(f, i) for i, f in enumerate(ordered))
    head = "".join(f"<th>{h}</th>" for h in ("verdict", "probe", "where", "effect", "summary"))
    sections = "".join(_section(f, i) for i, f in enumerate(ordered))
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{told or 'no findings'} <span class='note'>{made}</span></p>"
        f"{_pairs(facts or {})}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"{sections}</body></html>\n"
    )


def _row(finding: Finding, number: int) -> str:
    where = "" if finding.locus == Locus() else escape(str(finding.locus))
    return (
        f"<tr><td class='{finding.verdict.value}'>{finding.verdict.value}</td>"
        f"<td><a href='#f{number}'>{escape(finding.probe)}</a></td><td>{where}</td>"
        f"<td>{escape(_effect(finding.effect))}</td><td>{escape(finding.summary)}</td></tr>"
    )


def _section(finding: Finding, number: int) -> str:
    facts: dict[str, object] = (
        {"excitation": dict(finding.excitation)} if finding.excitation else {}
    )
    facts |= finding.evidence
    if finding.suspects:
        facts["further suspects"] = "; ".join(map(str, finding.suspects))
    if finding.artifacts:
        facts["files"] = ", ".join(finding.artifacts)
    facts["cost"] = f"{finding.cost_s:.2f} s"
    repro = f"<p>Repeat it:</p><pre>{escape(finding.repro)}</pre>" if finding.repro else ""
    plots = "".join(draw(curve) for curve in finding.curves)
    verdict = finding.verdict.value
    return (
        f"<section id='f{number}'><h2><span class='{verdict}'>{verdict}</span> "
        f"{escape(finding.probe)}</h2><p>{escape(finding.summary)}</p>"
        f"{repro}{_pairs(facts)}{plots}</section>"
    )


def _pairs(facts: Mapping[str, object]) -> str:
    rows = [f"<dt>{escape(str(k))}</dt><dd>{escape(_text(v))}</dd>" for k, v in facts.items()]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _effect(effect: Effect | None) -> str:
    if effect is None:
        return ""
    told = f"{effect.name} {effect.value:.4g} {effect.unit}"
    if effect.low is not None and effect.high is not None:
        told += f" [{effect.low:.4g}, {effect.high:.4g}]"
    return told if effect.bound is None else f"{told}, bound {effect.bound:.4g}"
