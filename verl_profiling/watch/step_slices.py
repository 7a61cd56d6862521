"""The stages of steps as slices, from the watch's readings of all processes.

A slice is a row of a table: one time of a process in a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, count, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WAIT
from verl_profiling.slices.slices import Ints, Slices, called_in, peers, segments_of


class StepPaths(NamedTuple):
    """The critical paths of steps in the loop's stages, as columns: one row for each end of a
    stage, and for each worker's stage on a path.

    Attributes:
        row: Row of the loop's stage in :attr:`StepSlices.spine`.
        called: Row of the worker's stage in :attr:`StepSlices.called`; -1 without one.
        called_ns: Time in the worker's stage (ns).
        own_ns: Time in the loop's own code before it, or before the end (ns).
    """

    row: Ints
    called: Ints
    called_ns: Ints
    own_ns: Ints


_ROW_BYTES = 32
"""Bytes of a run of a :class:`RankUse`: four 64-bit numbers."""


class StepSlices:
    """The outermost stages of the processes of some steps as slices.

    Steps are read several at a time, and numpy takes as long for the slices of ten steps as for
    those of one. Each step has processes and names of its own in the table: process ``p`` of step
    ``s`` has the index ``s * many + p``, and names likewise, so nothing is joined across steps.

    Args:
        summaries: Steps in order, with the same processes.

    Attributes:
        summaries: The steps.
        processes: The processes of the loop, then the workers by role, in the first step.
        many: Number of processes of a step.
        roles: The roles of the workers.
        role_of: The index of the role of each process; -1 for those of the loop.
        names: Names of stages.
        begins: Begin of each step (ns). Steps follow each other without a gap.
        ends: End of each step.
        whole_loop: The stages of the loop's processes, as recorded.
        loop: The same by process and begin, with their time on the path through the process.
            Stages in the background are left out: their cost is the loop's wait for them.
        workers: The stages of the workers, by process and begin, without overlap.
    """

    def __init__(self, summaries: Sequence[StepSummary]) -> None:
        first = summaries[0]
        roles = [*map(_role, first.workers)]
        by_role = sorted(range(len(roles)), key=roles.__getitem__)
        self.summaries = summaries
        self.processes = first.loop + [first.workers[number] for number in by_role]
        self.many, self._of_loop = len(self.processes), len(first.loop)
        self.roles, role_of = numbered([*map(_role, self.processes[self._of_loop :])])
        self.role_of = np.concatenate([[-1] * self._of_loop, role_of])
        durations_ns = np.array([*map(attrgetter("duration_ns"), summaries)])
        self.ends = durations_ns.cumsum()
        self.begins = self.ends - durations_ns
        # The loop's processes in all steps come first, so that each side is a slice of the table.
        uses = [*chain(*map(attrgetter("loop"), summaries))]
        of_loop = sum(len(use.runs) for use in uses) // _ROW_BYTES
        uses += [summary.workers[number] for summary in summaries for number in by_role]
        who = np.arange(self.many * len(summaries)).reshape(-1, max(self.many, 1))
        sides = who[:, : self._of_loop], who[:, self._of_loop :]
        recorded = self._recorded(uses, np.concatenate([*map(np.ravel, sides)]))
        loop = recorded.at(slice(of_loop))
        path = loop.at(~self.named(loop, *first.background))
        self.loop = path.on_path(self.ends[self.step(path)] - 1.0)
        self.whole_loop = self._within(loop)
        workers = recorded.at(slice(of_loop, None))
        # Clocks differ: what ends a little later ended in the step, what goes on ends with it.
        until = self.ends[self.step(workers)]
        workers = workers._replace(end=np.where(workers.end > until, until - 1, workers.end))
        self.workers = self._within(self._within(workers).flat())

    def _recorded(self, uses: Sequence[RankUse], who: Ints) -> Slices:
        """Return the stages of processes as they were recorded, and set the names.

        Args:
            uses: The processes in each step.
            who: Their indexes.
        """
        # Most processes of a role have the same stages, so each text is split once.
        texts, text_of = numbered([*map(_stages, uses)])
        names_of = [names.split("\n") for names in texts]
        # Sorted, so that ties between names are the same in every reading.
        self.names = sorted({*chain(*names_of)})
        index = {name: number for number, name in enumerate(self.names)}
        name_of_line = np.array([*map(index.__getitem__, chain(*names_of))], np.int64)
        line = np.cumsum([0, *map(len, names_of)])[text_of]
        step, process = np.divmod(who, max(self.many, 1))
        origin = np.array([*map(attrgetter("begin_ns"), self.summaries)]) - self.begins
        runs = [*map(attrgetter("runs"), uses)]
        rows = np.frombuffer(b"".join(runs), np.int64).reshape(-1, 4)
        length = np.fromiter(map(len, runs), np.int64, len(runs)) // _ROW_BYTES
        of_uses = who, self.role_of[process], step * len(self.names), line, origin[step]
        of_rows, role, shift, line, since = (np.repeat(column, length) for column in of_uses)
        slices = Slices(
            who=of_rows,
            role=role,
            name=name_of_line[line + rows[:, 0]] + shift,
            begin=(rows[:, 1] - since).astype(float),
            end=(rows[:, 2] - since).astype(float),
            took=rows[:, 3].astype(float),
            late=np.zeros(role.size),
            parent=np.full(role.size, -1),
        )
        if any(map(_late_ns, uses)):
            for number, use in zip(who.tolist(), uses, strict=True):
                for name, late_ns in (use.late_ns or {}).items():
                    slices.late[(slices.who == number) & self.named(slices, name)] = late_ns
        return slices

    def step(self, slices: Slices) -> Ints:
        """Return the index of the step of each slice."""
        return slices.who // max(self.many, 1)

    def in_step(self, slices: Slices, step: int) -> Slices:
        """Return the slices of a step."""
        return slices.at(self.step(slices) == step)

    def has_name(self, *names: str) -> NDArray[np.bool_]:
        """Return for each name of the table whether it is one of ``names``."""
        return np.fromiter(map(names.__contains__, self.names), bool, len(self.names))

    def named(self, slices: Slices, *names: str) -> NDArray[np.bool_]:
        """Return a mask of the slices with these names."""
        if not (names and self.names):
            return np.zeros(slices.name.size, bool)
        return np.asarray(self.has_name(*names)[slices.name % len(self.names)])

    def in_roles(self, slices: Slices, *roles: str) -> NDArray[np.bool_]:
        """Return a mask of the workers' slices in processes of these roles."""
        is_in_role = np.fromiter(map(roles.__contains__, self.roles), bool, len(self.roles))
        return np.asarray(is_in_role[slices.role])

    def stages(self, names: Ints) -> list[tuple[int, str]]:
        """Return the index of the step, and the stage's name, for values of a column ``name``."""
        many = max(len(self.names), 1)
        return [(number // many, self.names[number % many]) for number in names.tolist()]

    @cached_property
    def spine(self) -> Slices:
        """The loop's stages, clipped to their steps, without slices of no time.

        The critical path goes along them, and into the workers' stages that they call.
        """
        return self._within(self.loop)

    def _within(self, slices: Slices) -> Slices:
        """Return the slices clipped to their steps, without slices of no time."""
        if not slices.who.size:
            return slices
        step = self.step(slices)
        return slices.within(self.begins[step], self.ends[step])

    @property
    def wait_names(self) -> list[str]:
        """Names of the stages that only wait."""
        return [name for name in self.names if name.startswith(WAIT)]

    @cached_property
    def waits(self) -> NDArray[np.bool_]:
        """Whether the loop waits for something in the background, for each row of the spine."""
        return self.named(self.spine, *self.wait_names)

    @cached_property
    def called(self) -> Slices:
        """The workers' stages for which a loop of one process waits; the parent of each is the row
        of the waiting stage in :attr:`spine`.
        """
        if self._of_loop != 1:
            return self.workers.at(slice(0))
        spine, waits = self.spine, self.waits
        called = called_in(spine, self.workers, waits)
        if not called.who.size:
            return called
        # A stage that goes on after the step was not waited for, if the loop waited for another.
        ends = (called.end < self.ends[self.step(called)]) | waits[called.parent]
        stages = spine.name[called.parent]
        has_ended = np.bincount(stages[ends], minlength=int(stages.max(initial=0)) + 1) > 0
        return called.at(ends | ~has_ended[stages])

    @cached_property
    def paths(self) -> StepPaths:
        """The critical paths of the steps."""
        spine, called = self.spine, self.called
        waits = np.full(spine.who.size, -1) if self._of_loop == 1 else peers(spine)
        # Engines have no collectives.
        segments = segments_of(spine, waits, called, ~self.in_roles(called, ROLLOUT_ROLE))
        borders = np.searchsorted(self.step(spine), np.arange(len(self.ends) + 1)).tolist()
        lasts = []
        for first, stop in pairwise(borders):
            if first < stop:
                lasts.append(first + int(spine.end[first:stop].argmax()))
        path = segments.paths_to(lasts)
        path = path[segments.row[path] >= 0]
        begin_ns = segments.end_ns[path] - segments.took_ns[path]
        return StepPaths(
            row=segments.row[path],
            called=segments.called[path],
            called_ns=np.maximum(segments.took_ns[path], 0),  # it may begin after the loop's stage
            own_ns=begin_ns - segments.end_ns[segments.before[path]],
        )

    @cached_property
    def path_in_calls(self) -> Mapping[tuple[int, str], Mapping[str, float]]:
        """The time of the critical path in workers' stages by role (ns), by step and stage."""
        if not self.called.who.size:
            return {}
        paths = self.paths
        is_call = paths.called >= 0
        stages = self.stages(self.spine.name[paths.row[is_call]])
        roles = self.called.role[paths.called[is_call]].tolist()
        found = defaultdict[tuple[int, str], defaultdict[str, float]](partial(defaultdict, float))
        for stage, role, took_ns in zip(
            stages, roles, paths.called_ns[is_call].tolist(), strict=True
        ):
            found[stage][self.roles[role]] += took_ns
        return found


def numbered(names: Sequence[str]) -> tuple[list[str], Ints]:
    """Return the different names, and the index of each name among them."""
    numbers = defaultdict[str, int](count().__next__)
    index = np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))
    return list(numbers), index


_role, _stages, _late_ns = attrgetter("role"), attrgetter("stages"), attrgetter("late_ns")
