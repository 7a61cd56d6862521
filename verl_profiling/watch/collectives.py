"""Finds the rank that was last to enter the collectives of a stage, from torch's flight recorder.

All ranks leave a collective together, so the durations of a stage with collectives do not show the
late rank. torch records when each process entered each collective. The watch reads these records
only while a slow stage shows no slowest process.

Only collectives of gloo are read: NCCL's are enqueued by the host, whose times do not show a late
GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

import msgspec

from verl_profiling.files.step_summary import Collectives, Period, RankUse, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.tools.flight_recorder import GROUPS, recorded_collectives

ASKED_STEPS, MOST_STEPS = 6, 40  # ranks begin at different times
"""Number of steps whose records are read, one more than the sign ``leader`` needs;
most steps in which reading is tried.
"""

MATTERS = 0.05
"""Minimum share of exposed time in stages without a slowest process, to read the records."""

_PAUSE = 100  # steps without reading, after steps with it


class _Entry(msgspec.Struct):
    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: int
    time_created_ns: int
    is_p2p: bool


class _Records(msgspec.Struct):
    entries: list[_Entry] = []


def collectives_in(steps: Sequence[Period], ahead_ns: int) -> list[Collectives]:
    """Return the collectives that this process entered in each step.

    Args:
        steps: Begin and end of each step, on the clock of the loop's process.
        ahead_ns: Clock offset: this process's clock minus the loop's.
    """
    found: list[Collectives] = [{} for _ in steps]
    for group, number, at_ns in entered_collectives():
        for of_step, (begin_ns, end_ns) in zip(found, steps, strict=True):
            if begin_ns <= at_ns - ahead_ns <= end_ns:
                of_step.setdefault(group, {})[number] = at_ns - ahead_ns
    return found


def entered_collectives() -> list[tuple[str, int, int]]:
    """Return the collectives in torch's recorder: group with its size (``0 8``), number of the
    collective in the group, and when this process entered it (ns).

    The list is empty if the recorder is off, or of another version.
    """
    records = recorded_collectives()
    if not records:
        return []
    try:
        world = sys.modules[GROUPS]._world
        sizes = {name: len(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
        found = msgspec.json.decode(records, type=_Records).entries
    except Exception:  # private to torch: it changes between versions
        return []
    return [
        (f"{group} {sizes.get(group, 0)}", one.collective_seq_id, one.time_created_ns)
        for one in found
        if one.profiling_name.startswith("gloo:") and not one.is_p2p
        for group in one.process_group[:1]
    ]


def with_lateness(summary: StepSummary) -> StepSummary:
    """Return the summary with each process's lateness to collectives, by stage, in place of the
    collectives.

    A process that enters a collective last is late by the time since the entry before its own. This
    counts in the stage that it is in. Only groups of exactly a role's processes count, as in others
    a process without records may have been later.
    """
    processes = summary.processes
    if not any(map(attrgetter("collectives"), processes)):
        return summary
    late: dict[str, Counter[str]] = {}
    for role in {use.role for use in processes} - {ROLLOUT_ROLE}:
        uses = [use for use in processes if use.role == role]
        if len(uses) > 1 and all(use.collectives for use in uses):
            late |= {use.lane: Counter() for use in uses}
            _add_lateness(late, uses)

    def known(use: RankUse) -> RankUse:
        return msgspec.structs.replace(use, late_ns=late.get(use.lane), collectives=None)

    loop, workers = [*map(known, summary.loop)], [*map(known, summary.workers)]
    return msgspec.structs.replace(summary, loop=loop, workers=workers)


def _add_lateness(late: dict[str, Counter[str]], members: list[RankUse]) -> None:
    """Add the lateness of a role's processes to the collectives that all of them entered.

    No process leaves a collective before the last one enters, so lateness adds up over collectives.
    If the others enter the next collective before the late one enters this one, they did not wait,
    and the lateness counts once. A process that begins its stage 3 s late enters its first
    collective 3 s late: these 3 s are not counted.
    """
    known: list[list[int]] = []
    entered = [use.collectives or {} for use in members]
    for group in set.intersection(*map(set, entered)):
        if int(group.rpartition(" ")[2]) == len(members):
            numbers = set.intersection(*({*own[group]} for own in entered))
            known += [[own[group][number] for own in entered] for number in numbers]
    until_ns = counted_ns = 0
    for times in sorted(known, key=max):
        (second_ns, second), (last_ns, last) = sorted((ns, who) for who, ns in enumerate(times))[
            -2:
        ]
        counted_ns = counted_ns if second_ns < until_ns else 0
        late_ns = last_ns - second_ns - counted_ns
        counted_ns, before_ns, until_ns = max(counted_ns, last_ns - second_ns), until_ns, last_ns
        for name, begin_ns in _stages_at(members[last], last_ns):
            own_ns = min(late_ns, last_ns - begin_ns)
            if before_ns < begin_ns:
                own_ns -= max(
                    0, begin_ns - dict(_stages_at(members[second], second_ns)).get(name, begin_ns)
                )
            late[members[last].lane][name] += max(0, own_ns)


def _stages_at(use: RankUse, time_ns: int) -> Iterator[tuple[str, int]]:
    """Yield the stages in which a process is at a time, with the begin of that run."""
    for name, begin_ns, end_ns, _ in use.each_run():
        if begin_ns <= time_ns <= end_ns:
            yield name, begin_ns


class RecorderReading:
    """Chooses the steps in which torch's flight recorders are read: some in a row, then a pause.

    Attributes:
        due: Whether the recorders are read in the next steps.
        exist: Whether the recorders of all processes of a role have been read once.
    """

    def __init__(self) -> None:
        self.due = self.exist = False
        self._left = self._tries = self._pause = 0

    def begin(self) -> None:
        """Read the recorders in the next steps, as a stage is slow without a slowest process."""
        self.due, self._left, self._tries = True, ASKED_STEPS, MOST_STEPS

    def follow(self, summary: StepSummary) -> None:
        """Update the choice by the exposed times of a step."""
        if self.due:
            complete = any(use.late_ns is not None for use in summary.processes)
            self.exist |= complete
            self._left, self._tries = self._left - complete, self._tries - 1
            if not (self._left and self._tries):
                self.due, self._pause = False, _PAUSE
            return
        self._pause = max(0, self._pause - 1)
        many = {role.role: role.processes for role in summary.memory}
        unled_ns = sum(
            row.exposed_ns
            for row in summary.exposed
            if row.name
            and not row.leader
            and row.role != ROLLOUT_ROLE
            and many.get(row.role, 0) > 1
        )
        if not self._pause and unled_ns >= MATTERS * summary.duration_ns > 0:
            self.begin()
