"""The work given to workers (sequences and tokens): by stage, and of engines by their requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add
from typing import NamedTuple

import msgspec
import numpy as np

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import CaptureResult, StageSpan, Work
from verl_profiling.numbers.collectives import in_calls
from verl_profiling.numbers.columns import StragglerRow, WorkRow
from verl_profiling.numbers.idle_causes import ROLLOUT
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


def work_rows(step: Step) -> list[WorkRow]:
    """Return a row for each worker and each of its stages whose work is known."""
    if step.manifest is None:
        return []
    rows = []
    if not any(map(step.manifest.runs_the_loop, step.workers)):
        rows += _of_stages("controller", step.stages)
    trained = [request for request in step.requests if not request.validate]
    by_engine = grouped(trained, lambda request: request.worker)
    for worker in step.workers:
        rows += _of_stages(worker.name, worker.stages)
        if worker.name in by_engine:
            rows.append(_of_requests(worker.name, by_engine[worker.name]))
    return rows


def _of_stages(worker: str, stages: list[StageSpan]) -> list[WorkRow]:
    given = [span for span in stages if span.work is not None]
    rows = []
    for stage, spans in grouped(given, lambda span: span.name).items():
        took_ns = sum(span.end_ns - span.begin_ns for span in spans)
        work = reduce(add, [span.work for span in spans if span.work is not None])
        rows.append(_row(worker, stage, len(spans), took_ns / 1000, work))
    return rows


def _of_requests(worker: str, requests: list[RequestRow]) -> WorkRow:
    lengths = [request.prompt_tokens + request.response_tokens for request in requests]
    begin_us = min(request.begin_us for request in requests)
    end_us = max(request.end_us for request in requests)
    squares = sum(length * length for length in lengths)
    work = Work(samples=len(lengths), tokens=sum(lengths), tokens_squared=squares)
    return _row(worker, ROLLOUT, len(lengths), end_us - begin_us, work)


def _row(worker: str, stage: str, runs: int, took_us: float, work: Work) -> WorkRow:
    facts = msgspec.structs.asdict(work)
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
    row = msgspec.structs.replace(row, lead_us=lead_us, fitted=NO_WORK)
    finest, runs = _runs_inside(row.stage, row.role, step, called)
    if not runs:  # of a foreign trace, no stages are known
        return row
    found = explained(runs.pop(row.slowest), list(runs.values()))
    if not isinstance(found, Explained):
        return msgspec.structs.replace(row, fitted=found)
    found = found.within(lead_us / 1e6)
    error_us = 1e6 * found.error_s
    if not found.tells(lead_us / 1e6):
        return msgspec.structs.replace(row, fitted=found.unsure, error_us=error_us)
    return msgspec.structs.replace(
        row,
        data_us=1e6 * found.data_s,
        error_us=error_us,
        tokens=found.tokens,
        fitted=f"{found.runs} runs of {finest}",
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
        finest, runs = _runs_inside(stage, role, step, called)
        times = expected(list(runs.values())) if runs else None
        if times is None:
            continue
        loads: dict[str, Load] = {}
        for worker in step.workers:
            if worker.name in runs:
                inside = [one for one in _with_work(worker, stage) if one.name == finest]
                begins, ends = np.array([(one.begin_ns, one.end_ns) for one in inside]).T
                loads[worker.name] = Load(begins, ends, times[len(loads)])
        return loads
    return {}


def _runs_inside(
    stage: str, role: str, step: Step, called: Mapping[Lane, Spans]
) -> tuple[str, dict[str, Runs]]:
    """Return the shortest runs with known work inside a stage, by worker, and their name.

    The result is empty without two workers that have them.
    """
    alike = [worker for worker in step.workers if worker.identity.role == role]
    workers = [worker for worker in alike if len(time_of(worker.stages, stage))]
    inside = {worker.name: _with_work(worker, stage) for worker in workers}
    finest = _finest(list(inside.values())) if len(workers) > 1 else None
    if finest is None:
        return "", {}
    return finest, {
        name: _runs(name, [span for span in spans if span.name == finest], called)
        for name, spans in inside.items()
    }


def _finest(spans_of: list[list[StageSpan]]) -> str | None:
    """Return the stage that all workers ran, with the most runs in the first one; else ``None``.

    Of several with as many runs, the inner one counts.
    """
    counts = [Counter(span.name for span in spans) for spans in spans_of]
    shared = set.intersection(*[set(names) for names in counts])
    inner_first = reversed(counts[0])  # in order of time, outer stages begin first
    return max(filter(shared.__contains__, inner_first), key=counts[0].__getitem__, default=None)


def _with_work(worker: CaptureResult, stage: str) -> list[StageSpan]:
    """Return the worker's spans with known tokens inside a stage, and runs of the stage itself."""
    known = [span for span in worker.stages if span.work is not None and span.work.tokens]
    begins = np.array([span.begin_ns for span in known], np.int64)
    in_stage = holding(time_of(worker.stages, stage), begins)
    return [span for span, is_in in zip(known, in_stage.tolist(), strict=True) if is_in]


def _runs(worker: str, spans: list[StageSpan], called: Mapping[Lane, Spans]) -> Runs:
    """Return a worker's spans as columns for the fit; their times exclude collectives.

    On a device, computation beside a collective counts.
    """
    apart = [
        subtract(spans_in, lane.compute) if lane.on_device else spans_in
        for lane, spans_in in called.items()
        if lane.source.worker == worker
    ]
    in_collectives = common(apart)
    seconds, tokens, squares = [], [], []
    for span in spans:
        seconds.append(length(subtract(time_of([span]), in_collectives)) / 1e9)
        work = span.work or Work()
        tokens.append(float(work.tokens or 0))
        squares.append(float(work.tokens_squared or 0))
    return Runs(np.array(seconds), np.array(tokens), np.array(squares))
