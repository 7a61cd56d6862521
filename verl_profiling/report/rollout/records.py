"""What processes recorded of trajectories, as columns, on the controller's clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_profiling.report.rollout.axes import Ints
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import NO_SPAN, Fact, TrajectoryLog

__all__ = ["UNKNOWN", "Blocks", "Records", "SpanTable", "Trajectory", "read_records", "short_name"]

UNKNOWN = "unknown"
"""Name of what blocked an event loop where no sample saw it."""

_LONGEST = 120


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One trajectory, as far as it was recorded in the step.

    Attributes:
        lane: Lane of its process.
        group: Its group; empty without one.
        begin_ns: Begin of what was recorded of it.
        end_ns: End of what was recorded of it.
        cut_begin: It began before it was recorded, or before the step.
        cut_end: It ended after the step, or was still running when recording ended.
        fate: What became of it in the end.
        facts: What the loop said about it.
        loop: Number of its event loop among those of all processes, or -1.
        unseen_begin: It began before its process recorded, so that it may have been in a span by then.
        whole_log: All spans of its process were kept, so that time without one is its own code.
    """

    lane: str
    group: str
    begin_ns: int
    end_ns: int
    cut_begin: bool
    cut_end: bool
    fate: str
    facts: dict[str, Fact]
    loop: int
    unseen_begin: bool
    whole_log: bool

    @property
    def validate(self) -> bool:
        """Whether it is of a validation rollout."""
        return self.facts.get("validate") is True

    def count(self, fact: str) -> int | None:
        """Return a fact that is a whole number."""
        value = self.facts.get(fact)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
            return value
        return None


@dataclass(frozen=True, kw_only=True)
class SpanTable:
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


@dataclass(frozen=True, kw_only=True)
class Blocks:
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


@dataclass(frozen=True, kw_only=True)
class Records:
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
    gathered = _Gathered(begin_ns, end_ns)
    for source, log in logs:
        gathered.add(source, log)
    return gathered.records()


class _Gathered:
    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self._begin_ns, self._end_ns = begin_ns, end_ns
        self._processes: list[tuple[str, str]] = []
        self._trajectories: list[Trajectory] = []
        self._names: dict[str, int] = {}
        self._blockers: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
        self._spans: list[Ints] = []
        self._blocks: list[Ints] = []
        self._requests: dict[int, str] = {}
        self._count = self._loops = 0

    def add(self, source: Source, log: TrajectoryLog) -> None:
        offset = source.offset_ns
        window = (max(self._begin_ns, log.begin_ns - offset), min(self._end_ns, log.end_ns - offset))
        if window[1] <= window[0]:
            return
        self._processes.append((source.lane, source.role))
        loops = {loop.id: self._loops + index for index, loop in enumerate(log.loops)}
        self._loops += len(log.loops)
        numbers: dict[int, int | None] = {NO_SPAN: NO_SPAN}
        whole_log = not (log.cut or log.spans_left_out)
        for record in log.trajectories:
            begin, end = (at - offset for at in (record.begin_ns, record.end_ns))
            first, last = max(begin, window[0]), min(end, window[1])
            numbers[record.id] = len(self._trajectories) if first <= last else None
            if first <= last:
                found = Trajectory(
                    lane=source.lane,
                    group=record.group,
                    begin_ns=first,
                    end_ns=last,
                    cut_begin=first > begin,
                    cut_end=last < end or record.fate == "running",
                    fate=short_name(record.fate),
                    facts=record.facts,
                    loop=loops.get(record.loop, NO_SPAN),
                    unseen_begin=record.begin_ns < log.begin_ns,
                    whole_log=whole_log,
                )
                self._trajectories.append(found)
        owners = self._add_spans(log, offset, window, numbers, loops)
        self._add_blocks(source, log, window, owners, loops)

    def _add_spans(
        self,
        log: TrajectoryLog,
        offset: int,
        window: tuple[int, int],
        numbers: dict[int, int | None],
        loops: dict[int, int],
    ) -> dict[int, int]:
        """Add the spans of a log; return the number of the trajectory of each of those that are kept."""
        rows: list[tuple[int, int, int, int, int, int, int, int, int]] = []
        kept: dict[int, int] = {NO_SPAN: NO_SPAN}
        owners: dict[int, int] = {}
        for span in sorted(log.spans, key=lambda span: (span.begin_ns, span.id)):
            number = numbers[span.trajectory]
            if number is None:
                continue
            low, high = window
            if number != NO_SPAN:
                low, high = self._trajectories[number].begin_ns, self._trajectories[number].end_ns
            begin, end = max(span.begin_ns - offset, low), min(span.end_ns - offset, high)
            if end < begin:
                kept[span.id] = kept.get(span.parent, NO_SPAN)
                continue
            row = self._count + len(rows)
            kept[span.id], owners[span.id] = row, number
            if span.request:
                self._requests[row] = span.request
            name = self._names.setdefault(short_name(span.name), len(self._names))
            around = kept.get(span.parent, NO_SPAN)
            loop = loops.get(span.loop, NO_SPAN)
            goes_on = span.open or span.end_ns - offset > end
            process = len(self._processes) - 1
            rows.append((number, process, name, begin, end, around, loop, span.failed, goes_on))
        self._spans.append(np.array(rows, dtype=np.int64).reshape(-1, len(_SPAN_COLUMNS)))
        self._count += len(rows)
        return owners

    def _add_blocks(
        self,
        source: Source,
        log: TrajectoryLog,
        window: tuple[int, int],
        owners: dict[int, int],
        loops: dict[int, int],
    ) -> None:
        blocking = {block.span for block in log.blocks}
        names = {span.id: span.name for span in log.spans if span.id in blocking}
        rows = []
        for block in log.blocks:
            begin = max(block.begin_ns - source.offset_ns, window[0])
            end = min(block.end_ns - source.offset_ns, window[1])
            if end <= begin or block.loop not in loops:
                continue
            who = (names.get(block.span) or block.function) if block.function else UNKNOWN
            key = (source.lane, short_name(who))
            number, functions = self._blockers.setdefault(key, (len(self._blockers), Counter()))
            functions[short_name(block.function)] += end - begin
            rows.append((loops[block.loop], begin, end, owners.get(block.span, NO_SPAN), number))
        self._blocks.append(np.array(rows, dtype=np.int64).reshape(-1, 5))

    def records(self) -> Records:
        spans = np.concatenate((np.empty((0, len(_SPAN_COLUMNS)), dtype=np.int64), *self._spans))
        blocks = np.concatenate((np.empty((0, 5), dtype=np.int64), *self._blocks))
        named = [(*key, most.most_common(1)[0][0]) for key, (_, most) in self._blockers.items()]
        columns = dict(zip(_SPAN_COLUMNS, spans.T, strict=True))
        return Records(
            processes=self._processes,
            trajectories=self._trajectories,
            names=list(self._names),
            spans=SpanTable(**columns, requests=self._requests),
            blocks=Blocks(**dict(zip(_BLOCK_COLUMNS, blocks.T, strict=True)), named=named),
        )


_SPAN_COLUMNS = ("trajectory", "process", "name", "begin", "end", "parent", "loop", "failed", "open")
_BLOCK_COLUMNS = ("loop", "begin", "end", "trajectory", "what")


def short_name(name: str) -> str:
    """Return a name of at most 120 characters, so that no log makes a page of any size."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
