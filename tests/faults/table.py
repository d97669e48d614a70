"""Write the result tables of docs/faults.md from the records of `oxplow faults --record`.

Run `python -m tests.faults.table POLICY.json [OTHER.json ...]` from the root of the checkout; the
first record makes the table of faults, each record one row of the arms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.faults import CONTROLS, FAULTS, NOT_APPLICABLE

_DEPTHS = ("parameter", "op", "component")


def faults(record: Mapping[str, Any]) -> list[str]:
    """Return one row a fault."""
    marks: dict[str, Any] = {m["id"]: m for m in record["marks"]}
    lines = [
        "| fault | class | half | first sign | found | depth | probes | seconds | processor s |"
        " repro | blamed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault in FAULTS:
        mark = marks.get(fault.id)
        if mark is None:
            continue
        depth = next((d for d in _DEPTHS if mark["top"][d]), "-")
        half = "held out" if fault.held_out else "tuned"
        repro = {True: "right", False: "wrong"}[
            bool(mark["repro_fails"] and mark["repro_passes"])
        ] if mark["repro_fails"] is not None else "-"  # fmt: skip
        lines.append(
            f"| {fault.id} {fault.title} | {fault.kind.value} | {half} | {fault.symptom} |"
            f" {'yes' if mark['detected'] else 'no'} | {depth} | {mark['probes']} |"
            f" {mark['seconds']:.1f} | {mark['cpu_s']:.1f} | {repro} | {mark['blamed']} |"
        )
    return lines


def arms(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one row an arm."""
    lines = [
        "| arm | found | right component | right op | median s | median processor s |"
        " abstained | false alarms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        f = record["figures"]
        lines.append(
            f"| {f['arm']} | {f['detected']} of {f['faults']} | {f['component_localised']} |"
            f" {f['op_localised']} | {f['median_s']} | {f['median_cpu_s']} | {f['abstained']} |"
            f" {f['false_alarms']} of {f['clean_controls']} |"
        )
    return lines


def absent() -> list[str]:
    """Return one row for each fault that cannot be planted."""
    lines = ["| fault | why not |", "| --- | --- |"]
    return lines + [f"| {n.id} {n.title} | {n.why} |" for n in NOT_APPLICABLE]


def signs() -> list[str]:
    """Return what each planted fault re-creates, and when it shows."""
    lines = ["| fault | public reports | shows with |", "| --- | --- | --- |"]
    return lines + [f"| {f.id} | {', '.join(f.reports)} | {f.excitation} |" for f in FAULTS]


def controls() -> list[str]:
    """Return the controls in one paragraph."""
    return [", ".join(f"{c.title} ({c.symptom})" for c in CONTROLS)]


if __name__ == "__main__":
    read = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    parts = [faults(read[0]), arms(read), absent(), signs(), controls()]
    sys.stdout.write("\n\n".join("\n".join(part) for part in parts) + "\n")
