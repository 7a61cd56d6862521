"""The data of a step's picture, for the script that draws it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from verl_profiling.report.model import GanttSpan, Report
from verl_profiling.report.rows import WorkerRow
from verl_profiling.report.tables import stage_class

CONTROLLER = "controller"
_ROLE = re.compile(r"(.*?)(?:_rank)?\d*")
_MOST_DEVICES = 8  # whose lanes are drawn together; of more, roles are, so that they can be folded
_REASONS = {"straggler": "slower than the others", "long_tail": "last in the rollout"}  # by rule
_SPREADS = 3.0  # robust standard deviations between a lane's busy share and the median of its role
_NORMAL = 1.4826  # median absolute deviation of a normal distribution, in standard deviations
_POINTS = 0.05  # the same, in busy share, at the least
_CURVES = ("load", "communication", "waiting")  # one without anything in it is empty


def picture(report: Report) -> dict[str, Any]:
    """Return lanes by role with their stages and their load over time, and the running requests."""
    stages = {_shown(span): span for span in report.gantt}
    reasons = outliers(report)
    lanes = [_lane(owner, row, spans, list(stages), reasons) for owner, row, spans in _rows(report)]
    shared = {name: row for row in report.devices if len(row.lanes) > 1 for name in row.lanes}
    devices = list({row.name: row for row in shared.values()})
    by_device = len(devices) <= _MOST_DEVICES
    groups: dict[str, list[dict[str, Any]]] = {}
    for lane in lanes:
        row = shared.get(lane["name"])
        others = [name for name in row.lanes if name != lane["name"]] if row else []
        lane["shares"] = f"one device with {', '.join(others)}" if others else ""
        groups.setdefault(row.name if row and by_device else lane["role"], []).append(lane)
    return {
        "span_us": max(report.span_us, 1.0),
        "stages": [
            {"name": name, "colour": stage_class(name) if span.kind == "stage" else "tool"}
            for name, span in stages.items()
        ],
        "groups": [_group(role, members) for role, members in groups.items()],
        "running": {row.worker: row.requests for row in report.running},
        "queued": {row.worker: row.queued for row in report.running},
        "device": any(row.device for row in report.workers),
        "timeline_begin_ns": report.timeline_begin_ns,
    }


def _shown(span: GanttSpan) -> str:
    """Return what a span is called: the stage, or what its tool does."""
    return span.name if span.kind == "stage" else f"(tool {span.kind}s)"


def _rows(report: Report) -> Iterable[tuple[str, WorkerRow | None, list[GanttSpan]]]:
    """Yield each lane with its worker's name and stages, the controller first.

    Of an engine's lanes the first has the stages, which are those of the whole replica.
    """
    spans: dict[str, list[GanttSpan]] = {}
    for span in report.gantt:
        spans.setdefault(span.lane, []).append(span)
    if CONTROLLER in spans:
        yield CONTROLLER, None, spans.pop(CONTROLLER)
    for row in report.workers:
        owner = row.name if row.replica is None else row.name.rpartition("_rank")[0]
        yield owner, row, spans.pop(owner, [])
    for owner, left in spans.items():
        yield owner, None, left


def _lane(
    owner: str,
    row: WorkerRow | None,
    spans: list[GanttSpan],
    stages: Sequence[str],
    reasons: dict[str, str],
) -> dict[str, Any]:
    name = row.name if row else owner
    match = _ROLE.fullmatch(owner)
    return {
        "name": name,
        "worker": owner,
        "role": row.role if row else match[1] if match else owner,
        "load": row.load if row else [],
        "communication": row.communication_load if row and any(row.communication_load) else [],
        "waiting": row.waiting_load if row and any(row.waiting_load) else [],
        "stands_out": reasons.get(owner) or reasons.get(name, ""),
        "spans": [
            {
                "stage": stages.index(_shown(span)),
                "begin": round(span.begin_us, 1),
                "end": round(span.end_us, 1),
                "row": span.row,
                "nested": span.depth > 0,
                "busy": span.busy_us,
                "communication": span.communication_us,
            }
            for span in spans
        ],
    }


def _group(role: str, lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lanes of a role, and for each run of a stage when its lanes begin and end it."""
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for lane in lanes:
        seen: dict[int, int] = {}
        for span in lane["spans"]:
            stage = span["stage"]
            runs.setdefault((stage, seen.get(stage, 0)), []).append(span)
            seen[stage] = seen.get(stage, 0) + 1
    loaded = [lane for lane in lanes if lane["load"]]
    return {
        "role": role,
        "lanes": lanes,
        **{curve: _mean([lane[curve] for lane in loaded]) for curve in _CURVES},
        "envelope": [
            {
                "stage": stage,
                "begin": min(span["begin"] for span in spans),
                "all_in": max(span["begin"] for span in spans),
                "first_out": min(span["end"] for span in spans),
                "end": max(span["end"] for span in spans),
                "nested": all(span["nested"] for span in spans),
                "row": min(span["row"] for span in spans),
                "lanes": len(spans),
            }
            for (stage, _), spans in runs.items()
        ],
    }


def _mean(loads: Sequence[Sequence[int]]) -> list[float]:
    return [round(sum(part) / len(loads), 1) for part in zip_longest(*loads, fillvalue=0)]


def outliers(report: Report) -> dict[str, str]:
    """Return what stands out about a worker or lane, by its name; the most telling ones first."""
    found: dict[str, str] = {}
    for finding in report.findings:
        if reason := _REASONS.get(finding.rule):
            found |= dict.fromkeys(finding.lanes, reason)
    for role in dict.fromkeys(row.role for row in report.workers):
        for lane, reason in _unlike([row for row in report.workers if row.role == role]):
            found.setdefault(lane, reason)
    return found


def _unlike(lanes: list[WorkerRow]) -> list[tuple[str, str]]:
    """Return the lanes whose busy share is far from that of their peers, the farthest first."""
    shares = {row.name: row.busy_us / row.span_us for row in lanes if row.span_us}
    if len(shares) < 3:
        return []
    usual = median(shares.values())
    spread = _NORMAL * median(abs(share - usual) for share in shares.values())
    limit = max(_SPREADS * spread, _POINTS)
    far = [name for name, share in shares.items() if abs(share - usual) > limit]
    far.sort(key=lambda name: -abs(shares[name] - usual))
    return [(name, f"busy {shares[name]:.0%}, median {usual:.0%}") for name in far]
