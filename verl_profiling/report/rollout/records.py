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
"""Name of what blocked an event loop where no sample saw it."""
OTHERS = "(all others)"
"""What is behind the rows that are shown."""

_LONGEST = 120
_WITH_ERROR = ("failed", "cancelled")


class Trajectory(NamedTuple):
    """One trajectory, as far as it was recorded in the step.

    Attributes:
        said: Its record, in the time of its process.
        begin_ns: Begin of what was recorded of it.
        end_ns: End of what was recorded of it.
        cut_begin: It began before it was recorded, or before the step.
        cut_end: It ended after the step, or was still running when recording ended.
        loop: Number of its event loop among those of all processes, or -1.
        unseen_begin: It began before its process recorded, so that it may have been in a span by then.
        whole_log: All spans of its process were kept, so that time without one is its own code.
        failed_in: Name of the span that it failed in, if it did, has an error, and was in one.
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
        """Whether it is of a validation rollout."""
        return self.said.facts.get("validate") is True

    @property
    def status(self) -> str:
        """The status of the trajectory in the end."""
        return short_name(self.said.status)

    def number(self, fact: str) -> int | None:
        """Return a fact that is a whole number."""
        value = self.said.facts.get(fact)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
            return value
        return None


class SpanTable(NamedTuple):
    """Spans as columns, in order of their begin for each process; times are clipped to the trajectory.

    Attributes:
        trajectory: Number of the trajectory, or -1 for spans of a process.
        process: Number of the process.
        name: Number of the name.
        begin: Begin (ns).
        end: End (ns).
        parent: Number of the span around it, or -1.
        loop: Number of the event loop, or -1.
        failed: 1 where an exception left it.
        open: 1 where it went on after the end that it has here.
        requests: The engine's id of the request, of the spans that have one.
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
    """Whiles in which one task did not let its event loop go on, as columns.

    Attributes:
        loop: Number of the event loop.
        begin: Begin (ns).
        end: End (ns).
        trajectory: Number of the trajectory whose task it was, or -1.
        what: Number, in ``named``, of what ran.
        named: Lane, span (or else function, or ``unknown``), and the function that blocked for longest.
    """

    loop: Ints
    begin: Ints
    end: Ints
    trajectory: Ints
    what: Ints
    named: list[tuple[str, str, str]]


class Records(NamedTuple):
    """All that was recorded of trajectories in a step.

    Attributes:
        processes: Lane and role of each process.
        trajectories: The trajectories.
        names: Names of spans.
        spans: Their spans, and those of processes.
        blocks: When event loops were blocked.
    """

    processes: list[tuple[str, str]]
    trajectories: list[Trajectory]
    names: list[str]
    spans: SpanTable
    blocks: Blocks


def read_records(logs: Iterable[tuple[Source, TrajectoryLog]], begin_ns: int, end_ns: int) -> Records:
    """Return what is in logs from the begin of a step to its end.

    Args:
        logs: The logs, in which no number repeats and every parent is there, each with its source.
        begin_ns: Begin of the step.
        end_ns: End of the step.
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
    """The columns while logs are read, one after the other."""

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
        """Add what is in a window of a log."""
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
        """Return what is in a window of the time of a record."""
        return max(record.begin_ns - self._offset, window[0]), min(record.end_ns - self._offset, window[1])

    def _add_spans(self, log: TrajectoryLog, numbers: dict[int, int]) -> dict[int, int]:
        """Add the spans of a log; return the number of the trajectory of each of those that are kept."""
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
    """Return the span that each failed trajectory was in: what raised last, else what was still open."""
    inner: dict[int, SpanRecord | None] = {
        one.id: None for one in log.trajectories if one.error and one.status in _WITH_ERROR
    }
    for span in log.spans if inner else []:
        if (span.failed or span.open) and span.trajectory in inner:
            known = inner[span.trajectory] or span
            inner[span.trajectory] = max(known, span, key=lambda one: (one.failed, one.begin_ns, one.id))
    return {id: short_name(span.name) if span else "" for id, span in inner.items()}


def short_name(name: str) -> str:
    """Return a name of at most 120 characters, so that no log makes a page of any size."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
