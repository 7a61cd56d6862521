"""The work given to workers: by stage, and of engines by their requests."""

from __future__ import annotations

from functools import reduce
from operator import add

import msgspec

from verl_profiling.manifest import CaptureResult, StageSpan, Work
from verl_profiling.numbers.columns import WorkRow
from verl_profiling.numbers.lost import ROLLOUT
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.lanes import Step


def work_rows(step: Step) -> list[WorkRow]:
    """Return a row for each worker and each of its stages whose work is known."""
    if step.manifest is None:
        return []
    rows = []
    if not any(map(step.manifest.runs_the_loop, step.workers)):
        rows += _of_stages("controller", step.stages)
    for worker in step.workers:
        rows += _of_stages(worker.name, worker.stages)
        if worker.requests:
            rows.append(_of_requests(worker))
    return rows


def _of_stages(worker: str, stages: list[StageSpan]) -> list[WorkRow]:
    given = [span for span in stages if span.work is not None]
    rows = []
    for stage, spans in grouped(given, lambda span: span.name).items():
        took_ns = sum(span.end_ns - span.begin_ns for span in spans)
        work = reduce(add, [span.work for span in spans if span.work is not None])
        rows.append(_row(worker, stage, len(spans), took_ns, work))
    return rows


def _of_requests(worker: CaptureResult) -> WorkRow:
    lengths = [request.prompt_tokens + request.response_tokens for request in worker.requests]
    begin_ns = min(request.begin_ns for request in worker.requests)
    end_ns = max(request.end_ns for request in worker.requests)
    squares = sum(length * length for length in lengths)
    work = Work(samples=len(lengths), tokens=sum(lengths), tokens_squared=squares)
    return _row(worker.name, ROLLOUT, len(lengths), end_ns - begin_ns, work)


def _row(worker: str, stage: str, runs: int, took_ns: int, work: Work) -> WorkRow:
    facts = msgspec.structs.asdict(work)
    return WorkRow(worker=worker, stage=stage, runs=runs, duration_us=took_ns / 1000, **facts)
