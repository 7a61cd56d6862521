"""Stragglers: by how much the slowest worker of a role holds up the others in a stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import chain
from statistics import median

from verl_profiling.manifest import CaptureResult, StageSpan
from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, spans_of, subtract
from verl_profiling.report.lanes import Step
from verl_profiling.report.lost import until_last
from verl_profiling.report.rows import StragglerRow

__all__ = ["stragglers"]


def stragglers(step: Step, waiting: Mapping[str, Spans]) -> list[StragglerRow]:
    """Return, for each stage that several workers of a role ran, how far apart their work is.

    Workers that communicate end a stage together, so how long it lasted says nothing. What a worker
    worked is the time in the stage less the time in which it waited in collectives. A stage that one of
    them was still in when the capture ended is not compared.

    Args:
        step: The step.
        waiting: When each lane waited, by its name.
    """
    rows = []
    for role in dict.fromkeys(worker.identity.role for worker in step.workers):
        stages: dict[str, dict[str, list[StageSpan]]] = {}  # by stage, then worker
        waits: dict[str, Spans] = {}
        for worker in (worker for worker in step.workers if worker.identity.role == role):
            waits[worker.name] = _waiting_of(worker, step, waiting)
            for span in step.stages_of(worker):
                stages.setdefault(span.name, {}).setdefault(worker.name, []).append(span)
        for stage, runs in stages.items():
            if len(runs) > 1 and not any(map(step.cut_off, chain.from_iterable(runs.values()))):
                rows.append(_row(stage, role, runs, waits))
    return sorted(rows, key=lambda row: -row.behind_us)


def _waiting_of(worker: CaptureResult, step: Step, waiting: Mapping[str, Spans]) -> Spans:
    """Return when all lanes of a worker waited."""
    lanes = [waiting.get(lane.name, EMPTY) for lane in step.lanes if lane.source.worker == worker.name]
    return reduce(intersection, lanes) if lanes else EMPTY


def _row(stage: str, role: str, runs: dict[str, list[StageSpan]], waits: dict[str, Spans]) -> StragglerRow:
    worked, waited_ns = {}, 0
    for name, own in runs.items():
        time = spans_of((span.begin_ns, span.end_ns) for span in own)
        worked[name] = length(subtract(time, waits[name])) / 1000
        waited_ns += length(intersection(time, waits[name])) + length(until_last(own, runs.values()))
    slowest = max(worked, key=lambda name: worked[name])
    return StragglerRow(
        stage=stage,
        role=role,
        workers=len(worked),
        slowest=slowest,
        slowest_us=worked[slowest],
        median_us=median(worked.values()),
        wait_us=waited_ns / 1000,
        behind_us=sum(worked[slowest] - us for us in worked.values()),
    )
