"""The trajectories of all processes, as columns, on the controller's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from verl_profiling.report.intervals import Ints
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import NO_SPAN, Block, SpanRecord, TrajectoryLog, TrajectoryRecord

UNKNOWN = "unknown"
"""Name of a block for which there is no stack sample."""
OTHERS = "(all others)"
"""Name of the row that adds up all rows not shown."""

_LONGEST = 120
_WITH_ERROR = ("failed", "cancelled")


class Trajectory(NamedTuple):
    """The part of one trajectory that was recorded in the step.

    Attributes:
        said: Record of the trajectory, on the clock of its process.
        begin_ns: Begin of the recorded part, on the controller's clock.
        end_ns: End of the recorded part, on the controller's clock.
        cut_begin: Whether the trajectory began before the recording or the step.
        cut_end: Whether the trajectory ended after the step, or still ran when the recording ended.
        loop: Number of the event loop, counted over all processes, or -1.
        unseen_begin: Whether the trajectory began before the recording; a span of it may be unrecorded.
        whole_log: Whether the process's log has all spans. If so, time outside any span is ``own code``.
        failed_in: Span in which the trajectory failed; empty if in no span, ``None`` if it has no error.
    """

    said: TrajectoryRecord
    begin_ns: int
    end_ns: int
    cut_begin: bool
    cut_end: bool
    loop: int
    unseen_begin: bool
    whole_log: bool
    failed_in: str | None

    @property
    def validate(self) -> bool:
        """Whether the trajectory belongs to a validation rollout."""
        return self.said.facts.get("validate") is True

    @property
    def status(self) -> str:
        """Final status of the trajectory."""
        return short_name(self.said.status)

    def number(self, fact: str) -> int | None:
        """Return a fact of the trajectory if it is an integer, else ``None``."""
        value = self.said.facts.get(fact)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
            return value
        return None


class SpanTable(NamedTuple):
    """Spans as columns, sorted by begin within each process; times are clipped to the trajectory.

    Attributes:
        trajectory: Number of the trajectory, or -1 for spans outside trajectories.
        process: Index in :attr:`Records.processes`.
        name: Index in :attr:`Records.names`.
        begin: Begin (unix ns).
        end: End (unix ns).
        parent: Number of the enclosing span, or -1.
        loop: Number of the event loop, or -1.
        failed: 1 if an exception left the span.
        open: 1 if the span went on after ``end``: it was still open in the log, or ``end`` is clipped.
        requests: The engine's request id, by the number of the span that made the request.
    """

    trajectory: Ints
    process: Ints
    name: Ints
    begin: Ints
    end: Ints
    parent: Ints
    loop: Ints
    failed: Ints
    open: Ints
    requests: dict[int, str]


class Blocks(NamedTuple):
    """Intervals in which one task blocked its event loop, as columns.

    Attributes:
        loop: Number of the event loop.
        begin: Begin (unix ns).
        end: End (unix ns).
        trajectory: Number of the trajectory whose task blocked the loop, or -1.
        what: Index in ``named`` of the blocking span.
        named: (lane, span, function). Without a span, its place has the function, else ``unknown``. Of
            several functions in one span, it is the one that blocked longest.
    """

    loop: Ints
    begin: Ints
    end: Ints
    trajectory: Ints
    what: Ints
    named: list[tuple[str, str, str]]


class Records(NamedTuple):
    """The recorded trajectories of a step.

    Attributes:
        processes: Lane and role of each process.
        trajectories: The trajectories.
        names: Names of spans.
        spans: Spans of the trajectories, and spans outside trajectories.
        blocks: Intervals in which event loops were blocked.
    """

    processes: list[tuple[str, str]]
    trajectories: list[Trajectory]
    names: list[str]
    spans: SpanTable
    blocks: Blocks


def read_records(logs: Iterable[tuple[Source, TrajectoryLog]], begin_ns: int, end_ns: int) -> Records:
    """Return the trajectories, spans and blocks of a step.

    Args:
        logs: One log per process with its source. Ids are unique in a log, and each parent is in it.
        begin_ns: Begin of the step (unix ns, controller's clock).
        end_ns: End of the step (unix ns, controller's clock).
    """
    found = _Gathered()
    for source, log in logs:
        window = (max(begin_ns, log.begin_ns - source.offset_ns), min(end_ns, log.end_ns - source.offset_ns))
        if window[1] > window[0]:
            found.add(source, log, window)
    spans, blocks = (np.concatenate(parts).T for parts in (found.spans, found.blocks))
    named = [(*key, most.most_common(1)[0][0]) for key, (_, most) in found.blockers.items()]
    return Records(
        found.processes,
        found.trajectories,
        list(found.names),
        SpanTable._make((*spans, found.requests)),
        Blocks._make((*blocks, named)),
    )


class _Gathered:
    """Collects the columns of :class:`Records`, log by log."""

    def __init__(self) -> None:
        self.processes: list[tuple[str, str]] = []
        self.trajectories: list[Trajectory] = []
        self.names: dict[str, int] = {}
        self.blockers: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
        self.spans: list[Ints] = [np.empty((0, 9), np.int64)]
        self.blocks: list[Ints] = [np.empty((0, 5), np.int64)]
        self.requests: dict[int, str] = {}
        self._count = self._loops = 0

    def add(self, source: Source, log: TrajectoryLog, window: tuple[int, int]) -> None:
        """Add the records of a log that overlap a window."""
        self._offset, self._window = source.offset_ns, window
        self._loop_of = {loop.id: self._loops + index for index, loop in enumerate(log.loops)}
        self._loops += len(log.loops)
        self.processes.append((source.lane, source.role))
        numbers: dict[int, int] = {NO_SPAN: NO_SPAN}
        failed_in = _failed_in(log)
        for record in log.trajectories:
            first, last = self._clipped(record, window)
            if first <= last:
                numbers[record.id] = len(self.trajectories)
                found = Trajectory(
                    said=record,
                    begin_ns=first,
                    end_ns=last,
                    cut_begin=first > record.begin_ns - self._offset,
                    cut_end=last < record.end_ns - self._offset or record.status == "running",
                    loop=self._loop_of.get(record.loop, NO_SPAN),
                    unseen_begin=record.begin_ns < log.begin_ns,
                    whole_log=not (log.cut or log.spans_left_out),
                    failed_in=failed_in.get(record.id),
                )
                self.trajectories.append(found)
        self._add_blocks(source.lane, log, self._add_spans(log, numbers))

    def _clipped(
        self, record: TrajectoryRecord | SpanRecord | Block, window: tuple[int, int]
    ) -> tuple[int, int]:
        """Return a record's begin and end on the controller's clock, clipped to a window."""
        return max(record.begin_ns - self._offset, window[0]), min(record.end_ns - self._offset, window[1])

    def _add_spans(self, log: TrajectoryLog, numbers: dict[int, int]) -> dict[int, int]:
        """Add the spans of a log; return the trajectory number of each kept span, by span id."""
        rows: list[tuple[int, ...]] = []
        kept: dict[int, int] = {NO_SPAN: NO_SPAN}
        owners: dict[int, int] = {}
        for span in sorted(log.spans, key=lambda span: (span.begin_ns, span.id)):
            number = numbers.get(span.trajectory)
            if number is None:
                continue
            own = self.trajectories[number] if number != NO_SPAN else None
            begin, end = self._clipped(span, (own.begin_ns, own.end_ns) if own else self._window)
            around = kept.get(span.parent, NO_SPAN)
            if end < begin:
                kept[span.id] = around
                continue
            row = kept[span.id] = self._count + len(rows)
            owners[span.id] = number
            if span.request:
                self.requests[row] = span.request
            name = self.names.setdefault(short_name(span.name), len(self.names))
            loop, goes_on = (
                self._loop_of.get(span.loop, NO_SPAN),
                span.open or span.end_ns - self._offset > end,
            )
            process = len(self.processes) - 1
            rows.append((number, process, name, begin, end, around, loop, span.failed, goes_on))
        self.spans.append(np.array(rows, dtype=np.int64).reshape(-1, 9))
        self._count += len(rows)
        return owners

    def _add_blocks(self, lane: str, log: TrajectoryLog, owners: dict[int, int]) -> None:
        blocking = {block.span for block in log.blocks}
        names = {span.id: span.name for span in log.spans if span.id in blocking}
        rows = []
        for block in log.blocks:
            begin, end = self._clipped(block, self._window)
            if end <= begin or block.loop not in self._loop_of:
                continue
            who = (names.get(block.span) or block.function) if block.function else UNKNOWN
            key = (lane, short_name(who))
            number, functions = self.blockers.setdefault(key, (len(self.blockers), Counter()))
            functions[short_name(block.function)] += end - begin
            rows.append((self._loop_of[block.loop], begin, end, owners.get(block.span, NO_SPAN), number))
        self.blocks.append(np.array(rows, dtype=np.int64).reshape(-1, 5))


def _failed_in(log: TrajectoryLog) -> dict[int, str]:
    """Return the span in which each trajectory failed: the last one that raised, else the last open one."""
    inner: dict[int, SpanRecord | None] = {
        one.id: None for one in log.trajectories if one.error and one.status in _WITH_ERROR
    }
    for span in log.spans if inner else []:
        if (span.failed or span.open) and span.trajectory in inner:
            known = inner[span.trajectory] or span
            inner[span.trajectory] = max(known, span, key=lambda one: (one.failed, one.begin_ns, one.id))
    return {id: short_name(span.name) if span else "" for id, span in inner.items()}


def short_name(name: str) -> str:
    """Return a name cut to 120 characters, which bounds the size of the report's page."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
