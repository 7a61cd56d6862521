"""The stages of a step: rows of the controller's stages, stages around the step,
and the Gantt chart. A row has the parts of the stage's time that more lanes do not shorten, and the
part that they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import (
    CAPTURE_START,
    CAPTURE_STOP,
    POLLING,
    WAIT,
    CaptureResult,
    Manifest,
)
from verl_profiling.numbers.report_columns import AroundRow, GanttSpan, Polling, StageRow
from verl_profiling.slices.intervals import (
    EMPTY,
    Ints,
    Sharing,
    Spans,
    common,
    covered_before,
    crowded,
    grouped,
    intersection,
    length,
    overlaps,
    subtract,
    time_of,
    union,
    within,
)
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.trajectory_spans import stages_by_row

CAPTURE_CALLS = "(starting and stopping the capture)"
OUTSIDE_STAGES = "(outside stages)"
PARTS = 240
"""Number of equal parts of the step; a curve has one point per part."""

_WITHOUT_LANE = ["trajectories"]
"""Tools of a process that runs trajectories: environments and rewards, without an accelerator."""
_TAKES_PART = 0.05
"""Least time of a worker in a stage, as a share of the longest worker's: less is none of its work,
as operators of an idle process in a CPU trace.
"""


def anatomy(step: Step, nobody: Spans = EMPTY) -> Iterator[StageRow]:
    """Yield a row per stage of the controller, by first begin, and one for the rest of the step.

    The time of starting and stopping the capture is a row of its own. All other time is divided
    equally among the outermost stages that run, so the shares of rows with depth 0 add up to 1.
    Nested stages divide the time of their parent in the same way.

    Args:
        step: The step.
        nobody: Time in which every lane was idle and no worker was in a stage of its own.
    """
    if not step.stages:
        return
    workers = [_times(worker, step) for worker in step.workers if worker.tools != _WITHOUT_LANE]
    runs = grouped(step.stages, attrgetter("name", "depth"))
    capture = within(capture_time(step), step.begin_ns, step.end_ns)
    idle = _without(capture, nobody)
    times = []
    outside = subtract(step.whole, capture)
    for (_, depth), spans in runs.items():
        time = within(time_of(spans), step.begin_ns, step.end_ns)
        times.append(_without(capture, time))
        if depth == 0:
            outside = subtract(outside, time)
    whole = np.concatenate(times)
    row_of = np.repeat(np.arange(len(times)), list(map(len, times)))
    depths = np.array([depth for _, depth in runs])
    shares = Sharing(whole[:, 0], whole[:, 1], depths[row_of]).shares()
    parts_ns = np.bincount(row_of, shares, len(times)).tolist()
    for ((name, depth), spans), time, part_ns in zip(runs.items(), times, parts_ns, strict=True):
        more = {"depth": depth, "idle_us": int(overlaps(time, idle).sum()) / 1000}
        row = _row(name, len(spans), spans[0].begin_ns, time, part_ns, step, **more)
        if depth == 0:
            row = _with_parts(row, step, workers)
        yield row
    for name, time in ((CAPTURE_CALLS, capture), (OUTSIDE_STAGES, outside)):
        if len(time) or name == OUTSIDE_STAGES:
            begin_ns = int(np.append(time[:, 0], step.begin_ns)[0])
            yield _row(name, len(time), begin_ns, time, length(time), step)


def _without(capture: Spans, time: Spans) -> Spans:
    """Return a time on an axis from which the capture's time is cut out.

    An instant moves ahead by the capture's time before it.
    """
    return union(time - covered_before(capture, time))


def _row(
    name: str, runs: int, begin_ns: int, time: Spans, part_ns: float, step: Step, **more: Any
) -> StageRow:
    return StageRow(
        name=name,
        runs=runs,
        begin_us=(begin_ns - step.begin_ns) / 1000,
        duration_us=length(time) / 1000,
        share=part_ns / max(step.span_ns, 1),
        **more,
    )


def _times(worker: CaptureResult, step: Step) -> tuple[Spans, Spans, Spans]:
    """Return the time in which a worker runs, its communication, and its waits."""
    runs = time_of(worker.requests)
    waits = EMPTY
    for span in worker.stages:
        if span.name.startswith(WAIT) or span.name == POLLING:
            waits = union(waits, time_of([span]))
        else:
            runs = union(runs, time_of([span]))
    sent: list[Spans] = []
    waiting: list[Spans] = []
    for lane in step.lanes_of(worker.name):
        runs = union(runs, lane.busy)
        if worker.identity.role == ROLLOUT_ROLE:
            runs = union(runs, lane.iterations[:, :2])
        sent.append(subtract(lane.communication, lane.compute))
        waiting.append(lane.waiting)
    waits = union(waits, common(waiting))
    return runs, subtract(common(sent), waits), waits


def _with_parts(row: StageRow, step: Step, workers: list[tuple[Spans, Spans, Spans]]) -> StageRow:
    """Return the row of an outermost stage with its parts.

    A stage is the time of the loop alone, and the time in which any worker runs. The latter is the
    mean work of the workers, their mean communication, and the wait for the last one.
    """
    time = step.during(row.name)
    inside = [[intersection(time, part) for part in times] for times in workers]
    longest = max((length(times[0]) for times in inside), default=0)
    inside = [times for times in inside if length(times[0]) > _TAKES_PART * longest]
    if not inside:
        return row
    runs, sent, waits = zip(*inside, strict=True)
    any_us = length(union(*runs)) / 1000
    sent_us = fmean(map(length, sent)) / 1000
    own_us = fmean(map(length, map(subtract, runs, waits))) / 1000
    return msgspec.structs.replace(
        row,
        lanes=len(inside),
        alone_us=max(row.duration_us - any_us, 0.0),
        work_us=own_us - sent_us,
        communication_us=sent_us,
        tail_us=min(any_us, row.duration_us) - own_us,
    )


def capture_time(step: Step) -> Spans:
    """Return the time in which the loop only waited for recordings to start or stop.

    Included are the pauses around the step and, outside stages, the calls that start or stop
    recordings. Inside a stage (discrete mode), starts and stops of tools that record the same stage
    are included, because other tools delay nobody. A worker's stage that the controller does not
    have counts only while the controller is in exactly one stage.
    """
    if step.manifest is None:
        return EMPTY
    whole, stages = step.during(), {span.name for span in step.stages}
    recorded = (
        span for worker in step.workers for span in worker.tool_spans if span.stage is not None
    )
    # By stage; "" for stages that the controller does not have.
    tools = grouped(recorded, lambda span: span.stage if span.stage in stages else "")
    elsewhere = time_of(tools.pop("", []))
    if len(elsewhere):
        outermost = [span for span in step.stages if span.depth == 0]
        shared = crowded([time_of(outermost, name) for name in {span.name for span in outermost}])
        elsewhere = intersection(elsewhere, subtract(whole, shared))
    inside = (intersection(time_of(spans), step.during(name)) for name, spans in tools.items())
    pauses = time_of(step.manifest.around_the_step, CAPTURE_START, CAPTURE_STOP)
    return union(pauses, subtract(time_of(step.manifest.rpcs), whole), elsewhere, *inside)


def around_rows(manifest: Manifest) -> Iterator[AroundRow]:
    """Yield a row for each pause and each outermost stage around the step, sorted by begin."""
    outermost = [span for span in manifest.around_the_step if span.depth == 0]
    runs = grouped(sorted(outermost, key=attrgetter("begin_ns")), attrgetter("name"))
    for name, spans in runs.items():
        yield AroundRow(
            name=name,
            runs=len(spans),
            begin_us=(spans[0].begin_ns - manifest.begin_ns) / 1000,
            duration_us=sum(span.end_ns - span.begin_ns for span in spans) / 1000,
        )


def percent(spans: Spans, step: Step) -> list[int]:
    """Return how much (0 to 100%) of each of 240 parts of the step disjoint spans cover."""
    observed = covered_before(step.whole, spans)
    return [int(share) for share in np.rint(100 * mean_running(observed, 0, step.span_ns))]


def mean_running(spans: Spans, begin_ns: int, end_ns: int) -> NDArray[np.float64]:
    """Return the mean number of (overlapping) spans that run in each of 240 parts of the step."""
    whole = max(end_ns - begin_ns, 1)
    edges = np.linspace(0.0, whole, PARTS + 1)
    inside = np.clip(spans - begin_ns, 0, whole).astype(np.float64)
    return np.clip(np.diff(covered_before(inside, edges)) * PARTS / whole, 0.0, None)


def polling(step: Step, ends: Ints) -> Polling | None:
    """Return the cost of the trainer's polling in the rollout; ``None`` without polling.

    Polling after the last trajectory's end is lost time, for each run of the stage ``rollout``.
    Polling before that end costs nothing, because the trainer waits for trajectories.

    Args:
        step: The step.
        ends: Ends of the training trajectories (unix ns).
    """
    rollout = step.rollout
    pauses = np.array(
        [(span.begin_ns, span.end_ns) for span in step.stages if span.name == POLLING], np.int64
    ).reshape(-1, 2)
    pauses = pauses[overlaps(pauses, rollout) > 0]
    if not len(pauses):
        return None
    asleep = intersection(rollout, union(pauses))
    late_ns = 0
    for begin_ns, end_ns in rollout.tolist():
        last_ns = int(ends[(begin_ns <= ends) & (ends <= end_ns)].max(initial=0))
        if last_ns:
            late_ns += length(within(asleep, last_ns, end_ns))
    return Polling(
        pauses=len(pauses),
        interval_s=float(np.median(np.diff(pauses))) / 1e9,
        seconds=length(asleep) / 1e9,
        late_s=late_ns / 1e9,
        late_share=late_ns / max(step.span_ns, 1),
    )


def gantt(step: Step) -> Iterator[GanttSpan]:
    """Yield the bars of the Gantt chart: runs of the controller's stages, then of each worker's."""
    processes = [("controller", step.stages)]
    processes += map(attrgetter("name", "stages"), step.workers)
    for lane, stages in processes:
        for span, row in stages_by_row(stages):
            yield GanttSpan(
                lane=lane,
                name=span.name,
                begin_us=(span.begin_ns - step.begin_ns) / 1000,
                end_us=(span.end_ns - step.begin_ns) / 1000,
                depth=span.depth,
                row=row,
                bytes=span.bytes,
            )
