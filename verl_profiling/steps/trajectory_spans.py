"""Nested spans: reads them from trajectory logs, and assigns spans to rows of a timeline."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.trajectory_log import (
    NO_SPAN,
    Block,
    LaterStatuses,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
    last_status,
    later_statuses,
    read_log,
)
from verl_profiling.manifest import MOST_NESTED, StageSpan
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.parallel_reads import results
from verl_profiling.steps.step import Source, StepInputs
from verl_profiling.steps.trace_content import Limits

UNKNOWN = "unknown"
"""Name of the blocker, if no stack was sampled while an event loop was blocked."""

_MOST_ROWS = 64  # of stages, or of the spans of a trajectory
_Span = TypeVar("_Span", bound=StageSpan | TrajectoryRecord | SpanRecord)


def statuses_of(inputs: StepInputs) -> LaterStatuses:
    """Return the last status that was set after the end of trajectories, in all of a step.

    An example is ``filtered``, which a loop sets on a group of samples that it drops.
    """
    latest: LaterStatuses = {}
    if inputs.manifest is not None:
        for change in inputs.manifest.statuses:
            latest[change.group, change.sample] = (change.at_ns, change.status)
    calls = [(partial(_statuses_in, source), [source]) for source in inputs.logs]
    for statuses in results(calls, inputs.ray):
        if not isinstance(statuses, TraceFormatError):
            for key, new in statuses.items():
                latest[key] = max(latest.get(key, new), new)
    return latest


def read_logs(inputs: StepInputs) -> Iterator[tuple[Source, TrajectoryLog | None, list[str]]]:
    """Yield the logs of a step, sorted by lane, with one log in memory at a time.

    Each item has the log's file, the log from :func:`linked_log` (``None`` if unreadable), and
    sentences on unreadable or unrecorded parts. A trajectory has the last status that any log of
    the step has for it.
    """
    statuses = statuses_of(inputs)
    calls = [(partial(linked_log, log, inputs.limits, statuses), [log]) for log in inputs.logs]
    for source, log in zip(inputs.logs, results(calls, inputs.ray), strict=True):
        if isinstance(log, TraceFormatError):
            yield source, None, [str(log)]
        else:
            yield source, log, [f"{source.path.name}: {problem}" for problem in log.problems]


def linked_log(source: Source, limits: Limits, statuses: LaterStatuses) -> TrajectoryLog:
    """Read one trajectory log, with spans sorted so that parents precede their children.

    A span without a recorded trajectory becomes a span outside trajectories. A span whose parent is
    not recorded, or belongs to another trajectory, has no parent. A span below the deepest level
    (``MOST_NESTED``) gets a parent one level higher.

    Raises:
        TraceFormatError: The file is not a trajectory log, or cannot be read.
    """
    log = read_log(source.file, limits.reached)
    for place, trajectory in enumerate(log.trajectories):
        if (status := last_status(trajectory, statuses)) != trajectory.status:
            log.trajectories[place] = replace(trajectory, status=status)
    if _is_linked(log):
        return log
    recorded = {trajectory.id for trajectory in log.trajectories}
    spans: dict[int, SpanRecord] = {}
    depths = {NO_SPAN: 0}
    for span in sorted(log.spans, key=lambda span: span.id):
        owner = span.trajectory if span.trajectory in recorded else NO_SPAN
        around = spans.get(span.parent)
        parent = span.parent if around is not None and around.trajectory == owner else NO_SPAN
        if depths[parent] == MOST_NESTED:
            parent = spans[parent].parent
        depths[span.id] = depths[parent] + 1
        if (owner, parent) != (span.trajectory, span.parent):
            span = replace(span, trajectory=owner, parent=parent)
        spans[span.id] = span
    log.spans = list(spans.values())
    return log


def _is_linked(log: TrajectoryLog) -> bool:
    """Return whether all spans of a log are sorted, and have their trajectory and their parent in
    it, as in most logs.
    """
    id, owner, parent = (column(log.spans, name) for name in ("id", "trajectory", "parent"))
    recorded = np.array([NO_SPAN, *(trajectory.id for trajectory in log.trajectories)])
    if (id[1:] <= id[:-1]).any() or not np.isin(owner, recorded).all():
        return False
    place = np.searchsorted(id, parent).clip(max=max(len(id) - 1, 0))
    inner = np.flatnonzero(parent != NO_SPAN)
    around = place[inner]
    is_there = (id[around] == parent[inner]) & (around < inner) & (owner[around] == owner[inner])
    if not is_there.all():
        return False
    for _ in range(MOST_NESTED - 1):
        around = place[around[parent[around] != NO_SPAN]]
    return not len(around)


def column(records: Sequence[Any], name: str) -> Ints:
    """Return a field of each record as an array of integers."""
    return np.fromiter(map(attrgetter(name), records), np.int64, len(records))


def _statuses_in(source: Source) -> LaterStatuses:
    return later_statuses(source.file, source.offset_ns)


def blocker(block: Block, names: Mapping[int, str]) -> str:
    """Return the name of the span whose code blocked an event loop; outside spans, the function;
    without a stack sample, ``unknown``.

    Args:
        block: The period in which the loop was blocked.
        names: Names of spans by their ids.
    """
    return (names.get(block.span) or block.function) if block.function else UNKNOWN


def packed_rows(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of the lowest free row for each span (begin, end), so that no spans of a
    row overlap.
    """
    rows = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # end, row
    free: list[int] = []
    for place in sorted(range(len(spans)), key=lambda place: spans[place][0]):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[place]))
    return rows


def nested_rows(spans: Iterable[_Span], is_child: Callable[[_Span, _Span], bool]) -> list[int]:
    """Return the number of a row for each span, so that spans of a row are nested or do not
    overlap.

    A span has the row of its parent, if the parent is the innermost span there and encloses the
    span, else the first free row. There are at most 64 rows; further concurrent spans share the
    last row.

    Args:
        spans: The spans, parents before their children.
        is_child: Function that returns whether the first span is a child of the second.
    """
    rows: list[list[_Span]] = []  # open spans of each row, outermost first
    row_of_each = []
    for span in spans:
        begin_ns, end_ns = span.begin_ns, span.end_ns
        free, parent = len(rows), None
        for number, opened in enumerate(rows):
            while opened and opened[-1].end_ns <= begin_ns:
                opened.pop()
            if not opened:
                free = min(free, number)
                continue
            inner = opened[-1]
            is_around = (
                inner.begin_ns <= begin_ns and end_ns <= inner.end_ns and is_child(span, inner)
            )
            if is_around and (parent is None or inner.begin_ns > parent.begin_ns):
                parent, row = inner, number
        if parent is None:
            row = min(free, _MOST_ROWS - 1)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        row_of_each.append(row)
    return row_of_each


def stages_by_row(spans: Iterable[StageSpan]) -> Iterator[tuple[StageSpan, int]]:
    """Yield stages in order of begin, each with the number of its row. A stage is a child of one
    whose depth is less by 1.
    """
    ordered = sorted(spans, key=lambda span: (span.begin_ns, span.depth, -span.end_ns))
    rows = nested_rows(ordered, lambda span, around: around.depth == span.depth - 1)
    return zip(ordered, rows, strict=True)
