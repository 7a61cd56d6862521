"""Which rank came last to the collectives inside a stage, from torch's flight recorder.

All ranks leave a collective together, so the durations of a stage that ends with one do not tell who was
late. torch records when each process entered each collective. The watch reads these records only while a
stage matters that nobody leads.

Only gloo is read: with NCCL, the host enqueues and goes on, so its times do not tell which GPU was late.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import Collectives, Period, RankUse, StepSummary

ASKED_STEPS, MOST_STEPS = 6, 40
"""Steps in which the records of all processes are read: one more than the sign ``leader`` needs; and steps in
which that is tried, as the ranks of a loop begin to read at different times."""

MATTERS = 0.05
"""The records are read if the stages that nobody leads are exposed for this share of a step."""

_FIRST_PAUSE, _LONGEST_PAUSE = 20, 320
_RECORDER = "torch._C._distributed_c10d"
_GROUPS = "torch.distributed.distributed_c10d"
_BACKEND = "gloo"
_MOST_ENTRIES = 5_000
"""Reading 2,000 records holds the GIL for some 40 ms, 20,000 for half a second."""


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
    for group, number, at_ns in _entered():
        for of_step, (begin_ns, end_ns) in zip(found, steps, strict=True):
            if begin_ns <= at_ns - ahead_ns <= end_ns:
                of_step.setdefault(group, {})[number] = at_ns - ahead_ns
    return found


def _entered() -> list[tuple[str, int, int]]:
    """Return the collectives that torch's recorder has kept: group with its size, number, and time (ns).

    There are none if the recorder is off, or of another version.
    """
    dump = getattr(sys.modules.get(_RECORDER), "_dump_fr_trace_json", None)
    if dump is None:
        return []
    try:
        world = sys.modules[_GROUPS]._world
        dear = int(os.environ.get("TORCH_FR_BUFFER_SIZE") or 0) > _MOST_ENTRIES
        if dear or not any(_BACKEND in backend for backend, _ in world.pg_map.values()):
            return []
        sizes = {name: len(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}
        found = msgspec.json.decode(dump(True, False), type=_Records).entries
    except Exception:  # private to torch: it changes between versions
        return []
    return [
        (f"{group} {sizes.get(group, 0)}", one.collective_seq_id, one.time_created_ns)
        for one in found
        if one.profiling_name.startswith(f"{_BACKEND}:") and not one.is_p2p
        for group in one.process_group[:1]
    ]


def with_lateness(summary: StepSummary) -> StepSummary:
    """Return the summary with collectives replaced by how late each process was to them, by stage.

    The last process to enter is late by its entry minus the entry before it, in the stage in which it
    entered. Only groups of all processes of a role count: another process may have been later.
    """
    processes = (*summary.loop, *summary.workers)
    if not any(use.collectives for use in processes):
        return summary
    late: dict[str, Counter[str]] = {}
    for role in {use.role for use in processes} - {ROLLOUT_ROLE}:
        uses = [use for use in processes if use.role == role]
        if len(uses) > 1 and all(use.collectives for use in uses):
            late |= {use.lane: Counter() for use in uses}
            _add_lateness(late, uses)

    def known(use: RankUse) -> RankUse:
        stages = use.stages
        if (of_lane := late.get(use.lane)) is not None:
            stages = [msgspec.structs.replace(one, late_ns=of_lane[one.name]) for one in stages]
        return msgspec.structs.replace(use, stages=stages, collectives={})

    loop, workers = [*map(known, summary.loop)], [*map(known, summary.workers)]
    return msgspec.structs.replace(summary, loop=loop, workers=workers)


def _add_lateness(late: dict[str, Counter[str]], members: list[RankUse]) -> None:
    """Add how late the members of a role were to the collectives that all of them entered.

    Nobody leaves a collective before the last one enters it, so lateness adds up from one to the next. Where
    the others entered the next one before that, they did not wait, and it is the same lateness. The first
    collective of a stage does not count what its process was late to the stage.
    """
    known: list[list[int]] = []
    for group in set.intersection(*({*use.collectives} for use in members)):
        if int(group.rpartition(" ")[2]) == len(members):
            numbers = set.intersection(*({*use.collectives[group]} for use in members))
            known += [[use.collectives[group][number] for use in members] for number in numbers]
    until_ns = counted_ns = 0
    for times in sorted(known, key=max):
        (second_ns, second), (last_ns, last) = sorted((ns, who) for who, ns in enumerate(times))[-2:]
        counted_ns = counted_ns if second_ns < until_ns else 0
        late_ns = last_ns - second_ns - counted_ns
        counted_ns, before_ns, until_ns = max(counted_ns, last_ns - second_ns), until_ns, last_ns
        for name, begin_ns in _stages_at(members[last], last_ns):
            own_ns = min(late_ns, last_ns - begin_ns)
            if before_ns < begin_ns:
                own_ns -= max(0, begin_ns - dict(_stages_at(members[second], second_ns)).get(name, begin_ns))
            late[members[last].lane][name] += max(0, own_ns)


def _stages_at(use: RankUse, time_ns: int) -> Iterator[tuple[str, int]]:
    """Yield the stages in which a process is at a time, with the begins of these runs."""
    for stage in use.stages:
        periods: Sequence[Period] = stage.periods or [(stage.begin_ns, stage.begin_ns + stage.duration_ns)]
        at = bisect_right(periods, (time_ns, sys.maxsize)) - 1
        if at >= 0 and time_ns <= periods[at][1]:
            yield stage.name, periods[at][0]


class RecorderReading:
    """Decides in which steps the flight recorders are read: some in a row, then ever longer pauses.

    Attributes:
        due: Whether they are read in the next steps.
        exist: Whether those of all processes of a role have been read once.
    """

    def __init__(self) -> None:
        self.due = self.exist = False
        self._left = self._most = self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def begin(self) -> None:
        """Read the recorders in the next steps: a stage became slow, and no process stands out in it."""
        self.due, self._left, self._most = True, ASKED_STEPS, MOST_STEPS

    def follow(self, summary: StepSummary) -> None:
        """Follow a step with its exposed times."""
        processes = (*summary.loop, *summary.workers)
        if self.due:
            complete = any(stage.late_ns is not None for use in processes for stage in use.stages)
            self.exist |= complete
            self._left -= complete
            self._most -= 1
            if not (self._left and self._most):
                self.due, self._pause = False, self._next_pause
                self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            return
        self._pause = max(0, self._pause - 1)
        many = Counter(use.role for use in processes)
        unled_ns = sum(
            row.exposed_ns
            for row in summary.exposed
            if row.name and not row.leader and row.role != ROLLOUT_ROLE and many[row.role] > 1
        )
        if not self._pause and unled_ns >= MATTERS * summary.duration_ns > 0:
            self.begin()
