"""The parts of a stage's time that more lanes do not shorten, and the part that they do."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import msgspec

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import POLLING, WAIT, CaptureResult
from verl_profiling.numbers.columns import StageRow
from verl_profiling.slices.intervals import (
    EMPTY,
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


def with_parts(rows: Iterable[StageRow], step: Step) -> list[StageRow]:
    """Return the rows of stages, the outermost ones with their parts.

    A stage is the time of the loop alone, and the time in which any worker runs. The latter is the
    mean work of the workers, their mean communication, and the wait for the last one.
    """
    workers = [_times(worker, step) for worker in step.workers if worker.tools != _WITHOUT_LANE]
    return [_with_parts(row, step, workers) if row.depth == 0 else row for row in rows]


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
