"""The work given to workers (sequences and tokens): by stage, and of engines by their requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import compress
from operator import add, attrgetter
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict, replace

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import CaptureResult, StageSpan, Work
from verl_profiling.numbers.collectives import in_calls
from verl_profiling.numbers.report_columns import StragglerRow, WorkRow
from verl_profiling.slices.intervals import (
    Ints,
    Spans,
    common,
    grouped,
    holding,
    length,
    subtract,
    time_of,
)
from verl_profiling.slices.lead_fit import Explained, Runs, expected, explained
from verl_profiling.slices.slices import Floats
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.requests import RequestRow

NO_WORK = "the work given to the stage is unknown"
"""Reason why no data explain a slow worker: nobody passed its number of tokens."""


def work_rows(step: Step) -> Iterator[WorkRow]:
    """Yield a row for each worker and each of its stages whose work is known."""
    if step.manifest is None:
        return
    if not any(map(step.manifest.runs_the_loop, step.workers)):
        yield from _of_stages("controller", step.stages)
    trained = [request for request in step.requests if not request.validate]
    by_engine = grouped(trained, attrgetter("worker"))
    for worker in step.workers:
        yield from _of_stages(worker.name, worker.stages)
        if worker.name in by_engine:
            yield _of_requests(worker.name, by_engine[worker.name])


def _of_stages(worker: str, stages: list[StageSpan]) -> Iterator[WorkRow]:
    given = [span for span in stages if span.work is not None]
    for stage, spans in grouped(given, attrgetter("name")).items():
        took_ns = sum(span.end_ns - span.begin_ns for span in spans)
        work = reduce(add, map(attrgetter("work"), spans))
        yield _row(worker, stage, len(spans), took_ns / 1000, work)


def _of_requests(worker: str, requests: list[RequestRow]) -> WorkRow:
    lengths = [request.prompt_tokens + request.response_tokens for request in requests]
    begin_us = min(map(attrgetter("begin_us"), requests))
    end_us = max(map(attrgetter("end_us"), requests))
    squares = sum(length * length for length in lengths)
    work = Work(samples=len(lengths), tokens=sum(lengths), tokens_squared=squares)
    return _row(worker, ROLLOUT, len(lengths), end_us - begin_us, work)


def _row(worker: str, stage: str, runs: int, took_us: float, work: Work) -> WorkRow:
    facts = asdict(work)
    del facts["lessons"]  # which have tables of their own
    return WorkRow(worker=worker, stage=stage, runs=runs, duration_us=took_us, **facts)


def with_reason(row: StragglerRow, step: Step, called: Mapping[Lane, Spans]) -> StragglerRow:
    """Return the row of a slow worker with the part of its extra time that its data explain.

    The shortest runs with known work inside the stage, such as micro-batches, show how long work
    takes.

    Args:
        row: The row.
        step: The step.
        called: Time in collectives, which no additional work of a rank makes longer.
    """
    if row.role == ROLLOUT_ROLE:  # an engine's requests run side by side
        return row
    lead_us = row.behind_us / (row.workers - 1)
    row = replace(row, lead_us=lead_us, fitted=NO_WORK)
    spans = _finest_inside(row.stage, row.role, step)
    if not spans:  # of a foreign trace, no stages are known
        return row
    runs = _runs_of(spans, called)
    fit = explained(runs.pop(row.slowest), list(runs.values()))
    if not isinstance(fit, Explained):
        return replace(row, fitted=fit)
    fit = fit.within(lead_us / 1e6)
    error_us = 1e6 * fit.error_s
    if not fit.tells(lead_us / 1e6):
        return replace(row, fitted=fit.unsure, error_us=error_us)
    return replace(
        row,
        data_us=1e6 * fit.data_s,
        error_us=error_us,
        tokens=fit.tokens,
        fitted=f"{fit.runs} runs of {spans[row.slowest][0].name}",
    )


class Load(NamedTuple):
    """Runs with known work of one worker.

    Attributes:
        begin_ns: Begin of each run.
        end_ns: End of each run.
        expected: How long each run takes by its work, as a multiple of a usual run.
    """

    begin_ns: Ints
    end_ns: Ints
    expected: Floats


def loads_of(stage: str, step: Step, calls: Iterable[Calls]) -> dict[str, Load]:
    """Return the shortest runs with known work inside a stage, by worker; empty if there are too
    few.
    """
    called = in_calls(calls)
    for role in dict.fromkeys(worker.identity.role for worker in step.workers):
        spans = _finest_inside(stage, role, step)
        if not spans:
            continue
        times = expected(list(_runs_of(spans, called).values()))
        if times is None:
            continue
        loads: dict[str, Load] = {}
        for (name, runs), of_work in zip(spans.items(), times, strict=True):
            begins, ends = np.array([(span.begin_ns, span.end_ns) for span in runs]).T
            loads[name] = Load(begins, ends, of_work)
        return loads
    return {}


def _finest_inside(stage: str, role: str, step: Step) -> dict[str, list[StageSpan]]:
    """Return the shortest runs with known work inside a stage, by worker.

    The result is empty without two workers that have them.
    """
    inside = {}
    for worker in step.workers:
        if worker.identity.role == role and len(time_of(worker.stages, stage)):
            inside[worker.name] = _with_work(worker, stage)
    if len(inside) < 2:
        return {}
    finest = _finest(list(inside.values()))
    if finest is None:
        return {}
    return {name: [span for span in spans if span.name == finest] for name, spans in inside.items()}


def _finest(spans_of: list[list[StageSpan]]) -> str | None:
    """Return the stage that all workers ran, with the most runs in the first one; else ``None``.

    Of several with as many runs, the inner one counts.
    """
    counts = [Counter(map(attrgetter("name"), spans)) for spans in spans_of]
    shared = set.intersection(*map(set, counts))
    inner_first = reversed(counts[0])  # in order of time, outer stages begin first
    return max(filter(shared.__contains__, inner_first), key=counts[0].__getitem__, default=None)


def _with_work(worker: CaptureResult, stage: str) -> list[StageSpan]:
    """Return the worker's spans with known tokens inside a stage, and runs of the stage itself."""
    given = [span for span in worker.stages if span.work is not None and span.work.tokens]
    begins = np.array([span.begin_ns for span in given], np.int64)
    return list(compress(given, holding(time_of(worker.stages, stage), begins)))


def _runs_of(spans: Mapping[str, list[StageSpan]], called: Mapping[Lane, Spans]) -> dict[str, Runs]:
    """Return the spans of each worker as columns for the fit; their times exclude collectives.

    On a device, computation beside a collective counts.
    """
    apart = defaultdict[str, list[Spans]](list)
    for lane, time in called.items():
        if lane.on_device:
            time = subtract(time, lane.compute)
        apart[lane.source.worker].append(time)
    runs = {}
    for worker, of_worker in spans.items():
        in_collectives = common(apart[worker])
        rows = []
        for span in of_worker:
            work = span.work or Work()
            seconds = length(subtract(time_of([span]), in_collectives)) / 1e9
            rows.append((seconds, work.tokens or 0, work.tokens_squared or 0))
        runs[worker] = Runs(*np.array(rows, float).T)
    return runs
