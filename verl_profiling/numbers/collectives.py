"""Collectives and stragglers: the waits of ranks for each other.

A rank's run of a call is its time in the call. The rank that enters last has the shortest run, and
the length of this run is the cost of the call. Every other rank waits for the time by which its run
exceeds the cost:

    waiting of a rank = union, over its calls, of [begin, end - cost)

Concurrent waits of a rank count once. Waiting lies inside the calls, so it never exceeds the rank's
communication.

If some ranks of a group are not captured, the result is a lower bound of the waits, and the last
rank is unknown. A collective of unknown group yields nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter
from statistics import median

import numpy as np

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import StageSpan
from verl_profiling.numbers.idle_causes import until_last
from verl_profiling.numbers.report_columns import CollectiveRow, StragglerRow
from verl_profiling.slices.intervals import (
    EMPTY,
    Spans,
    common,
    holding,
    intersection,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.slices.observed import misses
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.databases import WHOLE_GRAPH
from verl_profiling.steps.lanes import Lane, Step

_TOP_COLLECTIVES = 20
_LATE_SHARE = 0.8  # least share of all waiting with which one rank counts as the last


def waits(calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the time in which each rank waited in any collective."""
    return _of_lanes(calls, Calls.waiting)


def in_calls(calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the time in which each rank was in a call of any collective."""
    return _of_lanes(calls, lambda collective, rank: collective.runs[rank, :, :2])


def _of_lanes(calls: Iterable[Calls], spans_of: Callable[[Calls, int], Spans]) -> dict[Lane, Spans]:
    """Return the time of each lane in any collective, from its spans in each."""
    spans: defaultdict[Lane, list[Spans]] = defaultdict(list)
    for collective in calls:
        for rank, lane in enumerate(collective.lanes):
            spans[lane].append(spans_of(collective, rank))
    return {lane: union(*of_lane) for lane, of_lane in spans.items()}


def unmatched(step: Step, calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return each lane's observed communication in calls that were not matched between ranks.

    It is unknown how much of it is waiting.
    """
    matched = in_calls(calls)
    return {
        lane: intersection(subtract(lane.communication, matched.get(lane, EMPTY)), lane.observed)
        for lane in step.lanes
    }


def whole_graphs_ns(lanes: Iterable[Lane]) -> int:
    """Return the time (ns) in CUDA graphs that the trace has as one event each.

    Collectives inside of them are not recorded.
    """
    total_ns = 0
    for lane in lanes:
        for (_, name), (_, self_ns) in lane.ops.items():
            if name.startswith(WHOLE_GRAPH):
                total_ns += self_ns
    return total_ns


def _perhaps_waiting(step: Step, calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return each lane's known waits, and exposed communication that may be waiting as well."""
    whole = in_calls(collective for collective in calls if collective.is_whole)
    perhaps = {}
    for lane in step.lanes:
        seen = union(lane.compute, whole.get(lane, EMPTY))
        perhaps[lane] = union(lane.waiting, subtract(lane.communication, seen))
    return perhaps


def last_to(stage: str, step: Step, calls: Iterable[Calls], least: float) -> tuple[str, float]:
    """Return the rank that was last to enter the collectives of a stage, and the others' total wait
    (s).

    An empty stage means the whole step. The result is empty if ranks take turns in being last, or
    if the waits are less than the share ``least`` of the stage. Only captured ranks count.
    """
    # waits, by the name of the last rank and of the waiting rank
    waited: defaultdict[tuple[str, str], list[Spans]] = defaultdict(list)
    longest = 0
    for collective in calls:
        for index, lane in enumerate(collective.lanes):
            during = _time_in(stage, lane, step)
            inside = holding(during, collective.runs[index, :, 0]) & (collective.last == index)
            longest = max(longest, length(during))
            for rank, other in enumerate(collective.lanes):
                waited[lane.name, other.name].append(collective.waiting(rank, inside))
    sums: Counter[str] = Counter()
    for (name, _), parts in waited.items():
        sums[name] += length(union(*parts))
    for name, most_ns in sums.most_common(1):
        if most_ns > max(_LATE_SHARE * sums.total(), least * longest):
            return name, most_ns / 1e9
    return "", 0.0


def _time_in(stage: str, lane: Lane, step: Step) -> Spans:
    """Return the time of a stage on a lane, else in the loop; for ``""``, the observed time."""
    time = time_of(lane.stages, stage)
    if len(time):
        return time
    if stage:
        return step.during(stage)
    return lane.observed


def collective_rows(calls: Iterable[Calls]) -> list[CollectiveRow]:
    """Return a row per collective and process group, for the 20 with the longest waits."""
    rows = []
    for collective in calls:
        late = ""
        late_share = 0.0
        if collective.is_whole:
            ((rank, times),) = Counter(collective.last.tolist()).most_common(1)
            late = collective.lanes[rank].name
            late_share = times / len(collective.cost)
        waited_ns = 0
        for rank in range(len(collective.lanes)):
            waited_ns += length(union(collective.waiting(rank)))
        row = CollectiveRow(
            name=collective.name,
            role=collective.role,
            group=collective.group.ranks,
            calls=len(collective.cost),
            median_us=float(np.median(collective.cost)) / 1000,
            wait_us=waited_ns / 1000,
            late=late,
            late_share=late_share,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: -row.wait_us)[:_TOP_COLLECTIVES]


def stragglers(step: Step, calls: Iterable[Calls]) -> list[StragglerRow]:
    """Return the spread of work over the workers of a role, for each stage that several workers
    ran.

    Workers that communicate end a stage together, so durations of the stage show nothing. The work
    of a worker is its time in the stage without waits in collectives. Stages that were open at the
    end of the capture are left out. So are stages in which another worker may have worked as long,
    because its waits are unknown. A rank may also have waited outside of its observed windows. If
    these miss a part of the stage, the rank counts as slow only if it also ends the stage later, by
    half of its additional work.

    Args:
        step: The step.
        calls: The matched collectives of the step.
    """
    perhaps = _perhaps_waiting(step, calls)
    workers = {worker.name: _Worker(worker.name, step, perhaps) for worker in step.workers}
    runs: dict[tuple[str, str], _Runs] = {}  # by role and stage, then worker
    for worker in step.workers:
        for span in worker.stages:
            of_stage = runs.setdefault((worker.identity.role, span.name), {})
            of_stage.setdefault(worker.name, []).append(span)
    rows = []
    for (role, stage), of_workers in runs.items():
        is_cut_off = any(map(step.cut_off, chain.from_iterable(of_workers.values())))
        if len(of_workers) > 1 and not is_cut_off:
            row = _straggler(stage, role, of_workers, workers)
            if row and (_is_seen(row, of_workers, workers) or _ends_last(row, of_workers)):
                rows.append(row)
    return sorted(rows, key=lambda row: -row.behind_us)


_Runs = dict[str, list[StageSpan]]
"""Runs of one stage by name of the worker."""


class _Worker:
    """The times that all lanes of a worker have in common.

    Attributes:
        waits: Time in which all lanes waited in collectives.
        perhaps: The same, with communication that may be waiting.
        observed: Time in which all lanes are observed.
    """

    def __init__(self, name: str, step: Step, perhaps: Mapping[Lane, Spans]) -> None:
        lanes = step.lanes_of(name)
        self.waits = common([lane.waiting for lane in lanes])
        self.perhaps = common([perhaps[lane] for lane in lanes])
        self.observed = common([lane.observed for lane in lanes])


def _straggler(
    stage: str, role: str, runs: _Runs, workers: Mapping[str, _Worker]
) -> StragglerRow | None:
    """Return the row of a stage; ``None`` if it is unsure which worker worked longest."""
    worked_us: dict[str, float] = {}
    surely_us: dict[str, float] = {}
    waited_ns = 0
    for name, spans in runs.items():
        worker, time = workers[name], time_of(spans)
        worked_us[name] = length(subtract(time, worker.waits)) / 1000
        surely_us[name] = length(subtract(time, worker.perhaps)) / 1000
        waited_ns += length(intersection(time, worker.waits))
        waited_ns += length(until_last(spans, runs.values()))
    slowest = max(surely_us, key=surely_us.__getitem__)
    slowest_us = worked_us[slowest] = surely_us[slowest]
    if slowest_us < max(worked_us.values()):
        return None
    return StragglerRow(
        stage=stage,
        role=role,
        workers=len(runs),
        slowest=slowest,
        slowest_us=slowest_us,
        median_us=median(worked_us.values()),
        wait_us=waited_ns / 1000,
        behind_us=sum(slowest_us - us for us in worked_us.values()),
    )


def _is_seen(row: StragglerRow, runs: _Runs, workers: Mapping[str, _Worker]) -> bool:
    """Return whether the slowest worker was observed in its stage."""
    time = time_of(runs[row.slowest])
    return not misses(workers[row.slowest].observed, time, time)


def _ends_last(row: StragglerRow, runs: _Runs) -> bool:
    """Return whether the slowest worker ends the stage later by half of its additional work.

    Rollout engines always pass.
    """
    if row.role == ROLLOUT_ROLE:
        return True
    ends_us: dict[str, float] = {}
    for name, spans in runs.items():
        ends_us[name] = max(map(attrgetter("end_ns"), spans)) / 1000
    last_us = ends_us.pop(row.slowest)
    return 2 * (last_us - median(ends_us.values())) >= row.behind_us / len(ends_us)
