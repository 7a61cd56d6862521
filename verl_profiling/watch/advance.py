"""How the furthest of some processes moves from stage to stage, and who it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import StageUse

__all__ = ["TIED", "Advance", "Standing", "Way", "end_of", "frontier", "way_of"]

TIED = 0.05
"""Share of a stage's longest duration within which processes count as equally far, and times as touching."""


class Standing(NamedTuple):
    """How the processes of one role stand to each other in one stage of the loop.

    Attributes:
        role: The role.
        durations: How long each of its processes was in the stage, by lane, in nanoseconds.
        leader: Lane of the process that was furthest along; empty if that is not known.
        lead_ns: By how much it was longer there than the median of the others; 0 where it waited for them.
        imbalance: Longest duration over the mean of all.
        clear: Whether it is the one that the others waited for; it is, where there are no others.
        ran: Names of the stages that these processes ran there, where they are others than the loop.
    """

    role: str
    durations: dict[str, int]
    leader: str
    lead_ns: int
    imbalance: float
    clear: bool
    ran: tuple[str, ...] = ()


class Advance(NamedTuple):
    """What one stage did to the frontier of some processes."""

    name: str
    front_ns: int
    standing: Standing


class Way(NamedTuple):
    """The stages that one process went through, in order, and when it last left each."""

    lane: str
    durations: dict[str, int]
    ends: dict[str, int]


def end_of(stage: StageUse) -> int:
    """Return when a process last left a stage."""
    return stage.periods[-1][1] if stage.periods else stage.begin_ns + stage.duration_ns


def way_of(lane: str, stages: Sequence[StageUse]) -> Way:
    """Return the way of one process through its stages."""
    return Way(lane, _own_time(stages), {stage.name: end_of(stage) for stage in stages})


def _own_time(stages: Sequence[StageUse]) -> dict[str, int]:
    """Return how long a process was in each stage and in none that began before it.

    Stages of several tasks or threads can run at once; when exactly is known of those that ran once.
    """
    if len(stages) == 1:
        [stage] = stages
        return {stage.name: stage.duration_ns if stage.duration_ns > 0 else 0}
    durations: dict[str, int] = {}
    busy_until_ns: int | None = None
    for stage in sorted(stages, key=lambda stage: stage.begin_ns):
        duration_ns = max(0, stage.duration_ns)
        if stage.runs == 1 and stage.begin_ns:
            end_ns = stage.begin_ns + duration_ns
            if busy_until_ns is not None and busy_until_ns > stage.begin_ns:
                duration_ns = max(0, end_ns - busy_until_ns)
            busy_until_ns = end_ns if busy_until_ns is None else max(busy_until_ns, end_ns)
        durations[stage.name] = durations.get(stage.name, 0) + duration_ns
    return durations


def frontier(role: str, ways: Sequence[Way]) -> list[Advance]:
    """Return how the furthest of some processes moves from stage to stage, and who it is."""
    if len(ways) == 1:
        return _alone(role, ways[0])
    order = _merged([tuple(way.durations) for way in ways])
    conflicts = _conflicts(order, {tuple(way.durations) for way in ways})
    reached = [0] * len(ways)
    front_ns = 0
    moved_by: list[str] = []
    found = []
    for name in order:
        durations = [way.durations.get(name, 0) for way in ways]
        reached = [before + here for before, here in zip(reached, durations, strict=True)]
        before_ns, front_ns = front_ns, max(reached)
        tolerance_ns = TIED * max(durations)
        near = [at for at, far in enumerate(reached) if front_ns - far <= tolerance_ns]
        leader = max(near, key=durations.__getitem__)
        # Where all are near, they wait for each other; where orders differ, none is further than another.
        known = name not in conflicts and len(near) < len(ways)
        known &= len(near) > 1 or all(stage in ways[leader].durations for stage in moved_by)
        if front_ns > before_ns:
            moved_by.append(name)
        lead_ns = max(0, durations[leader] - _median(durations[:leader] + durations[leader + 1 :]))
        ends = [way.ends[name] for way in ways if way is not ways[leader] and name in way.ends]
        # Ranks leave a collective together, and who came first is in it for longest. Engines have none.
        if lead_ns and ends and role != ROLLOUT_ROLE:
            known &= 2 * (ways[leader].ends[name] - _median(ends)) >= lead_ns
        mean_ns = sum(durations) / len(durations)
        standing = Standing(
            role=role,
            durations={way.lane: here for way, here in zip(ways, durations, strict=True)},
            leader=ways[leader].lane,
            lead_ns=lead_ns if known else 0,
            imbalance=max(durations) / mean_ns if mean_ns else 1.0,
            clear=known and len(near) == 1,
        )
        found.append(Advance(name, front_ns, standing))
    return found


def _alone(role: str, way: Way) -> list[Advance]:
    """Return how one process moves."""
    front_ns, found = 0, []
    for name, duration_ns in way.durations.items():
        front_ns += duration_ns
        standing = Standing(role, {way.lane: duration_ns}, way.lane, 0, 1.0, True)
        found.append(Advance(name, front_ns, standing))
    return found


def _merged(ways: Sequence[tuple[str, ...]]) -> list[str]:
    """Return one order of all stages: the most frequent one, and before its stages what only others ran."""
    order: list[str] = []
    for way, _ in Counter(ways).most_common():
        at = len(order)
        for name in reversed(way):
            if name in order:
                at = order.index(name)
            else:
                order.insert(at, name)
    return order


def _conflicts(order: Sequence[str], ways: Iterable[tuple[str, ...]]) -> set[str]:
    """Return the stages before which a process ran others than the order says."""
    place = {name: at for at, name in enumerate(order)}
    found = set()
    for way in ways:
        places = [place[name] for name in way]
        furthest = -1
        for name, own, sorted_place in zip(way, places, sorted(places), strict=True):
            furthest = max(furthest, own)
            if own != sorted_place or own != furthest:
                found.add(name)
    return found


def _median(values: Sequence[int]) -> int:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
