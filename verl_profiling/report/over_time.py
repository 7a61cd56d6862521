"""The data of the picture: runs of stages with their rows, and curves of equal parts of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import Spans, length, subtract, within
from verl_profiling.report.lanes import Step
from verl_profiling.report.model import GanttSpan
from verl_profiling.report.rows import RequestRow, RunningRow

PARTS = 240


def percent(spans: Spans, begin_ns: int, end_ns: int) -> list[int]:
    """Return how much of each part is covered by disjoint spans, 0 to 100."""
    return [int(share) for share in np.rint(100 * _running(spans, begin_ns, end_ns))]


def requests_running(requests: Iterable[RequestRow], span_us: float) -> list[RunningRow]:
    """Return how many requests of each replica are on their way in each part of the step, on average.

    And how many of them are queued: from the engine getting a request (or, where it does not tell, from
    its begin) to scheduling it for the first time.
    """
    by_replica: dict[tuple[str, int], list[tuple[float, float]]] = {}
    queued: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for request in requests:
        key = (request.worker, request.replica)
        by_replica.setdefault(key, []).append((request.begin_us, request.end_us))
        if request.scheduled_us is not None:
            since_us = request.begin_us if request.arrival_us is None else request.arrival_us
            queued.setdefault(key, []).append((since_us, max(since_us, request.scheduled_us)))
    return [
        RunningRow(
            worker=key[0],
            replica=key[1],
            requests=_means(spans, span_us),
            queued=_means(queued[key], span_us) if key in queued else [],
        )
        for key, spans in sorted(by_replica.items(), key=lambda item: item[0][1])
    ]


def _means(spans_us: list[tuple[float, float]], whole_us: float) -> list[float]:
    spans = np.rint(np.array(spans_us) * 1000).astype(np.int64)
    return [round(float(mean), 2) for mean in _running(spans, 0, round(whole_us * 1000))]


def _running(spans: Spans, begin_ns: int, end_ns: int) -> NDArray[np.float64]:
    """Return how many spans run in each part on average; they may overlap."""
    whole = max(end_ns - begin_ns, 1)
    edges = np.linspace(0.0, whole, PARTS + 1)
    inside = np.clip(spans - begin_ns, 0, whole).astype(np.float64)
    before = _time_since(inside[:, 0], edges) - _time_since(inside[:, 1], edges)
    return np.clip(np.diff(before) * PARTS / whole, 0.0, None)


def _time_since(instants: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, at each edge, the time since each instant before it, added up."""
    ordered = np.sort(instants)
    count = np.searchsorted(ordered, edges)
    return count * edges - np.concatenate(([0.0], np.cumsum(ordered)))[count]


_MOST_ROWS = 64


def gantt(step: Step) -> Iterator[GanttSpan]:
    """Yield the runs of the controller's stages, then of each worker's with its tool's starts and stops.

    A start or stop outside of the step, as in e2e mode, is not part of the picture.
    """
    yield from _stacked(_stages("controller", step.stages, step))
    for worker in step.workers:
        yield from _stacked(_stages(worker.name, worker.stages, step))
        for span in worker.tool_spans:
            begin_ns, end_ns = max(span.begin_ns, step.begin_ns), min(span.end_ns, step.end_ns)
            if begin_ns < end_ns:
                yield GanttSpan(
                    lane=worker.name,
                    name=span.stage or "",
                    begin_us=(begin_ns - step.begin_ns) / 1000,
                    end_us=(end_ns - step.begin_ns) / 1000,
                    depth=0,
                    kind=span.name,
                )


def _stages(worker: str, spans: list[StageSpan], step: Step) -> list[GanttSpan]:
    lanes = [lane for lane in step.lanes if lane.source.worker == worker]
    busy = [lane.busy for lane in lanes]
    communication = [subtract(lane.communication, lane.compute) for lane in lanes]
    return [
        GanttSpan(
            lane=worker,
            name=span.name,
            begin_us=(span.begin_ns - step.begin_ns) / 1000,
            end_us=(span.end_ns - step.begin_ns) / 1000,
            depth=span.depth,
            busy_us=_mean_us(busy, span),
            communication_us=_mean_us(communication, span),
        )
        for span in spans
    ]


def _mean_us(lanes: list[Spans], stage: StageSpan) -> float | None:
    """Return how much of a stage the spans of each lane cover, on average."""
    covered = [length(within(spans, stage.begin_ns, stage.end_ns)) / 1000 for spans in lanes]
    return fmean(covered) if covered else None


def _stacked(spans: list[GanttSpan]) -> Iterator[GanttSpan]:
    """Give each span the row of the one that it is inside of; an outermost one the first that is free.

    Beyond 64 rows, spans share the last one.
    """
    rows: list[list[GanttSpan]] = []  # the open spans of each, outermost first
    for span in sorted(spans, key=lambda span: (span.begin_us, span.depth, -span.end_us)):
        for opened in rows:
            while opened and opened[-1].end_us <= span.begin_us:
                opened.pop()
        around = [index for index, opened in enumerate(rows) if opened and opened[-1].depth == span.depth - 1]
        free = next((index for index, opened in enumerate(rows) if not opened), len(rows))
        row = max(around, key=lambda index: rows[index][-1].begin_us) if around else free
        row = min(row, _MOST_ROWS - 1)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        yield msgspec.structs.replace(span, row=row)
