"""The frontier of a group of processes: the longest total time after each stage, and whose it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import RankUse

TIED = 0.05
"""Tolerance, as a share of a stage's longest duration, within which processes count as tied."""

LATE = 0.08
"""Share of a stage from which the last process to enter a collective leads."""

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of stages, as columns: index of the process and of the stage, begin, end, time spent (ns).

    ``late`` is how late the process was to the collectives in the stage, added up (ns).
    """

    who: Whole
    stage: Whole
    begin: Floats
    end: Floats
    length: Floats
    late: Floats

    def at(self, rows: NDArray[np.bool_] | Whole) -> Runs:
        """Return the rows that a mask or indices select."""
        return Runs(*(column[rows] for column in self))  # type: ignore[arg-type]

    def within(self, begin_ns: float, end_ns: float) -> Runs:
        """Return the runs clipped to an interval; runs outside of it are left out."""
        begin, end = np.maximum(self.begin, begin_ns), np.minimum(self.end, end_ns)
        return self._replace(begin=begin, end=end, length=end - begin).at(begin < end)

    def own_time(self) -> Runs:
        """Return the runs by process and begin; ``length`` excludes overlap with earlier runs."""
        runs = self.at(np.lexsort((self.begin, self.who)))
        if runs.who.size < 2:
            return runs
        width = runs.end.max() - runs.begin.min() + 1.0
        busy = np.maximum.accumulate(runs.end + runs.who * width)[:-1] - runs.who[1:] * width
        covered = np.maximum(busy - runs.begin[1:], 0.0) / np.maximum(runs.end - runs.begin, 1.0)[1:]
        length = runs.length.copy()
        length[1:] *= 1.0 - np.minimum(covered, 1.0)
        return runs._replace(length=length)


def joined(parts: Sequence[Runs]) -> Runs:
    """Concatenate tables of runs."""
    return Runs(*map(np.concatenate, zip(*parts, strict=True)))


def runs_of(
    uses: Sequence[RankUse], origin_ns: int, numbers: Mapping[str, int], stages: dict[str, int]
) -> Runs:
    """Return the stage runs of processes, in nanoseconds after ``origin_ns``.

    Args:
        uses: The processes, with their stages in one step.
        origin_ns: The unix time that becomes 0.
        numbers: Index of each process, by lane.
        stages: Index of each stage, by name; new names are added.
    """
    lanes = np.array([numbers[use.lane] for use in uses], dtype=np.int64)
    who = np.repeat(lanes, np.array([len(use.stages) for use in uses], dtype=np.int64))
    flat = [stage for use in uses for stage in use.stages]
    names = [one.name for one in flat]
    stages.update({name: number for number, name in enumerate(dict.fromkeys([*stages, *names]))})
    stage = np.array([stages[name] for name in names], dtype=np.int64)
    begin = (np.array([one.begin_ns for one in flat], dtype=np.int64) - origin_ns).astype(float)
    length = np.maximum(np.array([one.duration_ns for one in flat], dtype=np.float64), 0.0)
    late = np.array([one.late_ns or 0 for one in flat], dtype=np.float64)
    runs = Runs(who, stage, begin, begin + length, length, late)
    if periods := [(at, *period) for at, one in enumerate(flat) for period in one.periods]:
        at, begins, ends = np.array(periods, dtype=np.int64).T
        took = np.maximum(ends - begins, 0)
        once = np.flatnonzero(np.bincount(at, minlength=len(flat)) == 0)
        runs = runs.at(np.concatenate([once, at]))
        runs.begin[once.size :], runs.end[once.size :] = begins - origin_ns, ends - origin_ns
        runs.length[once.size :] *= took / np.maximum(np.bincount(at, took, len(flat)), 1.0)[at]
    return runs


class Standing(NamedTuple):
    """Comparison of the processes of one role in one stage of the loop.

    Attributes:
        role: The role.
        lanes: Its processes.
        durations: Nanoseconds that each process spent in the stage.
        leader: Lane of the process at the frontier; empty if unknown.
        lead_ns: The leader's time in the stage minus the median of the others; 0 if it waited for them.
        imbalance: Longest duration over the mean of all.
        clear: Whether the others waited for the leader; also ``True`` for a single process.
        ran: Names of the workers' own stages inside the loop's stage; empty for processes of the loop.
        begin_ns: Begin of the first of these stages, after the step began.
        end_ns: End of the last of them.
    """

    role: str
    lanes: Sequence[str]
    durations: Floats
    leader: str
    lead_ns: int
    imbalance: float
    clear: bool
    ran: tuple[str, ...] = ()
    begin_ns: float = 0.0
    end_ns: float = 0.0

    def by_lane(self) -> dict[str, float]:
        """Return the durations (ns) by lane."""
        return dict(zip(self.lanes, self.durations.tolist(), strict=True))


def frontier(role: str, lanes: Sequence[str], runs: Runs) -> Iterator[tuple[int, float, Standing]]:
    """Yield each stage's index, the frontier after it (ns), and the standing of the processes in it.

    All ranks leave a collective together, and the rank that arrives first spends the most time in it. So a
    rank whose stage ends together with the others' does not lead. The rank that was last to enter does,
    where that is known. Engines have no collectives.

    Args:
        role: Their role.
        lanes: Their names.
        runs: Their runs, as :meth:`Runs.own_time` returns them.
    """
    many = len(lanes)
    order, conflicts = _order(runs)
    reached, front_ns = np.zeros(many), 0.0
    ran_all = np.ones(many, dtype=bool)
    for stage in order:
        those = runs.at(runs.stage == stage)
        here = np.bincount(those.who, those.length, many).astype(float)
        ends = np.full(many, np.nan)
        ends[those.who] = those.end
        reached += here
        before_ns, front_ns = front_ns, float(reached.max())
        near = np.flatnonzero(front_ns - reached <= TIED * here.max())
        leader = int(near[here[near].argmax()])
        lead_ns, known = 0.0, True
        if many > 1:
            # If all are tied, they wait for each other; if stage orders differ, progress cannot be compared.
            known = stage not in conflicts and near.size < many and bool(near.size > 1 or ran_all[leader])
            lead_ns = max(0.0, float(here[leader] - np.median(np.delete(here, leader))))
            others = np.delete(ends, leader)
            others = others[~np.isnan(others)]
            if lead_ns and others.size and role != ROLLOUT_ROLE:
                known &= bool(2 * (ends[leader] - np.median(others)) >= lead_ns)
        if front_ns > before_ns:
            ran_all &= ~np.isnan(ends)
        clear = known and near.size == 1
        if not clear and (late_ns := those.late.max(initial=0.0)) > LATE * here.max():
            late = np.zeros(many)
            np.maximum.at(late, those.who, those.late)
            leader = int(late.argmax())
            lead_ns = late_ns - np.delete(late, leader).max(initial=0.0)
            clear = known = bool(lead_ns > LATE * here.max())
            here = here.max() - late_ns + late
        mean_ns = here.mean()
        yield (
            stage,
            front_ns,
            Standing(
                role=role,
                lanes=lanes,
                durations=here,
                leader=lanes[leader],
                lead_ns=round(lead_ns) if known else 0,
                imbalance=max(1.0, float(here.max() / mean_ns)) if mean_ns else 1.0,
                clear=clear,
            ),
        )


def _order(runs: Runs) -> tuple[list[int], set[int]]:
    """Return one order of all stages, and the stages that some process ran in another order.

    It is the processes' most frequent order. A stage that lacks there is inserted as another process ran it.
    """
    if not runs.stage.size or (runs.stage == runs.stage[0]).all():
        return runs.stage[:1].tolist(), set()
    ways: dict[int, list[int]] = {}
    for who, stage in dict.fromkeys(zip(runs.who.tolist(), runs.stage.tolist(), strict=True)):
        ways.setdefault(who, []).append(stage)
    counted = Counter(map(tuple, ways.values())).most_common()
    order: list[int] = []
    for way, _ in counted:
        at = len(order)
        for stage in reversed(way):
            if stage in order:
                at = order.index(stage)
            else:
                order.insert(at, stage)
    place = {stage: at for at, stage in enumerate(order)}
    conflicts: set[int] = set()
    for way, _ in counted:
        places = np.array([place[stage] for stage in way])
        late = np.maximum.accumulate(places) > places
        early = np.minimum.accumulate(places[::-1])[::-1] < places
        conflicts.update(np.array(way)[late | early].tolist())
    return order, conflicts
