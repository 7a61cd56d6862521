"""Writes a log of trajectories as a member of the timeline: a process beside its worker's.

The log is read twice: for the numbers that say what is on which row, and for the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import numpy as np

from verl_profiling.timeline.log_layout import Numbers, lay_out
from verl_profiling.timeline.log_reader import LogReader
from verl_profiling.timeline.log_shape import Ints, Mask, shape_of
from verl_profiling.timeline.member import ID_STRIDE, LogJob, Member, MemberFile
from verl_profiling.timeline.processes import TRAJECTORIES_PID, name_process, name_row
from verl_profiling.timeline.requests import Arrow, span_of_each
from verl_profiling.timeline.trace import Event
from verl_profiling.timeline.trajectory_events import RecordEvents
from verl_profiling.trajectory_log import (
    Block,
    Counted,
    Lag,
    LoopRecord,
    SpanRecord,
    TrajectoryRecord,
    open_log,
)

__all__ = ["write_log_member"]


def write_log_member(job: LogJob) -> Member:
    """Write one log as a gzip member of events, with a comma before each.

    Raises:
        TraceFormatError: The log cannot be read at all.
        OSError: The member cannot be written.
    """
    log = _Log(job)
    pid = job.pid + TRAJECTORIES_PID
    layout = log.layout
    rows = (event for row, name in enumerate(layout.names) for event in name_row(pid, row, name))
    with MemberFile(job.output) as file:
        names = chain(name_process(pid, f"{job.title} trajectories"), rows)
        written = file.write_all(chain(names, log.slices(pid), log.running(pid)))
    return Member(
        path=job.source.path,
        events=written,
        left_out=layout.left_out,
        problems=log.problems(),
        arrows=[arrow for leaving in log.arrows.values() for arrow in leaving],
    )


class _Log:
    """A log that was read once.

    Attributes:
        layout: The row of each record.
        arrows: What leads from its spans to requests, by the place of the span.
    """

    def __init__(self, job: LogJob) -> None:
        self._job = job
        self._shift_ns = job.base_ns + job.source.offset_ns
        self._numbers = Numbers()
        self._loops: dict[int, str] = {}
        asking: dict[str, list[int]] = {}
        spans = 0
        reader = LogReader(job.source.path, job.limits)
        for line in reader:
            self._numbers.take(line)
            if isinstance(line, SpanRecord):
                if line.request in job.requests:
                    asking.setdefault(line.request, []).append(spans)
                spans += 1
            elif isinstance(line, LoopRecord):
                self._loops.setdefault(line.id, line.name)
        self._problems = reader.problems
        self._lines = reader.lines
        self._shape = shape_of(self._numbers.trajectories, self._numbers.spans)
        self.layout = lay_out(self._numbers, self._shape, self._is_wanted, self._loop)
        self.arrows = self._arrows_of(asking)

    def problems(self) -> list[str]:
        """Return what could not be read or is not shown, as sentences."""
        ends = np.concatenate((self._numbers.trajectories[:, 2], self._numbers.spans[:, 4]))
        early = int((ends < self._shift_ns).sum())
        counts = (
            (early, "not shown, because they ended long before the step began"),
            (self.layout.crowded, "not shown, because too many others are beside them"),
        )
        said = [f"{what}: {count:,}" for count, what in counts if count]
        return [*self._problems, *self._shape.problems, *said]

    def slices(self, pid: int) -> Iterator[Event]:
        """Yield the events of the records that are shown, as the log is read again."""
        make = RecordEvents(pid, self._shift_ns)
        rows_of_trajectories, rows_of_spans, rows_of_blocks = (
            iter(rows) for rows in (self.layout.trajectories, self.layout.spans, self.layout.blocks)
        )
        blocking = dict.fromkeys(self._numbers.blocks[:, 1].tolist(), "")
        place = -1
        for line in islice(open_log(self._job.source.path)[1], self._lines):
            match line:
                case SpanRecord():
                    place += 1
                    row = next(rows_of_spans)
                    if line.id in blocking:
                        blocking[line.id] = line.name
                    if row >= 0:
                        yield make.span(line, int(row) + 1)
                        for arrow in self.arrows.get(place, ()):
                            yield make.arrow(line, int(row) + 1, arrow.id)
                case TrajectoryRecord():
                    row = next(rows_of_trajectories)
                    if row >= 0:
                        fate = self._job.fates.of_trajectory(line)
                        yield make.trajectory(line, fate, int(row) + 1)
                case Block():
                    row = next(rows_of_blocks)
                    if row >= 0:
                        yield make.block(line, blocking[line.span], int(row) + 1)
                case Lag():
                    late = make.lag(line, self._loop(line.loop))
                    yield from self._job.keep.select(late, self._job.base_ns)
                case Counted():
                    yield from self._job.keep.select([make.count(line)], self._job.base_ns)

    def running(self, pid: int) -> Iterator[Event]:
        """Yield how many trajectories were running, whenever that changed."""
        make = RecordEvents(pid, self._shift_ns)
        standing = self._numbers.trajectories[self._shape.trajectories]
        begins, ends = np.sort(standing[:, 1]), np.sort(standing[:, 2])
        changes = np.unique(np.concatenate((begins, ends)))
        running = np.searchsorted(begins, changes, "right") - np.searchsorted(ends, changes, "right")
        for at_ns, count in zip(changes.tolist(), running.tolist(), strict=True):
            yield from self._job.keep.select([make.running(at_ns, count)], self._job.base_ns)

    def _is_wanted(self, begins: Ints, ends: Ints) -> Mask:
        keep, offset_ns = self._job.keep, self._job.source.offset_ns
        wanted = (ends >= self._shift_ns) & (ends - begins >= keep.min_us * 1000)
        if keep.windows_ns:
            during = (
                (begins - offset_ns < end) & (ends - offset_ns >= begin) for begin, end in keep.windows_ns
            )
            wanted &= np.logical_or.reduce(list(during))
        return wanted

    def _loop(self, number: int) -> str:
        """Return the name of an event loop: that of its thread, with its number where two have the same."""
        name = self._loops.get(number, "")
        alike = sum(other == name for other in self._loops.values())
        return f"loop {name}" if name and alike == 1 else f"loop {name} {number}".replace("  ", " ")

    def _arrows_of(self, asking: dict[str, list[int]]) -> dict[int, list[Arrow]]:
        """Return the arrows to the requests with these ids, by the place of the span that they leave."""
        spans, offset_ns = self._numbers.spans, self._job.source.offset_ns
        arrows: dict[int, list[Arrow]] = {}
        for request, places in asking.items():
            shown = [
                (int(spans[place, 3]) - offset_ns, int(spans[place, 4]) - offset_ns, place)
                for place in places
                if self.layout.spans[place] >= 0
            ]
            for window, place in span_of_each(self._job.requests[request], shown):
                number = self._job.index * ID_STRIDE + window.number
                from_ns = max(int(spans[place, 3]) - offset_ns, self._job.base_ns)
                arrows.setdefault(place, []).append(Arrow(number, window.number, from_ns))
        return arrows
