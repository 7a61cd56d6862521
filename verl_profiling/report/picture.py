"""The data of the picture "Lanes over time", which ``page/picture.js`` draws."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

import msgspec

from verl_profiling.numbers.report_columns import GanttSpan, PathRow, WorkerRow
from verl_profiling.report.colours import colour_of
from verl_profiling.report.model import Report
from verl_profiling.slices.intervals import grouped

CONTROLLER = "controller"
_PATH = "critical path"
_TRAJECTORIES = "trajectories"
_SERVICES = "services"
_LEAST_SHARE = 0.0005  # least share of the step of a drawn part of the critical path
_ROLE = re.compile(r"(.*?)(?:_rank)?\d*")
_REASONS = {"straggler": "slower than the others", "long_tail": "last in the rollout"}  # by rule
_CURVES = ("load", "communication", "waiting")  # a curve of zeros is left empty


def picture(report: Report) -> dict[str, Any]:
    """Return the data of the picture "Lanes over time": lanes by role with stages and load, and
    running requests.
    """
    path = []
    if report.captured:
        path = [row for row in report.critical_path if row.share >= _LEAST_SHARE]
    parts = list(map(_part, path))
    waits = sorted(report.trajectory_gantt, key=attrgetter("lane", "begin_us"))
    stages = list(dict.fromkeys(span.name for span in (*report.gantt, *parts, *waits)))
    groups: dict[str, list[dict[str, Any]]] = {}
    if path:
        groups[_PATH] = [_lane(_PATH, None, parts, stages)]
        for span, row in zip(groups[_PATH][0]["spans"], path, strict=True):
            span["said"] = f"{row.who}: {row.kind}"
    reasons = _reasons(report)
    for owner, worker, spans in _rows(report):
        lane = _lane(owner, worker, spans, stages)
        name = lane["name"]
        lane["stands_out"] = reasons.get(owner) or reasons.get(name, "")
        lane["critical"] = [_times(part) for part in parts if part.lane in (name, owner)]
        groups.setdefault(lane["role"], []).append(lane)
    running = _add_services(report, groups)
    for owner, spans in grouped(waits, attrgetter("lane")).items():
        groups.setdefault(_TRAJECTORIES, []).append(_lane(owner, None, spans, stages))
    own = {span.name for span in (*report.gantt, *parts)}
    return {
        "span_us": max(report.span_us, 1.0),
        "stages": [{"name": name, "colour": colour_of(name, own)} for name in stages],
        "groups": [_group(role, members) for role, members in groups.items()],
        "running": running,
        "device": report.on_devices,
        "timeline_begin_ns": report.timeline_begin_ns,
    }


def _add_services(
    report: Report, groups: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Add a lane for each service but the replicas, whose lanes are there; return the queues
    of replicas by name.
    """
    replicas = {row.worker for row in report.replicas}
    running = {}
    for service in report.services:
        queue = msgspec.structs.asdict(service)
        if service.name in replicas:
            running[service.name] = queue
        else:
            lane = _lane(service.name, None, [], []) | {"queue": queue}
            groups.setdefault(_SERVICES, []).append(lane)
    return running


def _part(row: PathRow) -> GanttSpan:
    """Return a part of the critical path as a span of the picture, named by its outermost stage."""
    return GanttSpan(
        lane=row.worker,
        name=row.stage.split(" / ")[0],
        begin_us=row.begin_us,
        end_us=row.begin_us + row.duration_us,
        depth=0,
    )


def _reasons(report: Report) -> dict[str, str]:
    """Return why lanes stand out, e.g. ``last in the rollout``, by name of the lane."""
    reasons: dict[str, str] = {}
    for finding in report.findings:
        reason = _REASONS.get(finding.rule)
        if reason:
            reasons |= dict.fromkeys(finding.lanes, reason)
    return reasons


def _rows(report: Report) -> Iterable[tuple[str, WorkerRow | None, list[GanttSpan]]]:
    """Yield each lane with its worker's name and stages, the controller first.

    The first lane of an engine shows the stages, which are stages of the whole replica.
    """
    spans = grouped(report.gantt, lambda span: span.lane)
    if CONTROLLER in spans:
        yield CONTROLLER, None, spans.pop(CONTROLLER)
    for row in report.workers:
        owner = row.name
        if row.replica is not None:
            owner = row.name.rpartition("_rank")[0]
        yield owner, row, spans.pop(owner, [])
    for owner, left in spans.items():
        yield owner, None, left


def _lane(
    owner: str, row: WorkerRow | None, spans: list[GanttSpan], stages: Sequence[str]
) -> dict[str, Any]:
    match = _ROLE.fullmatch(owner)
    lane: dict[str, Any] = {
        "name": owner,
        "worker": owner,
        "role": match[1] if match else owner,
        **dict.fromkeys(_CURVES, ()),
        "stands_out": "",
        "critical": (),
        "spans": [],
    }
    if row is not None:
        curves = (row.load, row.communication_load, row.waiting_load)
        lane |= {"name": row.name, "role": row.role, "load": row.load}
        lane |= {name: curve for name, curve in zip(_CURVES, curves, strict=True) if any(curve)}
    for span in spans:
        shown = {"stage": stages.index(span.name), "row": span.row, "nested": span.depth > 0}
        lane["spans"].append(_times(span) | shown)
    return lane


def _times(span: GanttSpan) -> dict[str, Any]:
    return {"begin": round(span.begin_us, 1), "end": round(span.end_us, 1)}


def _group(role: str, lanes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the lanes of a role, and the begin and end of each run of a stage on the lanes."""
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for lane in lanes:
        count = Counter[int]()
        for span in lane["spans"]:
            stage = span["stage"]
            runs.setdefault((stage, count[stage]), []).append(span)
            count[stage] += 1
    loaded = [lane for lane in lanes if lane["load"]]
    return {
        "role": role,
        "open": role in (_TRAJECTORIES, _SERVICES),
        "lanes": lanes,
        "critical": list(chain.from_iterable(lane["critical"] for lane in lanes)),
        **{curve: _mean([lane[curve] for lane in loaded]) for curve in _CURVES},
        "envelope": [_envelope(stage, spans) for (stage, _), spans in runs.items()],
    }


def _envelope(stage: int, spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Return first and last begin, and first and last end, of a run of a stage on several lanes."""
    begins, ends = [span["begin"] for span in spans], [span["end"] for span in spans]
    return {
        "stage": stage,
        "begin": min(begins),
        "all_in": max(begins),
        "first_out": min(ends),
        "end": max(ends),
        "nested": all(span["nested"] for span in spans),
        "row": min(span["row"] for span in spans),
        "lanes": len(spans),
    }


def _mean(loads: Sequence[Sequence[int]]) -> list[float]:
    return [round(sum(part) / len(loads), 1) for part in zip_longest(*loads, fillvalue=0)]
