"""The picture's data: runs of stages, starts and stops of tools, and the row that each is drawn in."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import msgspec

from verl_profiling.manifest import StageSpan
from verl_profiling.report.intervals import Spans, length, subtract, within
from verl_profiling.report.lanes import Step
from verl_profiling.report.model import GanttSpan

__all__ = ["gantt"]

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
    activities = [lane.activity for lane in step.lanes if lane.source.worker == worker]
    busy = [activity.busy for activity in activities]
    communication = [subtract(activity.communication, activity.compute) for activity in activities]
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
