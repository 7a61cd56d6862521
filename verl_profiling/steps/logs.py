"""Reads the trajectory logs of a step, with statuses that were set later."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.trajectory_log import (
    NO_SPAN,
    LaterStatuses,
    SpanRecord,
    TrajectoryLog,
    last_status,
    later_statuses,
    read_log,
)
from verl_profiling.manifest import MOST_NESTED
from verl_profiling.steps.cluster import results
from verl_profiling.steps.step import Source, StepInputs
from verl_profiling.steps.trace import Limits


def statuses_of(inputs: StepInputs) -> LaterStatuses:
    """Return the last status changes in all trajectory logs of a step."""
    found: LaterStatuses = {}
    calls = [(partial(_statuses_in, source), [source]) for source in inputs.logs]
    for statuses in results(calls, inputs.ray):
        for key, new in () if isinstance(statuses, TraceFormatError) else statuses.items():
            found[key] = max(found.get(key, new), new)
    return found


def read_logs(inputs: StepInputs) -> Iterator[tuple[Source, TrajectoryLog | None, list[str]]]:
    """Yield the logs of a step, sorted by lane, with one log in memory at a time.

    Each item has the source, the log from :func:`linked_log` (``None`` if unreadable), and
    sentences on unreadable or unrecorded parts. Statuses are the latest in any log of the step.
    """
    statuses = statuses_of(inputs)
    calls = [(partial(linked_log, one, inputs.limits, statuses), [one]) for one in inputs.logs]
    for source, log in zip(inputs.logs, results(calls, inputs.ray), strict=True):
        if isinstance(log, TraceFormatError):
            yield source, None, [str(log)]
        else:
            yield source, log, [f"{source.path.name}: {problem}" for problem in log.problems]


def linked_log(source: Source, limits: Limits, statuses: LaterStatuses) -> TrajectoryLog:
    """Read one trajectory log; sort parents before children, and drop links between trajectories.

    A span without a recorded trajectory becomes a span outside trajectories. Unrecorded parents are
    left out. Spans below the deepest level (``MOST_NESTED``) are children of the span above that
    level.

    Raises:
        TraceFormatError: The file is not a trajectory log, or cannot be read.
    """
    log = read_log(source.file, limits.reached)
    for place, trajectory in enumerate(log.trajectories):
        if (status := last_status(trajectory, statuses)) != trajectory.status:
            log.trajectories[place] = msgspec.structs.replace(trajectory, status=status)
    known = {trajectory.id for trajectory in log.trajectories}
    spans: dict[int, SpanRecord] = {}
    depths = {NO_SPAN: 0}
    for span in sorted(log.spans, key=lambda span: span.id):
        owner = span.trajectory if span.trajectory in known else NO_SPAN
        around = spans.get(span.parent)
        parent = span.parent if around is not None and around.trajectory == owner else NO_SPAN
        if depths[parent] == MOST_NESTED:
            parent = spans[parent].parent
        depths[span.id] = depths[parent] + 1
        if (owner, parent) != (span.trajectory, span.parent):
            span = msgspec.structs.replace(span, trajectory=owner, parent=parent)
        spans[span.id] = span
    log.spans = list(spans.values())
    return log


def _statuses_in(source: Source) -> LaterStatuses:
    return later_statuses(source.file, source.offset_ns)
