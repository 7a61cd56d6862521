"""The trajectories of a step, and their spans as columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from verl_profiling.files.trajectory_log import (
    NO_SPAN,
    Block,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)
from verl_profiling.manifest import Manifest, Request
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.requests import joined, requests_by_id
from verl_profiling.steps.step import Source
from verl_profiling.steps.trajectory_spans import blocker, column
from verl_profiling.units import shortened

OTHERS = "(all others)"
"""Common name of the spans whose names come after the first hundred causes."""

TO_THE_ENGINE, FROM_THE_ENGINE = "to the engine", "from the engine"
REQUEST_PARTS = (
    TO_THE_ENGINE,
    "queued",
    "first token",
    "prefill",
    "generate",
    "decode",
    FROM_THE_ENGINE,
)
"""Causes of a request's time, named as in :meth:`~verl_profiling.manifest.Request.parts`."""
GENERATE, LOOP_LAG, OWN_CODE, UNEXPLAINED = "generate", "loop lag", "own code", "unexplained"
BEFORE = "began before the capture"
_CAUSES = (*REQUEST_PARTS, LOOP_LAG, OWN_CODE, BEFORE, UNEXPLAINED)
"""Fixed causes of a trajectory's time; all other causes are names of spans."""
CAUSE_NUMBERS = {name: number for number, name in enumerate(_CAUSES)}
_RESERVED = {*_CAUSES} - {GENERATE}
_WITH_ERROR = ("failed", "cancelled")
_MOST_NAMES = 100  # of causes, because names of spans may contain ids


class Trajectory(NamedTuple):
    """The recorded part of one trajectory in the step.

    Attributes:
        lane: Lane of the process.
        said: Record of the trajectory in the log, on the clock of its process.
        begin_ns: Begin of the recorded part, on the controller's clock.
        end_ns: End of the recorded part, on the controller's clock.
        since_ns: Begin of the whole trajectory, on the controller's clock.
        cut_end: Whether the trajectory ended after the step or the recording.
        loop: Number of the event loop that ran it, counted over all processes, or -1.
        unseen_begin: Whether the trajectory began before the recording, so that spans may be
            missing.
        whole_log: Whether the process's log has all spans, so that time outside spans is ``own
            code``.
        failed_in: Span in which the trajectory failed; empty outside spans, ``None`` without an
            error.
    """

    lane: str
    said: TrajectoryRecord
    begin_ns: int
    end_ns: int
    since_ns: int
    cut_end: bool
    loop: int
    unseen_begin: bool
    whole_log: bool
    failed_in: str | None

    @property
    def took_ns(self) -> int:
        """Duration of the recorded part."""
        return self.end_ns - self.begin_ns

    @property
    def cut_begin(self) -> bool:
        """Whether the trajectory began before the recording or the step."""
        return self.since_ns < self.begin_ns

    @property
    def validate(self) -> bool:
        """Whether the trajectory belongs to a validation rollout."""
        return self.said.facts.get("validate") is True

    @property
    def status(self) -> str:
        """Final status of the trajectory."""
        return shortened(self.said.status)

    def number(self, fact: str) -> int | None:
        """Return a fact that the loop gave the trajectory, e.g. ``turns``, if it is an integer."""
        value = self.said.facts.get(fact)
        return value if type(value) is int else None


class SpanTable(NamedTuple):
    """Spans as columns, sorted by begin within each process; times are clipped to the trajectory.

    Attributes:
        trajectory: Index in :attr:`Records.trajectories`, or -1 for spans outside trajectories.
        process: Index in :attr:`Records.roles`.
        name: Index in :attr:`Records.names`.
        begin: Begin (unix ns).
        end: End (unix ns).
        loop: Number of the event loop, or -1.
        failed: 1 if the span raised.
        open: 1 if the span continued after ``end``, because it was open in the log or ``end`` is
            clipped.
        since: Begin (unix ns) of the whole span, before ``begin`` if that is clipped.
        parent: Row of the innermost span that was open at the begin of the span, or -1.
        reach: End (unix ns) of the span, or of a span below it that ends later.
    """

    trajectory: Ints
    process: Ints
    name: Ints
    begin: Ints
    end: Ints
    loop: Ints
    failed: Ints
    open: Ints
    since: Ints
    parent: Ints
    reach: Ints


class Blocks(NamedTuple):
    """Intervals in which one task blocked its event loop, as columns.

    Attributes:
        loop: Number of the event loop.
        begin: Begin (unix ns).
        end: End (unix ns).
        span: Row in :attr:`Records.spans` of the span whose task blocked the loop, or -1.
        what: Index in :attr:`Records.blockers` of the code that blocked the loop.
    """

    loop: Ints
    begin: Ints
    end: Ints
    span: Ints
    what: Ints


class Records:
    """The recorded trajectories of a step.

    Args:
        logs: One log per process with its source. Ids are unique in a log, and each parent is in
            it.
        begin_ns: Begin of the step (unix ns, controller's clock).
        end_ns: End of the step (unix ns, controller's clock).

    Attributes:
        roles: Role of each process.
        trajectories: The trajectories.
        names: Causes of a trajectory's time: fixed causes, then names of spans.
        spans: Spans of the trajectories, and spans outside trajectories.
        requests: The engine's request id, by row in ``spans`` of the span that sent the request.
        blocks: Intervals in which event loops were blocked.
        blockers: Code that blocked event loops, as ``(lane, span, function)``. Outside spans, the
            function or ``unknown`` is in the span's place. Of a span's functions, it is the one
            that blocked longest.
    """

    def __init__(
        self, logs: Iterable[tuple[Source, TrajectoryLog]], begin_ns: int, end_ns: int
    ) -> None:
        self.roles: list[str] = []
        self.trajectories: list[Trajectory] = []
        self.requests: dict[int, str] = {}
        self._names = dict(CAUSE_NUMBERS)
        self._blockers: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
        self._spans: list[Ints] = [np.empty((11, 0), np.int64)]
        self._rows = 0
        self._blocks: list[Ints] = [np.empty((0, 5), np.int64)]
        self._loops = 0
        for source, log in logs:
            first_ns, last_ns = log.begin_ns - source.offset_ns, log.end_ns - source.offset_ns
            window = (max(begin_ns, first_ns), min(end_ns, last_ns))
            if window[1] > window[0]:
                self._add(source, log, window)
        self.spans, self.names = SpanTable(*np.concatenate(self._spans, axis=1)), list(self._names)
        self.blocks = Blocks(*np.concatenate(self._blocks).T)
        self.blockers = [
            (*key, most.most_common(1)[0][0]) for key, (_, most) in self._blockers.items()
        ]

    def _add(self, source: Source, log: TrajectoryLog, window: tuple[int, int]) -> None:
        """Add the records of a log that overlap the window in which the step was recorded."""
        self._offset, self._window = source.offset_ns, window
        self._first = len(self.trajectories)
        self._loop_of = {loop.id: self._loops + index for index, loop in enumerate(log.loops)}
        self._loops += len(log.loops)
        self.roles.append(source.role)
        numbers: dict[int, int] = {NO_SPAN: NO_SPAN}
        failed_in = _failed_in(log)
        for record in log.trajectories:
            first, last = self._clipped(record)
            if first <= last:
                numbers[record.id] = len(self.trajectories)
                part = Trajectory(
                    lane=source.lane,
                    said=record,
                    begin_ns=first,
                    end_ns=last,
                    since_ns=record.begin_ns - self._offset,
                    cut_end=last < record.end_ns - self._offset or record.status == "running",
                    loop=self._loop_of.get(record.loop, NO_SPAN),
                    unseen_begin=record.begin_ns < log.begin_ns,
                    whole_log=not (log.cut or log.spans_left_out),
                    failed_in=failed_in.get(record.id),
                )
                self.trajectories.append(part)
        self._add_blocks(source.lane, log, self._add_spans(log, numbers))

    def _clipped(self, record: TrajectoryRecord | Block) -> tuple[int, int]:
        """Return a record's begin and end on the controller's clock, clipped to the window."""
        first_ns, last_ns = self._window
        begin_ns = max(record.begin_ns - self._offset, first_ns)
        return begin_ns, min(record.end_ns - self._offset, last_ns)

    def _add_spans(self, log: TrajectoryLog, numbers: dict[int, int]) -> dict[int, int]:
        """Add the spans of a log that overlap the step.

        Args:
            log: The log.
            numbers: Index of each trajectory in ``trajectories``, by its id in the log.

        Returns:
            Row in ``spans`` of each added span, by the span's id in the log.
        """
        spans = [span for span in log.spans if span.trajectory in numbers]
        order = np.lexsort((column(spans, "id"), column(spans, "begin_ns")))
        if (order[1:] < order[:-1]).any():
            spans = [spans[place] for place in order.tolist()]
        owner = _numbers(spans, "trajectory", numbers)
        since = column(spans, "begin_ns") - self._offset
        until = column(spans, "end_ns") - self._offset
        trajectories = self.trajectories[self._first :]
        first = np.append(column(trajectories, "begin_ns"), self._window[0])
        last = np.append(column(trajectories, "end_ns"), self._window[1])
        place = np.maximum(owner - self._first, NO_SPAN)  # the window is last
        begin, end = np.maximum(since, first[place]), np.minimum(until, last[place])
        is_kept = begin <= end
        around = _open_around(spans, begin, np.where(is_kept, end, begin - 1))
        kept = np.flatnonzero(is_kept)
        row = np.append(np.cumsum(is_kept) - 1, NO_SPAN)
        parent = row[around[kept]]
        goes_on = column(spans, "open").astype(bool) | (until > end)
        columns = (
            owner,
            np.full(len(spans), len(self.roles) - 1),
            self._causes(spans, kept),
            begin,
            end,
            _numbers(spans, "loop", defaultdict(lambda: NO_SPAN, self._loop_of)),
            column(spans, "failed"),
            goes_on,
            np.minimum(since, begin),
        )
        table = np.stack([values[kept] for values in columns])
        requests = [span.request for span in spans]
        for number in filter(requests.__getitem__, kept.tolist()):
            self.requests[self._rows + int(row[number])] = requests[number]
        reach = _reach(parent, end[kept])
        parent[parent != NO_SPAN] += self._rows
        self._spans.append(np.concatenate((table, [parent, reach])))
        before, self._rows = self._rows, self._rows + len(kept)
        if not log.blocks:
            return {}
        return {spans[number].id: row for row, number in enumerate(kept.tolist(), before)}

    def _causes(self, spans: Sequence[SpanRecord], kept: Ints) -> Ints:
        """Return the number of each span's cause, which is a new one for a new name."""
        codes = defaultdict[str, int](count().__next__)
        code = _numbers(spans, "name", codes)
        names, causes = list(codes), np.zeros(len(codes), np.int64)
        for value in dict.fromkeys(code[kept].tolist()):
            name = shortened(names[value])
            if names[value] in _RESERVED:
                name = f"span {name}"
            if name not in self._names and len(self._names) >= _MOST_NAMES:
                name = OTHERS
            causes[value] = self._names.setdefault(name, len(self._names))
        return causes[code]

    def _add_blocks(self, lane: str, log: TrajectoryLog, row_of: dict[int, int]) -> None:
        rows = []
        names = {}
        if log.blocks:
            names = {span.id: span.name for span in log.spans}
        for block in log.blocks:
            begin, end = self._clipped(block)
            if end > begin and block.loop in self._loop_of:
                key = (lane, shortened(blocker(block, names)))
                number, functions = self._blockers.setdefault(key, (len(self._blockers), Counter()))
                functions[shortened(block.function)] += end - begin
                span = row_of.get(block.span, NO_SPAN)
                rows.append((self._loop_of[block.loop], begin, end, span, number))
        self._blocks.append(np.array(rows, dtype=np.int64).reshape(-1, 5))


def _numbers(spans: Sequence[SpanRecord], name: str, number_of: Mapping[Any, int]) -> Ints:
    """Return the number of a value of each span."""
    values = map(attrgetter(name), spans)
    return np.fromiter(map(number_of.__getitem__, values), np.int64, len(spans))


def _open_around(spans: Sequence[SpanRecord], begin: Ints, end: Ints) -> Ints:
    """Return for each span the index of the innermost span around it that is open at its begin, or
    -1.

    Args:
        spans: The spans by begin. A parent that begins later counts as none.
        begin: Begin of each span, as far as recorded (ns).
        end: End of each span (ns); before ``begin`` for a span that is left out.
    """
    id, parent = column(spans, "id"), column(spans, "parent")
    order = np.argsort(id)
    place = np.searchsorted(id, parent, sorter=order).clip(max=max(len(id) - 1, 0))
    around: Ints = order[place] if len(id) else place
    rows = np.arange(len(id))
    parents = np.where((id[around] == parent) & (around < rows), around, NO_SPAN)
    around = parents.copy()
    closed = rows
    while len(closed):
        closed = closed[around[closed] != NO_SPAN]
        inner = around[closed]
        closed = closed[(end[inner] <= begin[closed]) | (end[inner] < begin[inner])]
        around[closed] = parents[around[closed]]
    return around


def _reach(parent: Ints, end: Ints) -> Ints:
    """Return the end of each span, or of a span below it that ends later.

    Args:
        parent: Row of the span around each span, which is an earlier row, or -1.
        end: End of each span (ns).
    """
    reach: Ints = end.copy()
    depth = np.zeros(len(end), np.int64)
    inner = np.flatnonzero(parent != NO_SPAN)
    around = parent[inner]
    while len(inner):
        depth[inner] += 1
        is_deeper = parent[around] != NO_SPAN
        inner, around = inner[is_deeper], parent[around[is_deeper]]
    for level in range(depth.max(initial=0), 0, -1):
        rows = np.flatnonzero(depth == level)
        np.maximum.at(reach, parent[rows], reach[rows])
    return reach


def _failed_in(log: TrajectoryLog) -> dict[int, str]:
    """Return the name of the span in which each failed trajectory failed, by the trajectory's id.

    It is the last span that raised, else the last unfinished span; empty without such a span.
    """
    last: dict[int, SpanRecord | None] = {}
    for trajectory in log.trajectories:
        if trajectory.error and trajectory.status in _WITH_ERROR:
            last[trajectory.id] = None
    if last:
        for span in log.spans:
            if span.trajectory in last and (span.failed or span.open or span.status):
                latest = attrgetter("failed", "begin_ns", "id")
                last[span.trajectory] = max(last[span.trajectory] or span, span, key=latest)
    return {id: shortened(span.name) if span else "" for id, span in last.items()}


def requests_of(records: Records, manifest: Manifest) -> dict[int, Request]:
    """Return the engine's request of each ``generate`` span, by row in :attr:`Records.spans`."""
    spans = records.spans
    generates = (
        (number, id, int(spans.begin[number]), int(spans.end[number]))
        for number, id in records.requests.items()
        if records.names[spans.name[number]] == GENERATE
    )
    return joined(generates, requests_by_id(manifest.workers))
