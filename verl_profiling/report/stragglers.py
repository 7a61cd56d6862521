"""Stragglers: by how much the slowest worker of a role holds up the others in a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from statistics import median

from verl_profiling.manifest import CaptureResult, StageSpan
from verl_profiling.report.collectives import Calls, perhaps_waiting
from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, spans_of, subtract
from verl_profiling.report.lanes import Step
from verl_profiling.report.lost import until_last
from verl_profiling.report.rows import StragglerRow

__all__ = ["stragglers"]


def stragglers(step: Step, calls: Sequence[Calls], waiting: Mapping[str, Spans]) -> list[StragglerRow]:
    """Return, for each stage that several workers of a role ran, how far apart their work is.

    Workers that communicate end a stage together, so how long it lasted says nothing. What a worker
    worked is the time in the stage less the time in which it waited in collectives. A stage that one of
    them was still in when the capture ended is not compared. Nor is one in which another may have worked as
    long, because a worker communicated and it is not known whether it waited.

    Args:
        step: The step.
        calls: Its collectives.
        waiting: When each lane waited in them, by its name.
    """
    perhaps = perhaps_waiting(step, calls, waiting)
    rows: list[StragglerRow] = []
    for role in dict.fromkeys(worker.identity.role for worker in step.workers):
        stages: dict[str, dict[str, list[StageSpan]]] = {}  # by stage, then worker
        waits: dict[str, tuple[Spans, Spans]] = {}
        for worker in (worker for worker in step.workers if worker.identity.role == role):
            waits[worker.name] = (_of(worker, step, waiting), _of(worker, step, perhaps))
            for span in worker.stages:
                stages.setdefault(span.name, {}).setdefault(worker.name, []).append(span)
        for stage, runs in stages.items():
            if len(runs) > 1 and not any(map(step.cut_off, chain.from_iterable(runs.values()))):
                rows += _rows(stage, role, runs, waits)
    return sorted(rows, key=lambda row: -row.behind_us)


def _of(worker: CaptureResult, step: Step, waiting: Mapping[str, Spans]) -> Spans:
    """Return when all lanes of a worker waited."""
    lanes = [waiting.get(lane.name, EMPTY) for lane in step.lanes if lane.source.worker == worker.name]
    return reduce(intersection, lanes) if lanes else EMPTY


def _rows(
    stage: str, role: str, runs: dict[str, list[StageSpan]], waits: dict[str, tuple[Spans, Spans]]
) -> Iterator[StragglerRow]:
    worked, surely, waited_ns = {}, {}, 0
    for name, own in runs.items():
        waiting, perhaps = waits[name]
        time = spans_of((span.begin_ns, span.end_ns) for span in own)
        worked[name] = length(subtract(time, waiting)) / 1000
        surely[name] = length(subtract(time, perhaps)) / 1000
        waited_ns += length(intersection(time, waiting)) + length(until_last(own, runs.values()))
    slowest = max(surely, key=lambda name: surely[name])
    worked[slowest] = surely[slowest]
    if surely[slowest] == max(worked.values()):
        yield StragglerRow(
            stage=stage,
            role=role,
            workers=len(worked),
            slowest=slowest,
            slowest_us=worked[slowest],
            median_us=median(worked.values()),
            wait_us=waited_ns / 1000,
            behind_us=sum(worked[slowest] - us for us in worked.values()),
        )
