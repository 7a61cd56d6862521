"""The numbers of lanes, devices, engines and kernels in the report, with a table of formulas.

Stages, causes of idle time, collectives, stragglers and self times have modules of their own; this
module computes all other numbers.

Let ``S`` be the observed windows of a lane in the step (:mod:`~verl_profiling.slices.observed`).
Inside ``S``, let ``C``, ``M`` and ``K`` be the time of computation, communication and
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
self time              duration less nested calls    ``nested_times``
idle by cause          a partition of ``I``          ``lost.lost_by_cause``
host-bound             ``|I & own stages|``          ``lost.lost_by_cause``
straggler              ``|stage - collective wait|`` ``stragglers``
====================== ============================= ==================================

In colocated training, a training rank and a rank of a rollout engine use one GPU in turn. Both are
lanes; the numbers of the device cover all its lanes. Idle time of the device gets the cause of its
lanes. If the causes differ, the cause of the active lane wins over the cause of the lane that waits
for its turn.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from verl_profiling.files.engine_iterations import UNKNOWN_TOKENS, Iteration
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.numbers.idle_causes import CAUSES, partition, working_spans
from verl_profiling.numbers.report_columns import (
    OTHER_RANKS,
    DeviceRow,
    EngineRow,
    KernelRow,
    Percentiles,
    Tail,
    Throughput,
    WorkerRow,
)
from verl_profiling.numbers.rollout_tail import late_response
from verl_profiling.numbers.stage_rows import percent
from verl_profiling.slices.intervals import (
    EMPTY,
    Spans,
    grouped,
    holding,
    intersection,
    length,
    percentiles,
    subtract,
    union,
    within,
)
from verl_profiling.slices.observed import misses
from verl_profiling.steps.lanes import Lane, Step

_TOKEN_METRICS = ("perf/total_num_tokens", "total_num_tokens", "tokens")
_TURNS = (
    "weight_sync",
    "straggler_wait",
    "gc",
    "host_blocked",
    "host_bound",
    "no_requests",
    "queued",
    "long_tail",
    "after_generation",
    "waiting_for_rollout",
    "other_stages",
    "between_stages",
    "unexplained",
)
"""Causes of idle time: a device has the first one that any of its lanes has."""


_COVERS = {
    "busy_us": "busy",
    "compute_us": "compute",
    "communication_us": "communication",
    "memcpy_us": "memory",
    "unrecognised_us": "unrecognised",
    "waiting_us": "waiting",
}
"""Fields of ``UseRow`` by the field of a lane with the time."""


def _observed(lanes: Sequence[Lane]) -> Spans:
    """Return the time in which a lane of a device is observed and no other may work unrecorded."""
    observed = unseen = EMPTY
    for lane in lanes:
        if lane.is_unknown:
            return EMPTY
        observed = union(observed, lane.observed)
        unseen = union(unseen, lane.unseen)
    return subtract(observed, unseen)


def _used(lanes: Sequence[Lane], lost: Mapping[str, Spans]) -> dict[str, Any]:
    """Return the fields of ``UseRow`` for one lane, or for all lanes that share a device.

    Args:
        lanes: The lanes.
        lost: Idle time of the lanes by cause.
    """
    observed = _observed(lanes)
    covers = dict.fromkeys(_COVERS, EMPTY)
    working = EMPTY
    for lane in lanes:
        window = intersection(lane.observed, observed)
        for name, field in _COVERS.items():
            covers[name] = union(covers[name], intersection(getattr(lane, field), window))
        working = union(working, subtract(intersection(lane.busy, window), lane.waiting))
    compute, communication = covers["compute_us"], covers["communication_us"]
    times = {
        "span_us": observed,
        **covers,
        "idle_us": subtract(observed, covers["busy_us"]),
        "exposed_communication_us": subtract(communication, compute),
        "overlap_us": intersection(communication, compute),
        "waiting_us": subtract(covers["waiting_us"], working),
        "host_bound_us": lost["host_bound"],
    }
    times_us = {name: length(spans) / 1000 for name, spans in times.items()}
    lost_us = {cause: length(spans) / 1000 for cause, spans in lost.items()}
    return {
        **times_us,
        "name": " + ".join(lane.name for lane in lanes),
        "device": any(lane.on_device for lane in lanes),
        "lost_us": {**lost_us, OTHER_RANKS: times_us["waiting_us"]},
    }


def worker_row(lane: Lane, step: Step, directory: Path) -> WorkerRow:
    """Return the row of one lane.

    Args:
        lane: The lane.
        step: The step of the lane.
        directory: Folder that the paths of traces are relative to.
    """
    exposed = subtract(lane.communication, lane.compute)
    waits = intersection(lane.waiting, intersection(exposed, lane.observed))

    return WorkerRow(
        **_used([lane], lane.idle),
        role=lane.source.role,
        rank=lane.source.rank,
        replica=lane.source.replica,
        load=percent(lane.busy, step),
        communication_load=percent(exposed, step),
        waiting_load=percent(waits, step),
        accelerator=lane.accelerator,
        traces=[os.path.relpath(path, directory) for path in lane.paths],
    )


def device_row(lanes: Sequence[Lane], lost: Mapping[str, Spans]) -> DeviceRow:
    """Return the row of a device, from its lanes and its idle time by cause."""
    kind = uuid = place = ""
    for lane in lanes:
        if lane.device is not None:
            kind = kind or lane.device.kind
            uuid = uuid or lane.device.uuid
            place = place or lane.device.place
    return DeviceRow(
        **_used(lanes, lost),
        lanes=[lane.name for lane in lanes],
        roles=list(dict.fromkeys(map(attrgetter("source.role"), lanes))),
        kind=kind,
        uuid=uuid,
        place=place or uuid,
    )


def engine_row(lane: Lane, step: Step) -> EngineRow:
    """Return the row of one engine rank, for the stage ``rollout``.

    Without that stage, all work but that of validation counts. Iterations with prompt tokens count
    as prefill. The begin or the end of the engine's work is unknown if its recording misses it.
    """
    iterations = lane.iterations[~holding(step.validations, lane.iterations[:, 0])]
    # vLLM runs an iteration without tokens after its last request
    iterations = iterations[iterations[:, 2:5].any(axis=1)]
    took = iterations[:, 1] - iterations[:, 0]
    prefill = iterations[:, 2] != 0
    counts = iterations[:, 2:5]
    is_unknown = (counts == UNKNOWN_TOKENS).any(axis=0)
    scheduled = Iteration(*np.where(is_unknown, UNKNOWN_TOKENS, counts.sum(axis=0)).tolist())
    rollout = step.rollout
    work = working_spans(lane, step, ROLLOUT)
    queueing_us = finish_us = None
    if len(rollout) and len(work):
        begin_ns, first_ns, last_ns = int(rollout[0, 0]), int(work[0, 0]), int(work[-1, 1])
        if not misses(lane.observed, within(rollout, begin_ns, first_ns), rollout):
            queueing_us = (first_ns - begin_ns) / 1000
        if not _misses_end(lane, step):
            finish_us = (last_ns - begin_ns) / 1000
    tokens = _tokens(lane, step, scheduled)
    prompt, new, again = (None if count == UNKNOWN_TOKENS else count for count in tokens)
    return EngineRow(
        name=lane.name,
        replica=lane.source.replica or 0,
        queueing_us=queueing_us,
        iterations=len(iterations),
        prefill_us=int(took[prefill].sum()) / 1000,
        decode_us=int(took[~prefill].sum()) / 1000,
        prefill_tokens=prompt,
        decode_tokens=new,
        again_tokens=again,
        finish_us=finish_us,
    )


def _tokens(lane: Lane, step: Step, scheduled: Iteration) -> Iteration:
    """Return the tokens that an engine computed, from its requests if the requests explain all
    iterations.

    Iterations alone do not tell what SGLang computes again, nor which draft tokens (speculative
    decoding) were accepted.

    Args:
        lane: Lane of a rank of the engine.
        step: The step.
        scheduled: Tokens of the iterations in the engine's trace; returned if its requests do not
            explain them.
    """
    worker = step.worker_of(lane.source)
    if worker is None or worker.pending_since_ns:
        return scheduled
    prompt = new = first = 0
    for row in step.requests:
        if row.replica != lane.source.replica or row.validate:
            continue
        if row.cached_tokens is None or row.begin_us < 0:
            return scheduled
        prompt += row.prompt_tokens - row.cached_tokens
        new += row.response_tokens
        first += row.response_tokens > 0  # a first token comes from its prompt's iteration
    if not prompt + new:
        return scheduled
    if UNKNOWN_TOKENS in scheduled:
        return Iteration(prompt, new, UNKNOWN_TOKENS)
    again = sum(scheduled) - (prompt + new - first)
    # A data-parallel rank, or a recording of a part of the rollout, has fewer than the requests.
    if again >= 0:
        return Iteration(prompt, new, again)
    return scheduled


def rollout_tail(step: Step) -> Tail | None:
    """Return the tail of the rollout; ``None`` without a rollout stage and an engine.

    A replica finishes with its last request or, without known requests, with the last iteration of
    its slowest rank. A replica with requests that are still open finishes with the rollout. The
    tail is unknown if the recording of an engine misses the end of the rollout.
    """
    rollout = step.rollout
    requests = [row for row in step.requests if not (row.failed or row.validate)]
    ends = [(row.replica, step.begin_ns + round(row.end_us * 1000)) for row in requests]
    ends = ends or _iteration_ends(step)
    if not len(rollout) or not ends:
        return None
    ends += [(replica, int(rollout[-1, 1])) for replica in step.pending]
    latencies_us = [row.latency_us for row in requests if row.latency_us is not None]
    finishes: dict[int, float] = {}
    for replica, end_ns in ends:
        end_us = (end_ns - int(rollout[0, 0])) / 1000
        finishes[replica] = max(end_us, finishes.get(replica, end_us))
    middle_us = median(finishes.values())
    last_us = max(finishes.values())
    return Tail(
        replicas=len(finishes),
        median_finish_us=middle_us,
        last_finish_us=last_us,
        last_replica=max(sorted(finishes), key=finishes.__getitem__),
        ratio=last_us / middle_us if middle_us > 0 else 1.0,
        tail_share=max(last_us - middle_us, 0.0) * 1000 / max(step.span_ns, 1),
        requests=len(requests),
        latency_s=_percentiles([latency_us / 1e6 for latency_us in latencies_us]),
        response_tokens=_percentiles([float(row.response_tokens) for row in requests]),
        late=late_response(step),
    )


def _iteration_ends(step: Step) -> list[tuple[int, int]]:
    """Return the replica of each engine rank and the end (ns) of its work in the rollout.

    Empty if the end of any of them is unknown.
    """
    ends: list[tuple[int, int]] = []
    for lane in step.lanes:
        if not lane.is_engine:
            continue
        if _misses_end(lane, step):
            return []
        for end_ns in working_spans(lane, step, ROLLOUT)[:, 1].tolist():
            ends.append((lane.source.replica or 0, end_ns))
    return ends


def _misses_end(lane: Lane, step: Step) -> bool:
    """Return whether an engine may have worked in the rollout after the end of its recording."""
    rollout = step.rollout
    work = working_spans(lane, step, ROLLOUT)
    last_ns = step.begin_ns
    if len(work):
        last_ns = int(work[-1, 1])
    return misses(lane.observed, within(rollout, last_ns, step.end_ns), rollout)


def _percentiles(sample: list[float]) -> Percentiles | None:
    p50, p90, p99 = percentiles(sample, 50, 90, 99)
    if sample:
        return Percentiles(p50=p50, p90=p90, p99=p99, max=max(sample))
    return None


def kernels(step: Step) -> list[KernelRow]:
    """Return one row per kernel and stage, summed over all lanes, the longest self time first."""
    calls: Counter[tuple[str, str]] = Counter()
    self_ns: Counter[tuple[str, str]] = Counter()
    for lane in step.lanes:
        for place, (times, took_ns) in lane.ops.items():
            calls[place] += times
            self_ns[place] += took_ns
    rows = []
    for (stage, name), ns in self_ns.items():
        row = KernelRow(
            name=name,
            stage=stage,
            calls=calls[stage, name],
            self_us=ns / 1000,
            share=ns / (self_ns.total() or 1),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.self_us, row.stage, row.name))


def throughput(step: Step, engines: list[EngineRow], devices: int) -> Throughput | None:
    """Return the throughput, from the loop's metrics, else from requests, else from engine
    iterations.

    Args:
        step: The step.
        engines: The rows of the step's engines.
        devices: Number of devices, for the tokens per device.
    """
    tokens, source = _counted_tokens(step, engines)
    seconds = step.span_ns / 1e9
    if not tokens or not seconds:
        return None
    rate = tokens / seconds
    return Throughput(
        tokens=tokens,
        source=source,
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / max(devices, 1),
    )


def _counted_tokens(step: Step, engines: Sequence[EngineRow]) -> tuple[float, str]:
    """Return the step's tokens (0 if unknown), and their source, e.g. ``engine iterations``."""
    metrics = step.manifest.metrics if step.manifest else {}
    for name in _TOKEN_METRICS:
        if metrics.get(name):
            return metrics[name], f"metric {name}"
    tokens = 0
    for row in step.requests:
        if not row.validate:
            tokens += row.prompt_tokens + row.response_tokens
    if tokens:
        return float(tokens), "requests, each with its prompt"
    return _tokens_of(step, engines), "engine iterations"


def _tokens_of(step: Step, engines: Sequence[EngineRow]) -> float:
    """Return the tokens of all engines' iterations.

    Return 0 if a count is unknown, or a part of the rollout was not recorded.
    """
    rollout = step.rollout
    for lane in step.lanes:
        if lane.is_engine and misses(lane.observed, rollout, rollout):
            return 0.0
    tokens = 0
    first_ranks = {row.replica: row for row in reversed(engines)}
    for row in first_ranks.values():
        if row.prefill_tokens is None or row.decode_tokens is None:
            return 0.0
        tokens += row.prefill_tokens + row.decode_tokens
    return float(tokens)


def shared_devices(step: Step) -> list[list[Lane]]:
    """Return the lanes of each device, in the order of the step's lanes.

    Lanes share a device if they have the same device UUID, or else the same host and device number.
    A lane without both has a device of its own.
    """
    devices = [lane.device for lane in step.lanes if lane.device is not None]
    uuids = {device.place: device.uuid for device in devices if device.place and device.uuid}

    def device_of(lane: Lane) -> object:
        device = lane.device
        return (device and (device.uuid or uuids.get(device.place) or device.place)) or lane

    return list(grouped(step.lanes, device_of).values())


def lost_of_device(lanes: Sequence[Lane]) -> Mapping[str, Spans]:
    """Partition the idle time of a device by cause, from the idle time of its lanes."""
    if len(lanes) == 1:
        return lanes[0].idle
    idle = _observed(lanes)
    claims = dict.fromkeys(_TURNS, EMPTY)
    for lane in lanes:
        idle = subtract(idle, intersection(lane.busy, lane.observed))
        for cause in _TURNS:
            claims[cause] = union(claims[cause], lane.idle[cause])
    parts = partition(idle, claims)
    return {cause: parts[cause] for cause in CAUSES}
