"""Matches the calls of collectives between the ranks of a process group.

A call is one collective of all ranks, and a run is one rank's part in it. The nth runs of two ranks
may be of different calls, because a profiler that begins late misses calls. But the ranks of a
group leave a collective together. So runs are matched by order and by end.

Waits are computed from durations only, so clock offsets have no influence. Without a manifest,
calls of several hosts are matched only if all ranks have the same number of runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.intervals import Ints, Spans, grouped
from verl_profiling.steps.kinds import Group
from verl_profiling.steps.lanes import Lane, Step


class Calls(NamedTuple):
    """All calls of one collective by the ranks of a process group.

    Attributes:
        role: Role of the ranks.
        name: Name of the collective's kernel or operator.
        group: Process group of the collective.
        lanes: Lanes of the captured ranks.
        runs: Begin, end (ns) and bytes of each rank's run of each call, shape (ranks, calls, 3).
        cost: Duration of each call's shortest run (ns): that of the last rank, which did not wait.
        last: Index in ``lanes`` of the rank with the shortest run of each call.
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
        """Return the spans in which a rank waited for others, from the begin of each run; spans may
        overlap.

        Args:
            rank: Index of the rank in ``lanes``.
            calls: Selection of calls.
        """
        begins = self.runs[rank, calls, 0]
        return np.stack((begins, self.runs[rank, calls, 1] - self.cost[calls]), axis=1)


def matched_calls(step: Step) -> tuple[list[Calls], list[str]]:
    """Return the calls that all ranks of a group left together, and a note on runs that match no
    run of another rank.

    Groups of different replicas have the same name, but are different groups.
    """
    called = defaultdict(list)
    for lane in step.lanes:
        for call in lane.collectives:
            called[lane.source.role, lane.source.replica, call].append(lane)
    calls = []
    recorded = matched = 0
    for (role, _, (name, group)), same_group in called.items():
        for lanes in _engines(same_group, group.size):
            of_lanes = [lane.collectives[name, group] for lane in lanes]
            if len({lane.source.host_clock for lane in lanes} - {""}) > 1:
                runs = _left_steadily(of_lanes)
            else:
                runs = _left_together(of_lanes, step.clock_error_ns, step.manifest is not None)
            recorded += sum(map(len, of_lanes))
            matched += runs.shape[0] * runs.shape[1]
            if runs.shape[1]:
                took = runs[:, :, 1] - runs[:, :, 0]
                shortest, last = took.min(axis=0), took.argmin(axis=0)
                calls.append(Calls(role, name, group, lanes, runs, shortest, last))
    if matched == recorded:
        return calls, []
    many = f"{recorded - matched:,} of {recorded:,} runs of collectives"
    note = f"{many} fit no run of every other rank, by order and end; their waits are unknown"
    return calls, [note]


def _engines(lanes: list[Lane], size: int) -> list[list[Lane]]:
    """Divide lanes with equal names of a group into one list per real group.

    Several engines may name their groups alike, and each counts its ranks from 0. Without at least
    two lanes of a group, there is no list.
    """
    by_rank = defaultdict(list)
    for lane in lanes:
        by_rank[lane.source.rank].append(lane)
    lanes_of_ranks = set(map(len, by_rank.values()))
    if len(by_rank) == size and len(lanes_of_ranks) == 1 and lanes_of_ranks != {1}:
        return [list(engine) for engine in zip(*by_rank.values(), strict=True)]
    if lanes[0].is_engine and len(lanes) == len(by_rank) > size > 1:
        # Data-parallel ranks of an engine: each part of consecutive ranks has a group of this name.
        return list(grouped(lanes, lambda lane: lane.source.rank // size).values())
    is_group = 1 < len(lanes) <= (size or len(lanes))
    return [lanes] if is_group else []


def _left_together(of_lanes: Sequence[Ints], error_ns: int, is_one_clock: bool) -> Ints:
    """Return the runs of the calls that all ranks left together; shape (ranks, calls, 3): begin,
    end and bytes.

    The nth runs of all ranks are one call, unless their ends do not fit. For example, a profiler
    that began and ended one call later has the same number of runs. If ranks have different
    numbers of runs, those that end together are one call.

    Args:
        of_lanes: The runs of each rank, sorted by begin.
        error_ns: Largest error of the ranks' clock offsets (ns).
        is_one_clock: Whether all times are on one clock, up to this error.
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


def _left_steadily(of_lanes: Sequence[Ints]) -> Ints:
    """Return the runs of the calls that all ranks left together, on hosts with unknown clock
    offsets; shape (ranks, calls, 3): begin, end and bytes.

    With an offset, ends that are near each other may be of different calls. But in a right match,
    the ends of two ranks are equally far apart in all calls. So of the matches by order and by end,
    the steadier one is taken. If ranks have different numbers of runs, no call is matched.
    """
    if len(set(map(len, of_lanes))) > 1:
        return np.stack([runs[:0] for runs in of_lanes])
    by_order, by_end = np.stack(of_lanes), _by_end(of_lanes)
    most_match = 2 * by_end.shape[1] > by_order.shape[1]
    return by_end if most_match and _unsteady_ns(by_end) < _unsteady_ns(by_order) else by_order


def _unsteady_ns(runs: Ints) -> float:
    """Return how far the distances between two ranks' ends are from their median, on average
    (ns).
    """
    apart_ns = runs[:, :, 1] - runs[0, :, 1]
    return float(np.abs(apart_ns - np.median(apart_ns, axis=1, keepdims=True)).mean())


def _recorded_by_all(of_lanes: Sequence[Ints]) -> int:
    """Return how many calls all ranks may have recorded: the fewest runs of a rank that overlap the
    time in which all ranks record.
    """
    first = max(runs[:, 0].min() for runs in of_lanes)
    last = min(runs[:, 1].max() for runs in of_lanes)
    return min(int(((first <= runs[:, 1]) & (runs[:, 0] <= last)).sum()) for runs in of_lanes)


def _by_end(of_lanes: Sequence[Ints]) -> Ints:
    """Return the runs that match by end, shape (ranks, calls, 3): begin, end and bytes.

    A run of the rank with the fewest runs matches the run of each other rank with the nearest end,
    if its own end is also the nearest for that run.
    """
    by_end = [runs[np.argsort(runs[:, 1], kind="stable")] for runs in of_lanes]
    fewest = min(by_end, key=len)
    nearest = [_nearest(runs[:, 1], fewest[:, 1]) for runs in by_end]
    is_mutual = np.ones(len(fewest), np.bool_)
    for runs, at in zip(by_end, nearest, strict=True):
        is_mutual &= _nearest(fewest[:, 1], runs[:, 1])[at] == np.arange(len(fewest))
    return np.stack([runs[at[is_mutual]] for runs, at in zip(by_end, nearest, strict=True)])


def _nearest(ends: Ints, times: Ints) -> Ints:
    """Return the index of the nearest end to each time."""
    after = np.searchsorted(ends, times).clip(max=len(ends) - 1)
    before = (after - 1).clip(min=0)
    return np.where(times - ends[before] < ends[after] - times, before, after)


def _is_call(runs: Ints, error_ns: int) -> NDArray[np.bool_]:
    """Return for each set of matched runs, one per rank, whether they can be one call.

    In a call, all ranks are inside at once, and their ends differ by half of the longest run at
    most.
    """
    enter, leave = runs[:, :, 0], runs[:, :, 1]
    is_beside = leave.min(axis=0) + error_ns >= enter.max(axis=0)
    spread = leave.max(axis=0) - leave.min(axis=0) - error_ns
    return np.asarray(is_beside & (2 * spread <= (leave - enter).max(axis=0)))
