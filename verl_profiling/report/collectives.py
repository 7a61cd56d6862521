"""Collectives and stragglers: matches the calls of ranks, and computes their waits for each other.

The ranks of a process group leave a collective together. So the last rank to enter a call has the
shortest run, and the length of this run is the cost of the call. Every other rank waits for the
time by which its run exceeds the cost:

    waiting of a rank = union, over its calls, of [begin, end - cost)

Calls are matched by their order and their end. A profiler that begins late, or has a hole, misses
calls.

Concurrent waits of a rank count once. Waiting lies inside the calls, so it never exceeds the rank's
communication. Only durations are compared between ranks, so clock offsets have no influence.
Without a manifest, calls of several hosts are matched only if all ranks have as many.

If some ranks of a group are not captured, the result is a lower bound of the waits, and the last
rank is unknown. A collective of unknown group yields nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import StageSpan
from verl_profiling.report.columns import CollectiveRow, StragglerRow
from verl_profiling.report.intervals import (
    EMPTY,
    Ints,
    Spans,
    common,
    holding,
    intersection,
    length,
    subtract,
    time_of,
    union,
)
from verl_profiling.report.kinds import Group
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.lost import until_last
from verl_profiling.report.observed import misses
from verl_profiling.timeline.databases import WHOLE_GRAPH

_TOP_COLLECTIVES = 20
_LATE_SHARE = 0.8  # least share of all waiting with which one rank counts as the last


class Calls(NamedTuple):
    """All calls of one collective by the ranks of a process group.

    Attributes:
        role: Role of the ranks.
        name: The collective.
        group: The group.
        lanes: Lanes of the captured ranks.
        runs: Begin and end (ns) of each rank's run of each call, shape (ranks, calls, 2).
        cost: Length of the shortest run of each call (ns).
        last: Index of the rank that entered each call last.
    """

    role: str
    name: str
    group: Group
    lanes: list[Lane]
    runs: Ints
    cost: Ints
    last: Ints

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the group were captured."""
        return len(self.lanes) == self.group.size

    def waiting(self, rank: int, calls: Any = slice(None)) -> Spans:
        """Return the spans in which a rank waited in calls; spans may overlap."""
        begins = self.runs[rank, calls, 0]
        return np.stack((begins, self.runs[rank, calls, 1] - self.cost[calls]), axis=1)


def matched_calls(step: Step) -> tuple[list[Calls], list[str]]:
    """Return the calls that all ranks of a group left together, and a note on the runs without such
    a call.

    Groups of different replicas have the same name, but are different groups.
    """
    called = defaultdict(list)
    for lane in step.lanes:
        for call in lane.collectives:
            called[lane.source.role, lane.source.replica, call].append(lane)
    clocks = step.manifest.clocks if step.manifest else []
    error_ns = max((clock.error_ns for clock in clocks), default=0)
    found, recorded, matched = [], 0, 0
    for (role, _, (name, group)), same_group in called.items():
        for lanes in _engines(same_group, group.size):
            of_lanes = [lane.collectives[name, group] for lane in lanes]
            if len({lane.source.host_clock for lane in lanes} - {""}) > 1:
                runs = _left_steadily(of_lanes)
            else:
                runs = _left_together(of_lanes, error_ns, step.manifest is not None)
            recorded += sum(map(len, of_lanes))
            matched += runs.shape[0] * runs.shape[1]
            if runs.shape[1]:
                took = runs[:, :, 1] - runs[:, :, 0]
                found.append(
                    Calls(role, name, group, lanes, runs, took.min(axis=0), took.argmin(axis=0))
                )
    if matched == recorded:
        return found, []
    many = f"{recorded - matched:,} of {recorded:,} runs of collectives"
    return found, [
        f"{many} fit no run of every other rank, by order and end; their waits are unknown"
    ]


def _engines(lanes: list[Lane], size: int) -> list[list[Lane]]:
    """Divide lanes that name the same group: several engines, each with its ranks from 0,
    name them alike.
    """
    by_rank = defaultdict(list)
    for lane in lanes:
        by_rank[lane.source.rank].append(lane)
    if (
        size
        and len(lanes) > size
        and len(by_rank) == size
        and len(set(map(len, by_rank.values()))) == 1
    ):
        return [list(engine) for engine in zip(*by_rank.values(), strict=True)]
    return [lanes] if 1 < len(lanes) <= (size or len(lanes)) else []


def _left_together(of_lanes: Sequence[Spans], error_ns: int, is_one_clock: bool) -> Ints:
    """Return the runs of the calls that all ranks left together, shape (ranks, calls, 2).

    The nth runs of all ranks are one call, unless their ends say otherwise: a profiler that began
    one call later, and ended one later, has as many runs. With other numbers of runs, those that
    end together are.

    Args:
        of_lanes: The runs of each rank, sorted by begin.
        error_ns: Error of the clocks (ns).
        is_one_clock: Whether all times are on one clock, up to the error.
    """
    by_end = _by_end(of_lanes)
    is_call = _is_call(by_end, error_ns)
    if len(set(map(len, of_lanes))) == 1:
        by_order = np.stack(of_lanes)
        # gloo on a busy machine records runs of one call 10 ms apart: then few ends fit, by either
        # match.
        common = _recorded_by_all(of_lanes)
        if not common and is_one_clock:
            return by_order[:, :0]
        most_fit = 2 * is_call.sum() > common
        if not most_fit or is_call.sum() <= _is_call(by_order, error_ns).sum():
            return by_order
    enter, leave = by_end[:, :, 0], by_end[:, :, 1]
    return by_end[:, leave.min(axis=0) + error_ns >= enter.max(axis=0)]


def _left_steadily(of_lanes: Sequence[Spans]) -> Ints:
    """Return the runs of the calls that all ranks left together, of hosts whose clocks are not
    compared.

    Ends that are near to each other may be of different calls. But the ends of one call are as far
    apart as those of the next one, which tells a match by order from one by end. With other numbers
    of runs, neither is known.
    """
    if len(set(map(len, of_lanes))) > 1:
        return np.stack([runs[:0] for runs in of_lanes])
    by_order, by_end = np.stack(of_lanes), _by_end(of_lanes)
    most_match = 2 * by_end.shape[1] > by_order.shape[1]
    return by_end if most_match and _unsteady_ns(by_end) < _unsteady_ns(by_order) else by_order


def _unsteady_ns(runs: Ints) -> float:
    """Return by how much the distance of the ranks' ends differs between matched runs,
    on average (ns).
    """
    apart_ns = runs[:, :, 1] - runs[0, :, 1]
    return float(np.abs(apart_ns - np.median(apart_ns, axis=1, keepdims=True)).mean())


def _recorded_by_all(of_lanes: Sequence[Spans]) -> int:
    """Return the number of runs that end while all ranks recorded, of the rank with the fewest."""
    first = max(runs[:, 0].min() for runs in of_lanes)
    last = min(runs[:, 1].max() for runs in of_lanes)
    return min(int(((first <= runs[:, 1]) & (runs[:, 1] <= last)).sum()) for runs in of_lanes)


def _by_end(of_lanes: Sequence[Spans]) -> Ints:
    """Return the runs of all ranks whose ends are the nearest to each other,
    shape (ranks, calls, 2).
    """
    by_end = [runs[np.argsort(runs[:, 1], kind="stable")] for runs in of_lanes]
    fewest = min(by_end, key=len)
    nearest = [_nearest(runs[:, 1], fewest[:, 1]) for runs in by_end]
    own = np.arange(len(fewest))
    backs = (
        _nearest(fewest[:, 1], runs[:, 1])[at] == own
        for runs, at in zip(by_end, nearest, strict=True)
    )
    is_mutual = np.logical_and.reduce(list(backs))
    return np.stack([runs[at[is_mutual]] for runs, at in zip(by_end, nearest, strict=True)])


def _nearest(ends: Ints, times: Ints) -> Ints:
    """Return the index of the nearest end to each time."""
    after = np.searchsorted(ends, times).clip(max=len(ends) - 1)
    before = (after - 1).clip(min=0)
    return np.where(times - ends[before] < ends[after] - times, before, after)


def _is_call(runs: Ints, error_ns: int) -> NDArray[np.bool_]:
    """Return which matched runs are one call: side by side,
    with ends nearer than half of the longest.
    """
    enter, leave = runs[:, :, 0], runs[:, :, 1]
    is_beside = leave.min(axis=0) + error_ns >= enter.max(axis=0)
    spread = leave.max(axis=0) - leave.min(axis=0) - error_ns
    return np.asarray(is_beside & (2 * spread <= (leave - enter).max(axis=0)))


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
