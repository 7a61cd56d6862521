"""Table rows made from the manifest and the trajectory logs: measures, costs,
requests, counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import median
from typing import NamedTuple

from verl_profiling.manifest import CaptureResult, Manifest
from verl_profiling.numbers.report_columns import (
    CostRow,
    CounterRow,
    GanttSpan,
    MeasureRow,
    ReplicaRow,
)
from verl_profiling.slices.intervals import grouped, percentiles
from verl_profiling.steps.read import Content, Counts
from verl_profiling.steps.requests import RequestRow
from verl_profiling.steps.trajectory_columns import Trajectory
from verl_profiling.units import duration, shortened

_STAGE_PREFIX = "stage/"
_SLOWER = 1.2  # a replica is slow if a token takes 1.2 times the median of the others
_SET_CLOCK_NS = 1_000_000
_SET_CLOCK_SHARE = 0.001  # twice the rate at which NTP slews a clock (500 ppm)
MOST_ROWS = 64
"""Maximum number of rows, which fill a screen; with more trajectories, each group has one row."""


def measures_of(worker: CaptureResult) -> Iterator[MeasureRow]:
    """Yield a row per number that a worker recorded.

    A key ``stage/NAME/...`` is a number of the stage ``NAME``, others are of no stage.
    """
    for key, value in worker.metrics.items():
        stage = ""
        name = key
        if key.startswith(_STAGE_PREFIX):
            stage, _, name = key.removeprefix(_STAGE_PREFIX).rpartition("/")
        yield MeasureRow(worker=worker.name, stage=stage, name=name, value=value)


def costs(manifest: Manifest) -> Iterator[CostRow]:
    """Yield how long each worker took to start and stop recording; skipped workers have no row."""
    for worker in manifest.workers:
        if worker.status != "skipped":
            start_s, stop_s = worker.cost_s("start"), worker.cost_s("stop")
            yield CostRow(worker=worker.name, start_s=start_s, stop_s=stop_s)


def clock_notes(manifest: Manifest) -> Iterator[str]:
    """Yield a note for each worker whose host's clock was set, or slewed by NTP,
    during the capture.
    """
    for worker in manifest.workers:
        if worker.anchors:
            first, last = worker.anchors[0], worker.anchors[-1]
            passed_ns = last.monotonic_ns - first.monotonic_ns
            set_ns = last.unix_ns - first.unix_ns - passed_ns
            if abs(set_ns) > max(_SET_CLOCK_NS, _SET_CLOCK_SHARE * passed_ns):
                by = duration(set_ns / 1e9, signed=True)
                yield (
                    f"{worker.name}: the clock of {worker.identity.host} was set by {by} during "
                    "the capture; its lane may be off by as much"
                )


def counter_rows(counts: Counts, begin_ns: int, end_ns: int) -> Iterator[CounterRow]:
    """Yield a row for each counter (e.g. a queue's length) with a sample in the step or before it.

    A sample is valid until the next one; the last sample before the step is the value at its begin.
    """
    for (lane, name), samples in counts.items():
        valid = sorted(
            (at_ns, value) for at_ns, value in samples if at_ns <= end_ns and math.isfinite(value)
        )
        values = []
        in_step = time_ns = 0
        area = 0.0
        for (at_ns, value), (until_ns, _) in pairwise([*valid, (end_ns, 0.0)]):
            if until_ns > begin_ns:
                values.append(value)
                in_step += at_ns > begin_ns
                held_ns = until_ns - max(at_ns, begin_ns)
                time_ns += held_ns
                area += value * held_ns
        if values:
            mean = values[-1]
            if time_ns:
                mean = area / time_ns
            yield CounterRow(
                lane=lane,
                name=name,
                samples=in_step,
                last=values[-1],
                mean=mean,
                max=max(values),
            )


def unfinished_requests(rows: Iterable[ReplicaRow]) -> Iterator[str]:
    """Yield a note for each replica with requests that failed."""
    for row in rows:
        if row.failed:
            yield (
                f"{row.worker}: {row.failed:,} of {row.requests:,} requests failed or were aborted"
            )


def replica_rows(requests: Iterable[RequestRow]) -> list[ReplicaRow]:
    """Return one row for each replica that recorded requests, sorted by replica."""
    by_replica = grouped(requests, attrgetter("replica", "worker"))
    return [_replica_row(by_replica[key]) for key in sorted(by_replica)]


class SlowReplica(NamedTuple):
    """The replica with the slowest decode.

    Attributes:
        row: Row of the replica.
        token_us: Median time per token of the replica.
        usual_us: Median of the same time of the other replicas.
    """

    row: ReplicaRow
    token_us: float
    usual_us: float

    @property
    def advice(self) -> str:
        """The advice as text: the worker to look at, and both times."""
        took, usual = duration(self.token_us / 1e6), duration(self.usual_us / 1e6)
        return (
            f"compare host and device of {self.row.worker} with those of the other replicas: "
            f"it takes {took} a token, the others {usual}"
        )


def slowest_replica(rows: Iterable[ReplicaRow]) -> SlowReplica | None:
    """Return the replica with the slowest decode; ``None`` if no replica is an outlier."""
    times = [(row.per_token_p50_us, row) for row in rows if row.per_token_p50_us]
    if len(times) < 2:
        return None
    *others, (token_us, row) = sorted(times, key=itemgetter(0))
    usual_us = median(us for us, _ in others)
    if token_us > _SLOWER * usual_us:
        return SlowReplica(row, token_us, usual_us)
    return None


def _replica_row(requests: list[RequestRow]) -> ReplicaRow:
    training = [request for request in requests if not request.validate]
    whole = [request for request in training if not request.failed]
    times = {
        **_percentiles("queued", map(_queued_us, whole)),
        **_percentiles("to_first_token", map(attrgetter("to_first_token_us"), whole)),
        **_percentiles("per_token", map(attrgetter("per_token_us"), whole)),
    }
    preemptions = [request.preemptions for request in training if request.preemptions is not None]
    return ReplicaRow(
        worker=requests[0].worker,
        replica=requests[0].replica,
        requests=len(training),
        failed=len(training) - len(whole),
        **times,
        cache_hit_share=_cache_hit_share(training),
        preemptions=sum(preemptions) if preemptions else None,
        validation=len(requests) - len(training),
    )


def _percentiles(name: str, sample: Iterable[float | None]) -> dict[str, float | None]:
    """Return the fields of a row with the median and the 99th percentile of known times (us)."""
    p50, p99 = percentiles([max(us, 0.0) for us in sample if us is not None], 50, 99)
    return {f"{name}_p50_us": p50, f"{name}_p99_us": p99}


def _queued_us(request: RequestRow) -> float | None:
    if request.scheduled_us is None or request.arrival_us is None:
        return None
    return request.scheduled_us - request.arrival_us


def _cache_hit_share(requests: list[RequestRow]) -> float | None:
    """Return the cached share (0 to 1) of prompt tokens,
    over requests whose cached tokens are known.
    """
    prompts = cached = 0
    for request in requests:
        if request.cached_tokens is not None:
            prompts += request.prompt_tokens
            cached += min(request.cached_tokens, request.prompt_tokens)
    if prompts:
        return cached / prompts
    return None


def trajectory_gantt(content: Content) -> Iterator[GanttSpan]:
    """Yield what each trajectory waited for: its causes, in lanes named by group and sample.

    With too many trajectories, the last one of each group stands for its group; of too many groups,
    the last ones are shown.
    """
    shown = _shown(content.records.trajectories)
    pieces = content.pieces
    columns = (pieces.owner.tolist(), pieces.begin.tolist(), pieces.end.tolist())
    step_ns = content.step.begin_ns
    for owner, begin, end, cause in zip(*columns, pieces.cause.tolist(), strict=True):
        if owner in shown:
            yield GanttSpan(
                lane=shown[owner],
                name=pieces.causes[cause],
                begin_us=(begin - step_ns) / 1000,
                end_us=(end - step_ns) / 1000,
                depth=0,
            )


def _shown(trajectories: list[Trajectory]) -> dict[int, str]:
    """Return the names of the trajectories that have a row, by index."""
    order = sorted(range(len(trajectories)), key=lambda index: -trajectories[index].end_ns)
    shown: dict[int, str] = {}
    groups: set[str] = set()
    for index in order:
        said = trajectories[index].said
        name = f"trajectory {shortened(said.group)}/{said.sample}"
        if len(trajectories) > MOST_ROWS:
            if said.group in groups or len(groups) == MOST_ROWS:
                continue
            groups.add(said.group)
            name += ", last of its group"
        shown[index] = name
    return shown
