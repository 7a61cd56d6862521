"""The parts of a stage's time that more lanes do not shorten, and the part that they do."""

from __future__ import annotations

from statistics import fmean

import msgspec

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import POLLING, WAIT, CaptureResult
from verl_profiling.numbers.columns import StageRow
from verl_profiling.slices.intervals import (
    Spans,
    common,
    intersection,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.steps.lanes import Step

_WITHOUT_LANE = ["trajectories"]
"""Tools of a process that runs trajectories: environments and rewards, without an accelerator."""
_TAKES_PART = 0.05
"""Least time of a worker in a stage, as a share of the longest worker's: less is none of its work,
as operators of an idle process in a CPU trace.
"""


def with_parts(rows: list[StageRow], step: Step) -> list[StageRow]:
    """Return the rows of stages, the outermost ones with their parts.

    A stage is the time of the loop alone, and the time in which any worker runs. The latter is the
    mean work of the workers, their mean communication, and the wait for the last one.
    """
    workers = [_times(worker, step) for worker in step.workers if worker.tools != _WITHOUT_LANE]
    return [_with_parts(row, step, workers) if row.depth == 0 else row for row in rows]


def _times(worker: CaptureResult, step: Step) -> tuple[Spans, Spans, Spans]:
    """Return the time in which a worker runs, its communication, and its waits."""
    lanes = [lane for lane in step.lanes if lane.source.worker == worker.name]
    stages = [span for span in worker.stages if not _is_wait(span.name)]
    waits = time_of(span for span in worker.stages if _is_wait(span.name))
    runs = union(time_of(stages), time_of(worker.requests), *(lane.busy for lane in lanes))
    if worker.identity.role == ROLLOUT_ROLE:
        runs = union(runs, *(lane.iterations[:, :2] for lane in lanes))
    if not lanes:
        return runs, runs[:0], waits
    sent = common([subtract(lane.communication, lane.compute) for lane in lanes])
    waits = union(waits, common([lane.waiting for lane in lanes]))
    return runs, subtract(sent, waits), waits


def _is_wait(name: str) -> bool:
    return name.startswith(WAIT) or name == POLLING


def _with_parts(row: StageRow, step: Step, workers: list[tuple[Spans, Spans, Spans]]) -> StageRow:
    time = step.during(row.name)
    inside = [[intersection(time, part) for part in times] for times in workers]
    longest = max((length(runs) for runs, _, _ in inside), default=0)
    inside = [times for times in inside if length(times[0]) > _TAKES_PART * longest]
    if not inside or not longest:
        return row
    any_us = length(union(*(runs for runs, _, _ in inside))) / 1000
    sent_us = fmean(length(sent) for _, sent, _ in inside) / 1000
    own_us = fmean(length(subtract(runs, waits)) for runs, _, waits in inside) / 1000
    return msgspec.structs.replace(
        row,
        lanes=len(inside),
        alone_us=max(row.duration_us - any_us, 0.0),
        work_us=own_us - sent_us,
        communication_us=sent_us,
        tail_us=min(any_us, row.duration_us) - own_us,
    )
