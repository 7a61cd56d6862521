"""The rule of docs/agents-guide.md, followed with nothing but the page and a document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[1] / "docs" / "agents-guide.md"
OWN_COST = ("capture", "pause")
ROW = re.compile(r"^\| (`.*?) \| (?:`(--.*?)`)? ?\| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)


def culprit_and_change(report: dict[str, Any]) -> tuple[str, str]:
    """Return the culprit and the first change that the rule finds in a report.

    Both are empty if nothing stands out.
    """
    table = {}
    for rules, option, culprit, otherwise in ROW.findall(GUIDE.read_text()):
        for rule in re.findall(r"`(\w+)`", rules):
            table[rule] = option, culprit, otherwise
    request = report["capture_request"] or {}
    suspects = request.get("suspects", [])[:1]
    if request.get("span"):
        wanted = f"--tools {request['span'].removeprefix('tool:')}"
        options = [row["option"] for row in report["what_would_help"]]
        change = next((one for one in options if one.startswith(wanted)), wanted)
        return " ".join([request["span"], *suspects]), change
    findings = [row for row in report["findings"] if row["rule"] not in OWN_COST]
    if not findings:
        return "", ""
    finding = next((row for row in findings if row["rule"] != "trajectory_cause"), findings[0])
    option, culprit, otherwise = table.get(finding["rule"], ("", "", ""))
    rows = report["what_would_help"]
    rows = [row for row in rows if option and row["option"].startswith(option)]
    of_stage = [row for row in rows if row["stage"] in finding["text"].split()]
    change = next((row["option"] for row in (*of_stage, *rows)), finding["advice"] or otherwise)
    if culprit == "the cause in `text`":
        return finding["text"], change
    if suspects and culprit in ("all", "the loop"):
        return suspects[0], change
    if culprit == "the loop":
        return "controller", change
    lanes = finding["lanes"] if culprit == "all" else finding["lanes"][:1]
    return " ".join(lanes), change
