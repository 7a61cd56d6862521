"""Which role worked in a stage of a loop that calls workers, and how its processes stand to each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from verl_profiling.step_summary import RankUse, StageUse
from verl_profiling.watch.advance import TIED, Standing, end_of, frontier, way_of

__all__ = ["WAIT", "working_in"]

WAIT = "wait:"
"""How the names of stages begin in which the loop does nothing but wait for a role."""


def working_in(
    stages: Sequence[StageUse], workers: Sequence[RankUse], before: Sequence[RankUse]
) -> dict[str, list[Standing]]:
    """Return who worked in each stage of the loop; of several roles first the one that it waited for.

    In a stage in which no worker's has its middle, the loop may have waited for what was under way already;
    in one that says that it is a wait, for all that went on meanwhile.

    Args:
        stages: The stages of the loop.
        workers: The processes that it called, as far as they were read.
        before: What they did in the step before.
    """
    roles: dict[str, list[RankUse]] = {}
    for use in {use.lane: use for use in (*before, *workers)}.values():
        roles.setdefault(use.role, []).append(use)
    by_name = {stage.name: stage for stage in stages}
    inside = _inside(stages, workers)
    under_way: dict[str, list[StageUse]] = {}
    if any(name not in inside or name.startswith(WAIT) for name in by_name):
        for use in (*before, *workers):
            under_way.setdefault(use.lane, []).extend(use.stages)
    found = {}
    for name, stage in by_name.items():
        if name.startswith(WAIT):
            meanwhile = {lane: _meanwhile(stage, parts) for lane, parts in under_way.items()}
            works = [_work(stage, role, uses, meanwhile) for role, uses in roles.items()]
        elif name in inside:
            works = [_work(stage, role, uses, inside[name]) for role, uses in roles.items()]
        else:
            waited_for = {lane: _end_of(stage, parts) for lane, parts in under_way.items()}
            works = [_work(stage, role, uses, waited_for) for role, uses in roles.items()]
        if known := [work for work in works if work is not None]:
            found[name] = _by_weight(stage, known)
    return found


def _inside(stages: Sequence[StageUse], workers: Iterable[RankUse]) -> dict[str, dict[str, list[StageUse]]]:
    """Return the workers' stages whose middle lies in a stage of the loop, by its name and their lane.

    Where the periods of a stage are not known, its middle is taken to be that of a run of mean length, and a
    stage of the loop may have it from its begin on. A stage without a time belongs to the stage of its own
    name.
    """
    in_order = sorted((run for stage in stages for run in _apart(stage)), key=lambda run: run.begin_ns)
    begins = [stage.begin_ns for stage in in_order]
    found: dict[str, dict[str, list[StageUse]]] = {stage.name: {} for stage in stages}
    for use in workers:
        for stage in use.stages:
            for part in _apart(stage) if stage.periods else (stage,):
                home = _home(part, in_order, begins) if part.begin_ns else part.name
                if home in found:
                    found[home].setdefault(use.lane, []).append(part)
    return {name: parts for name, parts in found.items() if parts}


def _apart(use: StageUse) -> list[StageUse]:
    """Return the periods of a stage, each as a stage; one whose periods are not known, as it is."""
    if not use.periods:
        return [use]
    found: list[StageUse] = []
    left_ns = use.duration_ns
    for begin_ns, end_ns in use.periods:
        is_last = len(found) == len(use.periods) - 1
        duration_ns = left_ns if is_last else min(left_ns, end_ns - begin_ns)
        found.append(StageUse(use.name, duration_ns, 1, begin_ns, ((begin_ns, end_ns),)))
        left_ns -= duration_ns
    return found


def _home(part: StageUse, stages: Sequence[StageUse], begins: Sequence[int]) -> str | None:
    if part.runs > 1:
        middle_ns = part.begin_ns + max(0, part.duration_ns) // (2 * part.runs)
    else:
        middle_ns = (part.begin_ns + max(part.begin_ns, end_of(part))) // 2
    perhaps = None
    for at in range(bisect_right(begins, middle_ns) - 1, -1, -1):
        stage = stages[at]
        if stage.runs > 1:
            perhaps = perhaps or stage.name
        elif middle_ns < end_of(stage):
            return stage.name
    return perhaps


def _meanwhile(stage: StageUse, uses: Iterable[StageUse]) -> list[StageUse]:
    """Return what lies in a stage of all stages, whenever they began and ended."""
    parts = [part for use in uses for part in _apart(use) if part.runs == 1 and part.begin_ns]
    return [
        StageUse(part.name, end_ns - begin_ns, 1, begin_ns)
        for run in _apart(stage)
        if run.runs == 1
        for part in parts
        if (begin_ns := max(part.begin_ns, run.begin_ns)) < (end_ns := min(end_of(part), end_of(run)))
    ]


def _end_of(stage: StageUse, uses: Iterable[StageUse]) -> list[StageUse]:
    """Return what lies in a stage of stages that were under way when it began, and ended in it."""
    parts = [part for use in uses for part in _apart(use) if part.runs == 1 and part.begin_ns]
    found = []
    for run in _apart(stage):
        begin_ns, end_ns = run.begin_ns, end_of(run)
        slack_ns = int(TIED * max(0, end_ns - begin_ns))
        found += [
            StageUse(part.name, min(end_of(part), end_ns) - begin_ns, 1, begin_ns)
            for part in parts
            if run.runs == 1 and part.begin_ns < begin_ns < end_of(part) <= end_ns + slack_ns
        ]
    return found


class _Work(NamedTuple):
    """What one role did inside one stage of the loop."""

    standing: Standing
    busy_ns: int
    begin_ns: int
    end_ns: int


def _work(
    stage: StageUse, role: str, uses: Sequence[RankUse], parts: dict[str, list[StageUse]]
) -> _Work | None:
    """Return what a role did inside a stage; the leader is that of the part in which one led by most.

    Runs side by side in one process, such as requests of a server, can add up to more than the stage took.
    Then the times of all are scaled so that the longest is as long as the stage.
    """
    known = [part for use in uses for part in parts.get(use.lane, ())]
    if not known:
        return None
    ways = [way_of(use.lane, parts.get(use.lane, ())) for use in uses]
    totals = {way.lane: sum(way.durations.values()) for way in ways}
    longest_ns = max(totals.values())
    room_ns = max(0, stage.duration_ns)
    if longest_ns > (1 + TIED) * room_ns:
        ways = [
            way._replace(durations={name: ns * room_ns // longest_ns for name, ns in way.durations.items()})
            for way in ways
        ]
        totals = {way.lane: sum(way.durations.values()) for way in ways}
    tied_ns = TIED * max(totals.values())
    standing = max(
        (advance.standing for advance in frontier(role, ways)),
        key=lambda one: (one.lead_ns if one.lead_ns > tied_ns else 0, max(one.durations.values())),
    )
    once = all(part.runs == 1 and part.begin_ns for part in known)
    return _Work(
        standing=standing._replace(durations=totals, ran=tuple(dict.fromkeys(part.name for part in known))),
        busy_ns=max(totals.values()),
        begin_ns=min(part.begin_ns for part in known) if once else stage.begin_ns,
        end_ns=max(end_of(part) for part in known) if once else end_of(stage),
    )


def _by_weight(stage: StageUse, works: list[_Work]) -> list[Standing]:
    """Return who worked in a stage of the loop, first the role that it waited for.

    Where roles ran a stage of its name, the others only worked beside it. A role that went on after the stage
    was not waited for. Of the others it is the one that was busy longest, or, of those that worked beside
    that one, the one that ended last.
    """
    works = [work for work in works if stage.name in work.standing.ran] or works
    slack_ns = int(TIED * max(0, stage.duration_ns))
    end_ns = end_of(stage) + slack_ns
    awaited = [work for work in works if work.end_ns <= end_ns] or works
    first = max(awaited, key=lambda work: work.busy_ns)
    beside = [
        work
        for work in awaited
        if work is not first
        and min(work.end_ns, first.end_ns) - max(work.begin_ns, first.begin_ns) > slack_ns
    ]
    if beside:
        first = max([first, *beside], key=lambda work: work.end_ns)
    clear = first.standing.clear and not beside
    others = sorted((work for work in works if work is not first), key=lambda work: -work.busy_ns)
    return [first.standing._replace(clear=clear), *(work.standing for work in others)]
