"""Collectives and stragglers: the waits of ranks for each other.

The last rank to enter a call has the shortest run, and the length of this run is the cost of the
call. Every other rank waits for the time by which its run exceeds the cost:

    waiting of a rank = union, over its calls, of [begin, end - cost)

Concurrent waits of a rank count once. Waiting lies inside the calls, so it never exceeds the rank's
communication.

If some ranks of a group are not captured, the result is a lower bound of the waits, and the last
rank is unknown. A collective of unknown group yields nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median

import numpy as np

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import StageSpan
from verl_profiling.numbers.columns import CollectiveRow, StragglerRow
from verl_profiling.numbers.lost import until_last
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
    return _by_lane(
        (lane, one.waiting(rank)) for one in calls for rank, lane in enumerate(one.lanes)
    )


def _in_calls(calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the time in which each rank was in any call."""
    return _by_lane(run for one in calls for run in zip(one.lanes, one.runs, strict=True))


def _by_lane(parts: Iterable[tuple[Lane, Spans]]) -> dict[Lane, Spans]:
    spans: defaultdict[Lane, list[Spans]] = defaultdict(list)
    for lane, part in parts:
        spans[lane].append(part)
    return {lane: union(*of_lane) for lane, of_lane in spans.items()}


def unmatched(step: Step, calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the observed communication of each lane outside of matched calls,
    whose waits are unknown.
    """
    matched = _in_calls(calls)
    return {
        lane: intersection(subtract(lane.communication, matched.get(lane, EMPTY)), lane.observed)
        for lane in step.lanes
    }


def whole_graphs_ns(lanes: Iterable[Lane]) -> int:
    """Return the time in graphs that are one event each: their collectives are not recorded."""
    rows = chain.from_iterable(lane.ops.items() for lane in lanes)
    return sum(self_ns for (_, name), (_, self_ns) in rows if name.startswith(WHOLE_GRAPH))


def _perhaps_waiting(step: Step, calls: Iterable[Calls]) -> dict[Lane, Spans]:
    """Return the known waits in collectives, and exposed communication that may be a wait."""
    whole = _in_calls(one for one in calls if one.is_whole)
    return {
        lane: union(
            lane.waiting, subtract(lane.communication, union(lane.compute, whole.get(lane, EMPTY)))
        )
        for lane in step.lanes
    }


def last_to(stage: str, step: Step, calls: Iterable[Calls], least: float) -> tuple[str, float]:
    """Return the rank that was last to enter the collectives of a stage, and the others' total wait
    (s).

    An empty stage means the whole step. The result is empty if ranks take turns in being last, or
    if the waits are less than the share ``least`` of the stage. Only captured ranks count.
    """
    waited: defaultdict[tuple[str, str], list[Spans]] = defaultdict(
        list
    )  # by (last rank, waiting rank)
    longest = 0
    for one in calls:
        for index, lane in enumerate(one.lanes):
            own = time_of(lane.stages, stage)
            during = own if len(own) else step.during(stage) if stage else lane.observed
            inside = holding(during, one.runs[index, :, 0]) & (one.last == index)
            longest = max(longest, length(during))
            for rank, other in enumerate(one.lanes):
                waited[lane.name, other.name].append(one.waiting(rank, inside))
    sums: Counter[str] = Counter()
    for (name, _), parts in waited.items():
        sums[name] += length(union(*parts))
    name, most = next(iter(sums.most_common(1)), ("", 0))
    told = most > max(_LATE_SHARE * sums.total(), least * longest)
    return (name, most / 1e9) if told else ("", 0.0)


def collective_rows(calls: Iterable[Calls]) -> list[CollectiveRow]:
    """Return one row per collective and group, for the longest waits."""
    rows = []
    for one in calls:
        (late, times), *_ = Counter(one.last.tolist()).most_common(1)
        rows.append(
            CollectiveRow(
                name=one.name,
                role=one.role,
                group=one.group.ranks,
                calls=len(one.cost),
                median_us=float(np.median(one.cost)) / 1000,
                wait_us=sum(length(union(one.waiting(rank))) for rank in range(len(one.lanes)))
                / 1000,
                late=one.lanes[late].name if one.is_whole else "",
                late_share=times / len(one.cost) if one.is_whole else 0.0,
            )
        )
    return sorted(rows, key=lambda row: -row.wait_us)[:_TOP_COLLECTIVES]


def stragglers(step: Step, calls: Iterable[Calls]) -> list[StragglerRow]:
    """Return the spread of work over the workers of a role, for each stage that several workers
    ran.

    Workers that communicate end a stage together, so durations of the stage show nothing. The work
    of a worker is its time in the stage without waits in collectives. Stages that were open at the
    end of the capture are left out. So are stages in which another worker may have worked as long,
    because its waits are unknown. A rank may also have waited outside of its observed windows. If
    these miss a part of the stage, the rank counts as slow only if it ends later by half of its
    lead.

    Args:
        step: The step.
        calls: The matched collectives of the step.
    """
    perhaps = _perhaps_waiting(step, calls)
    observed: dict[str, Spans] = {}
    rows: list[StragglerRow] = []
    for role in dict.fromkeys(worker.identity.role for worker in step.workers):
        stages: dict[str, dict[str, list[StageSpan]]] = {}  # by stage, then worker
        waited: dict[str, tuple[Spans, Spans]] = {}  # by all lanes of a worker: surely, and perhaps
        for worker in (worker for worker in step.workers if worker.identity.role == role):
            lanes = [lane for lane in step.lanes if lane.source.worker == worker.name]
            surely = common([lane.waiting for lane in lanes])
            waited[worker.name] = surely, common([perhaps[lane] for lane in lanes])
            observed[worker.name] = common([lane.observed for lane in lanes])
            for span in worker.stages:
                stages.setdefault(span.name, {}).setdefault(worker.name, []).append(span)
        for stage, runs in stages.items():
            if len(runs) > 1 and not any(map(step.cut_off, chain.from_iterable(runs.values()))):
                found = _rows(stage, role, runs, waited)
                rows += (
                    row for row in found if _is_seen(row, runs, observed) or _ends_last(row, runs)
                )
    return sorted(rows, key=lambda row: -row.behind_us)


def _rows(
    stage: str,
    role: str,
    runs: dict[str, list[StageSpan]],
    waited: Mapping[str, tuple[Spans, Spans]],
) -> Iterator[StragglerRow]:
    worked, surely, waited_ns = {}, {}, 0
    for name, own in runs.items():
        waiting, perhaps = waited[name]
        time = time_of(own)
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


def _is_seen(
    row: StragglerRow, runs: Mapping[str, Sequence[StageSpan]], observed: Mapping[str, Spans]
) -> bool:
    """Return whether the slowest worker was observed in its stage."""
    time = time_of(runs[row.slowest])
    return not misses(observed[row.slowest], time, time)


def _ends_last(row: StragglerRow, runs: Mapping[str, Sequence[StageSpan]]) -> bool:
    """Return whether the slowest worker ends the stage later than the others by at least half
    of its lead.
    """
    ends = {name: max(span.end_ns for span in own) / 1000 for name, own in runs.items()}
    others = [us for name, us in ends.items() if name != row.slowest]
    lead_us = row.behind_us / len(others)
    return row.role == ROLLOUT_ROLE or 2 * (ends[row.slowest] - median(others)) >= lead_us
