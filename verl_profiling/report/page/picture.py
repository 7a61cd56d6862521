"""The data of a step's picture, for the script that draws it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from verl_profiling.report.collectives import outliers
from verl_profiling.report.model import GanttSpan, Report
from verl_profiling.report.page.colours import stage_class
from verl_profiling.report.rows import WorkerRow

CONTROLLER = "controller"
_ROLE = re.compile(r"(.*?)(?:_rank)?\d*")
_FINISHES = 400
_MOST_DEVICES = 8  # whose lanes are drawn together; of more, roles are, so that they can be folded
_CURVES = ("load", "communication", "waiting")  # one without anything in it is empty


def picture(report: Report) -> dict[str, Any]:
    """Return lanes by role with their stages and their load over time, and the curves of the rollout."""
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
        "finishes_us": _thinned(report.tail.finishes_us) if report.tail else [],
        "half_us": report.tail.median_finish_us if report.tail else 0.0,
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
        "engine": row is not None and row.replica is not None,
        "busy": row.busy_us / row.span_us if row and row.span_us else None,
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
        "engine": any(lane["engine"] for lane in lanes),
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


def _thinned(instants: Sequence[float]) -> list[float]:
    """Return instants of which at most a few hundred are left, the first and the last among them."""
    if len(instants) <= _FINISHES:
        return list(instants)
    last = len(instants) - 1
    return [instants[round(index * last / (_FINISHES - 1))] for index in range(_FINISHES)]
