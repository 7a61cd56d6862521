"""The numbers of the report: the formula of each, and where it is computed.

The anatomy, the causes of idle time, collectives, stragglers and self times have modules of their own, all
other numbers are computed in this one.

Let ``S`` be the time in which a lane was observed: the step for an e2e capture, the recorded
windows for a discrete one, and the time from the first to the last busy event if there is no
manifest. Inside ``S``, let ``C``, ``M`` and ``K`` be the time of computation, communication and
copies, ``B`` their union and ``I = S - B``; ``|X|`` is the length of a set. Times are in
nanoseconds here and in microseconds in the report.

====================== ============================= ==================================
number                 formula                       source
====================== ============================= ==================================
busy, idle             ``|B|``, ``|I|``              HTA 0.5 temporal breakdown
compute                ``|C|``                       HTA 0.5 temporal breakdown
communication, overlap ``|M|``, ``|C & M|``          HTA 0.5 comm/comp overlap
exposed communication  ``|M - C|``                   communication less overlap
tail ratio             last over median finish       ``rollout_tail``
collective wait        length of all waits at once   ``collectives``
self time              duration less nested calls    ``optimes.self_times``
idle by cause          a partition of ``I``          ``lost.lost_by_cause``
host-bound             ``|I & own stages|``          ``lost.lost_by_cause``
straggler              ``|stage - collective wait|`` ``stragglers``
====================== ============================= ==================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.report.intervals import Spans, holding, intersection, length, subtract, union
from verl_profiling.report.lanes import VALIDATE, Lane, Step
from verl_profiling.report.lost import ROLLOUT, working_span
from verl_profiling.report.model import OTHER_RANKS, Percentiles, Tail, Throughput
from verl_profiling.report.over_time import percent
from verl_profiling.report.rows import EngineRow, KernelRow, WorkerRow

__all__ = [
    "engine_row",
    "kernels",
    "rollout_tail",
    "throughput",
    "worker_row",
]

_TOKEN_METRICS = ("perf/total_num_tokens", "total_num_tokens", "tokens")
_MOST_OPS = 10_000
_OTHERS = "(all others)"


def worker_row(
    lane: Lane, step: Step, lost: Mapping[str, Spans], waiting: Spans, directory: Path
) -> WorkerRow:
    """Return how one lane spent its time, in microseconds.

    Args:
        lane: The lane.
        step: Its step.
        lost: Its idle time by cause.
        waiting: When the lane waited in collectives.
        directory: What the names of its traces are relative to.
    """
    compute = intersection(lane.activity.compute, lane.observed)
    communication = intersection(lane.activity.communication, lane.observed)
    exposed = subtract(lane.activity.communication, lane.activity.compute)
    memory = intersection(lane.activity.memory, lane.observed)
    unrecognised = intersection(lane.activity.unrecognised, lane.observed)
    busy_ns = length(union(compute, communication, memory, unrecognised))
    overlap_ns = length(intersection(compute, communication))
    waiting = intersection(waiting, lane.observed)
    lost_us = {cause: length(spans) / 1000 for cause, spans in lost.items()}
    return WorkerRow(
        name=lane.name,
        role=lane.source.role,
        rank=lane.source.rank,
        replica=lane.source.replica,
        device=lane.activity.on_device,
        accelerator=lane.activity.device,
        traces=[os.path.relpath(path, directory) for path in lane.activity.paths],
        span_us=length(lane.observed) / 1000,
        busy_us=busy_ns / 1000,
        idle_us=(length(lane.observed) - busy_ns) / 1000,
        compute_us=length(compute) / 1000,
        communication_us=length(communication) / 1000,
        exposed_communication_us=(length(communication) - overlap_ns) / 1000,
        overlap_us=overlap_ns / 1000,
        memcpy_us=length(memory) / 1000,
        unrecognised_us=length(unrecognised) / 1000,
        host_bound_us=lost_us["host_bound"],
        lost_us={**lost_us, OTHER_RANKS: length(waiting) / 1000},
        load=percent(lane.activity.busy, step.begin_ns, step.end_ns),
        waiting_us=length(waiting) / 1000,
        communication_load=percent(exposed, step.begin_ns, step.end_ns),
        waiting_load=percent(intersection(waiting, exposed), step.begin_ns, step.end_ns),
        graphs=lane.activity.graphs,
    )


def engine_row(lane: Lane, step: Step) -> EngineRow:
    """Return how one rank of an engine spent its time in the rollout, or wherever it does not validate.

    An iteration with prompt tokens is prefill.
    """
    every = lane.activity.iterations
    validating = holding(step.during(VALIDATE), [one.begin_ns for one in every])
    iterations = [one for one, validates in zip(every, validating, strict=True) if not validates]
    prefill = [i for i in iterations if i.prefill_tokens]
    rollout, work = step.during(ROLLOUT), working_span(lane, step)
    known = len(rollout) > 0 and len(work) > 0
    return EngineRow(
        name=lane.name,
        replica=lane.source.replica or 0,
        busy_us=length(intersection(lane.activity.busy, lane.observed)) / 1000,
        queueing_us=int(work[0, 0] - rollout[0, 0]) / 1000 if known else None,
        iterations=len(iterations),
        prefill_us=sum(i.end_ns - i.begin_ns for i in prefill) / 1000,
        decode_us=sum(i.end_ns - i.begin_ns for i in iterations if not i.prefill_tokens) / 1000,
        prefill_tokens=sum(i.prefill_tokens for i in iterations),
        decode_tokens=sum(i.decode_tokens for i in iterations),
        finish_us=int(work[0, 1] - rollout[0, 0]) / 1000 if known else None,
    )


def rollout_tail(step: Step) -> Tail | None:
    """Return how the rollout ended, or ``None`` without a rollout stage and an engine.

    A replica finishes with its last request or, if requests are not known, with the last iteration
    of its slowest rank.
    """
    rollout = step.during(ROLLOUT)
    requests = [request for request in _rolled_out(step) if not request.failed]
    if not len(rollout):
        return None
    begin = int(rollout[0, 0])
    finishes: dict[int, int] = {}
    for request in requests:
        finishes[request.replica] = max(finishes.get(request.replica, 0), request.end_ns)
    if not finishes:
        for lane in (lane for lane in step.lanes if lane.is_engine):
            if len(work := working_span(lane, step)):
                replica = lane.source.replica or 0
                finishes[replica] = max(finishes.get(replica, 0), int(work[0, 1]))
    if not finishes:
        return None
    ends = sorted((end - begin) / 1000 for end in finishes.values())
    single = sorted((request.end_ns - begin) / 1000 for request in requests)
    middle = median(ends)
    return Tail(
        replicas=len(ends),
        median_finish_us=middle,
        last_finish_us=ends[-1],
        last_replica=max(finishes, key=lambda replica: finishes[replica]),
        ratio=ends[-1] / middle if middle > 0 else 1.0,
        tail_share=max(ends[-1] - middle, 0.0) * 1000 / max(step.span_ns, 1),
        requests=len(requests),
        latency_s=_percentiles([(r.end_ns - r.begin_ns) / 1e9 for r in requests]),
        response_tokens=_percentiles([float(r.response_tokens) for r in requests]),
        finishes_us=single or ends,
    )


def _rolled_out(step: Step) -> Iterator[Request]:
    """Yield the requests that were not sent to validate."""
    validating = step.during(VALIDATE)
    for worker in step.workers:
        validates = holding(validating, [request.begin_ns for request in worker.requests])
        for request, is_validation in zip(worker.requests, validates, strict=True):
            if not is_validation:
                yield request


def _percentiles(sample: list[float]) -> Percentiles | None:
    if not sample:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(sample, (50, 90, 99)))
    return Percentiles(p50=p50, p90=p90, p99=p99, max=max(sample))


def kernels(step: Step) -> list[KernelRow]:
    """Return the kernels by self time over all lanes, by the stage in which they began, longest first.

    Those beyond 10,000 are one row, ``(all others)``.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for lane in step.lanes:
        for place, (calls, self_ns) in lane.activity.ops.items():
            before = totals.get(place, (0, 0))
            totals[place] = (before[0] + calls, before[1] + self_ns)
    everything = sum(self_ns for _, self_ns in totals.values()) or 1
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    if rest := [total for _, total in ranked[_MOST_OPS:]]:
        calls, self_ns = (sum(numbers) for numbers in zip(*rest, strict=True))
        ranked = [*ranked[:_MOST_OPS], (("", _OTHERS), (calls, self_ns))]
    return [
        KernelRow(name=name, stage=stage, calls=calls, self_us=self_ns / 1000, share=self_ns / everything)
        for (stage, name), (calls, self_ns) in ranked
    ]


def throughput(step: Step, engines: list[EngineRow], devices: int) -> Throughput | None:
    """Return tokens per time, from the loop's metrics, else the requests, else the engines' iterations.

    Args:
        step: The step.
        engines: The rows of its engines.
        devices: Number of its devices.
    """
    metrics = step.manifest.metrics if step.manifest else {}
    requests = list(_rolled_out(step))
    first_ranks = {row.replica: row for row in reversed(engines)}.values()
    counted = (
        *((metrics[name], f"metric {name}") for name in _TOKEN_METRICS if name in metrics),
        (float(sum(r.prompt_tokens + r.response_tokens for r in requests)), "requests"),
        (float(sum(row.prefill_tokens + row.decode_tokens for row in first_ranks)), "engine iterations"),
    )
    tokens, source = next(((count, source) for count, source in counted if count), (0.0, ""))
    seconds = step.span_ns / 1e9
    if not tokens or not seconds:
        return None
    rate = tokens / seconds
    return Throughput(
        tokens=tokens,
        source=source,
        tokens_per_s=rate,
        tokens_per_s_per_lane=rate / max(len(step.lanes), 1),
        tokens_per_s_per_device=rate / max(devices, 1),
    )
