"""The trajectories of all processes as columns, and their time divided into intervals with a cause.

Loop lag is the time for which a trajectory is delayed because another task blocks its event loop. A
block stops every task of the loop, but not work elsewhere: an engine goes on with its request, a
sandbox with its program. So a block counts as lag of a trajectory if

* the block is not by one of the trajectory's own spans,
* the engine does not process a request of the trajectory meanwhile, and
* the trajectory's wait ended in the block or within :data:`DRAIN_NS` after it, when the loop runs
  the tasks that became ready. A longer wait would not have ended sooner without the block.

The time at which a task became ready inside a block is not recorded. So the whole block counts as
lag, which is an upper bound, unless the engine's request ended inside the block.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.trajectory_log import (
    NO_SPAN,
    Block,
    SpanRecord,
    TrajectoryLog,
    TrajectoryRecord,
)
from verl_profiling.manifest import Request, StageSpan
from verl_profiling.slices.intervals import (
    EMPTY,
    Axes,
    Ints,
    Sharing,
    Spans,
    length,
    subtract,
    time_of,
    union,
    without,
)
from verl_profiling.steps.step import Source
from verl_profiling.units import shortened

UNKNOWN = "unknown"
"""Name of a block without a stack sample."""
OTHERS = "(all others)"
"""Common name of all spans beyond the first hundred names."""

TO_THE_ENGINE, FROM_THE_ENGINE = "to the engine", "from the engine"
_PARTS = (TO_THE_ENGINE, "queued", "first token", "prefill", "generate", "decode", FROM_THE_ENGINE)
"""Causes of a request's time, named as in :meth:`~verl_profiling.manifest.Request.parts`."""
GENERATE, LOOP_LAG, OWN_CODE, UNEXPLAINED = "generate", "loop lag", "own code", "unexplained"
BEFORE = "began before the capture"
_CAUSES = (*_PARTS, LOOP_LAG, OWN_CODE, BEFORE, UNEXPLAINED)
"""Causes other than span names."""
_JOINED = {
    GENERATE: ("first token", "queued", "prefill", "decode"),
    "first token": ("queued", "prefill"),
}
"""Causes of requests without an engine's statistics, each with the causes that it joins."""

_NUMBERS = {name: number for number, name in enumerate(_CAUSES)}
_RESERVED = {*_CAUSES} - {GENERATE}
_IN_ENGINE = range(1, len(_PARTS) - 1)
"""Numbers of the causes of requests in an engine, which no block of an event loop delays."""
_WITH_ERROR = ("failed", "cancelled")
_NO_TRAJECTORY = "requests of no trajectory"
_MOST_NAMES = 100  # of causes, if names of spans hold ids


def joined_causes(*sides: Collection[str]) -> dict[str, str]:
    """Return the cause that a cause of requests counts as, if a side has them joined only."""
    found: dict[str, str] = {}
    for whole, parts in _JOINED.items():
        if any(whole in names and parts[-1] not in names for names in sides):
            found = dict.fromkeys(parts, whole) | found
    return found


class Trajectory(NamedTuple):
    """The recorded part of one trajectory in the step.

    Attributes:
        lane: Lane of the process.
        said: Record of the trajectory, on the clock of its process.
        begin_ns: Begin of the recorded part, on the controller's clock.
        end_ns: End of the recorded part, on the controller's clock.
        cut_begin: Whether the trajectory began before the recording or the step.
        cut_end: Whether the trajectory ended after the step or the recording.
        loop: Number of the event loop, counted over all processes, or -1.
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
        return shortened(self.said.status)

    def number(self, fact: str) -> int | None:
        """Return a fact of the trajectory if it is an integer."""
        value = self.said.facts.get(fact)
        return value if type(value) is int else None


class SpanTable(NamedTuple):
    """Spans as columns, sorted by begin within each process; times are clipped to the trajectory.

    Attributes:
        trajectory: Number of the trajectory, or -1 for spans outside trajectories.
        process: Index in :attr:`Records.roles`.
        name: Index in :attr:`Records.names`.
        begin: Begin (unix ns).
        end: End (unix ns).
        loop: Number of the event loop, or -1.
        failed: 1 if the span raised.
        open: 1 if the span continued after ``end``, because it was open in the log or ``end`` is
            clipped.
        parent: Number of the innermost span that was open at the begin of the span, or -1.
        reach: End (unix ns) of the span, or of an inner span that ends later.
    """

    trajectory: Ints
    process: Ints
    name: Ints
    begin: Ints
    end: Ints
    loop: Ints
    failed: Ints
    open: Ints
    parent: Ints
    reach: Ints


class Blocks(NamedTuple):
    """Intervals in which one task blocked its event loop, as columns.

    Attributes:
        loop: Number of the event loop.
        begin: Begin (unix ns).
        end: End (unix ns).
        trajectory: Number of the trajectory whose task blocked the loop, or -1.
        what: Index in :attr:`Records.blockers`.
    """

    loop: Ints
    begin: Ints
    end: Ints
    trajectory: Ints
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
        requests: The engine's request id, by the number of the span that made the request.
        blocks: Intervals in which event loops were blocked.
        blockers: Blockers as ``(lane, span, function)``. Without a span, the function or
            ``unknown`` is in its place. Of several functions in one span, the longest blocker
            counts.
    """

    def __init__(
        self, logs: Iterable[tuple[Source, TrajectoryLog]], begin_ns: int, end_ns: int
    ) -> None:
        self.roles: list[str] = []
        self.trajectories: list[Trajectory] = []
        self.requests: dict[int, str] = {}
        self._names = dict(_NUMBERS)
        self._blockers: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
        self._spans: list[Ints] = [np.empty((0, 8), np.int64)]
        self._parents, self._ends, self._reach = array("q"), array("q"), array("q")
        self._blocks: list[Ints] = [np.empty((0, 5), np.int64)]
        self._loops = 0
        for source, log in logs:
            first_ns, last_ns = log.begin_ns - source.offset_ns, log.end_ns - source.offset_ns
            window = (max(begin_ns, first_ns), min(end_ns, last_ns))
            if window[1] > window[0]:
                self._add(source, log, window)
        columns = (*np.concatenate(self._spans).T, np.array(self._parents), np.array(self._reach))
        self.spans, self.names = SpanTable(*columns), list(self._names)
        self.blocks = Blocks(*np.concatenate(self._blocks).T)
        self.blockers = [
            (*key, most.most_common(1)[0][0]) for key, (_, most) in self._blockers.items()
        ]

    def _add(self, source: Source, log: TrajectoryLog, window: tuple[int, int]) -> None:
        """Add the records of a log that overlap a window."""
        self._offset, self._window = source.offset_ns, window
        self._loop_of = {loop.id: self._loops + index for index, loop in enumerate(log.loops)}
        self._loops += len(log.loops)
        self.roles.append(source.role)
        numbers: dict[int, int] = {NO_SPAN: NO_SPAN}
        failed_in = _failed_in(log)
        for record in log.trajectories:
            first, last = self._clipped(record, window)
            if first <= last:
                numbers[record.id] = len(self.trajectories)
                found = Trajectory(
                    lane=source.lane,
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
        return max(record.begin_ns - self._offset, window[0]), min(
            record.end_ns - self._offset, window[1]
        )

    def _add_spans(self, log: TrajectoryLog, numbers: dict[int, int]) -> dict[int, int]:
        """Add the spans of a log; return the trajectory number of each kept span, by span id."""
        rows: list[tuple[int, ...]] = []
        kept: dict[int, int] = {NO_SPAN: NO_SPAN}  # of a span that is not kept, the one around it
        owners: dict[int, int] = {}
        for span in sorted(log.spans, key=lambda span: (span.begin_ns, span.id)):
            number = numbers.get(span.trajectory)
            if number is None:
                continue
            own = self.trajectories[number] if number != NO_SPAN else None
            begin, end = self._clipped(span, (own.begin_ns, own.end_ns) if own else self._window)
            around = kept[span.id] = self._open_around(kept.get(span.parent, NO_SPAN), begin, end)
            if end < begin:
                continue
            row = kept[span.id] = len(self._ends)
            owners[span.id] = number
            if span.request:
                self.requests[row] = span.request
            name = f"span {span.name}" if span.name in _RESERVED else shortened(span.name)
            if name not in self._names and len(self._names) >= _MOST_NAMES:
                name = OTHERS
            self._parents.append(around)
            self._ends.append(end)
            self._reach.append(end)
            cause = self._names.setdefault(name, len(self._names))
            loop = self._loop_of.get(span.loop, NO_SPAN)
            goes_on = span.open or span.end_ns - self._offset > end
            rows.append(
                (number, len(self.roles) - 1, cause, begin, end, loop, span.failed, goes_on)
            )
        self._spans.append(np.array(rows, dtype=np.int64).reshape(-1, 8))
        return owners

    def _open_around(self, span: int, begin: int, end: int) -> int:
        """Return the innermost open span around an interval; the search begins at a given span."""
        while span != NO_SPAN and self._ends[span] <= begin:
            span = self._parents[span]
        around = span
        while around != NO_SPAN and self._reach[around] < end:
            self._reach[around] = end
            around = self._parents[around]
        return span

    def _add_blocks(self, lane: str, log: TrajectoryLog, owners: dict[int, int]) -> None:
        names = {span.id: span.name for span in log.spans} if log.blocks else {}
        rows = []
        for block in log.blocks:
            begin, end = self._clipped(block, self._window)
            if end > begin and block.loop in self._loop_of:
                who = (names.get(block.span) or block.function) if block.function else UNKNOWN
                key = (lane, shortened(who))
                number, functions = self._blockers.setdefault(key, (len(self._blockers), Counter()))
                functions[shortened(block.function)] += end - begin
                owner = owners.get(block.span, NO_SPAN)
                rows.append((self._loop_of[block.loop], begin, end, owner, number))
        self._blocks.append(np.array(rows, dtype=np.int64).reshape(-1, 5))


def _failed_in(log: TrajectoryLog) -> dict[int, str]:
    """Return the span of each failure: the last span that raised, else the last unfinished one."""
    inner: dict[int, SpanRecord | None] = {
        one.id: None for one in log.trajectories if one.error and one.status in _WITH_ERROR
    }
    for span in log.spans if inner else []:
        if (span.failed or span.open or span.status) and span.trajectory in inner:
            known = inner[span.trajectory] or span
            inner[span.trajectory] = max(
                known, span, key=lambda one: (one.failed, one.begin_ns, one.id)
            )
    return {id: shortened(span.name) if span else "" for id, span in inner.items()}


DRAIN_NS = 50_000_000
"""Time after a block in which the loop runs the tasks that became ready during the block."""

# blocks with gaps up to this are one block: other tasks run for a moment between
_TOGETHER_NS = 10_000_000


class Pieces(NamedTuple):
    """Intervals with one cause each, as columns. Overlapping intervals of one owner share the time
    equally.

    Attributes:
        owner: Number of the trajectory (or process).
        begin: Begin (unix ns).
        end: End (unix ns).
        cause: Index of the cause in ``causes``.
        loop: Number of the event loop, or -1.
        span: Number of the innermost span, or -1.
        causes: Names of the causes.
    """

    owner: Ints
    begin: Ints
    end: Ints
    cause: Ints
    loop: Ints
    span: Ints
    causes: Sequence[str]

    def of(self, rows: NDArray[Any], **others: Any) -> Pieces:
        """Return the intervals at the given indices, with other columns in place of some."""
        return Pieces._make((*(column[rows] for column in self[:-1]), self.causes))._replace(
            **others
        )

    def joined(self, *others: Pieces) -> Pieces:
        """Return the intervals with those of others behind them."""
        columns = zip(self[:-1], *(other[:-1] for other in others), strict=True)
        return Pieces._make((*map(np.concatenate, columns), self.causes))

    def seconds(self, took: NDArray[Any]) -> dict[str, float]:
        """Return the seconds of each cause as :func:`ranked` does,
        from the time of each interval (ns).
        """
        return ranked(
            self.causes, np.bincount(self.cause, weights=took, minlength=len(self.causes))
        )


def ranked(causes: Sequence[str], took: NDArray[Any]) -> dict[str, float]:
    """Return the seconds of causes by name, the largest first and ``unexplained`` last.

    Args:
        causes: Names of the causes.
        took: Times of the causes (ns); causes of less than a nanosecond are left out.
    """
    found = [
        (cause, ns / 1e9) for cause, ns in zip(causes, took.tolist(), strict=True) if ns >= 0.5
    ]
    return dict(sorted(found, key=lambda item: (item[0] == UNEXPLAINED, -item[1])))


def pieces_of(records: Records, served: Mapping[int, Request]) -> tuple[Pieces, Pieces]:
    """Divide the time of trajectories, and of processes outside trajectories, into intervals by
    cause.

    Each instant of a trajectory has a cause, the innermost open span, with these exceptions:

    * a ``generate`` span is divided by the parts of its request;
    * without an open span, ``own code``, or ``unexplained`` if the process's log is incomplete;
    * before the first span of a trajectory older than the recording, ``began before the capture``;
    * loop lag is cut out of all these intervals.

    Args:
        records: The recorded trajectories.
        served: The request of each span, by the span's number.
    """
    spans = records.spans
    inside = np.flatnonzero(spans.parent >= 0)
    around = spans.parent[inside]
    index, begin, end = without(
        spans.begin, spans.end, around, spans.begin[inside], spans.reach[inside]
    )
    none, own = np.full(len(index), -1), spans.trajectory[index] >= 0
    of_processes = Pieces(
        spans.process[index], begin, end, spans.name[index], none, none, records.names
    )
    in_spans = of_processes.of(
        own, owner=spans.trajectory[index][own], loop=spans.loop[index][own], span=index[own]
    )
    waits = _by_request(in_spans, spans, served).joined(_in_no_span(records))
    return _with_lag(waits, records.blocks), of_processes.of(~own)


def _by_request(pieces: Pieces, spans: SpanTable, served: Mapping[int, Request]) -> Pieces:
    """Divide ``generate`` spans by the parts of their requests;
    drop loops that cannot delay a part.
    """
    columns = (column.tolist() for column in (pieces.span, pieces.cause, pieces.begin, pieces.end))
    parts = [
        (row, *part)
        for row, (number, *whole) in enumerate(zip(*columns, strict=True))
        for part in (_divided(served[number], *whole[1:]) if number in served else [whole])
    ]
    row, cause, begin, end = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    found = pieces.of(row, cause=cause, begin=begin, end=end)
    goes_on = (spans.open[found.span] > 0) & (spans.end[found.span] == end)
    return found._replace(loop=np.where(np.isin(cause, _IN_ENGINE) | goes_on, -1, found.loop))


def _divided(request: Request, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a request in an interval of its span: cause, begin, end.

    Time before the request's begin is ``to the engine``, time after its end ``from the engine``.
    """
    parts: list[tuple[str, int]] = [(name, until) for name, _, until in request.parts()]
    if not parts or parts[0][0] != TO_THE_ENGINE:  # the request's arrival is not known
        parts.insert(0, (TO_THE_ENGINE, request.begin_ns))
    for name, until in (*parts, (FROM_THE_ENGINE, end)):
        if (until := min(until, end)) > begin:
            yield _NUMBERS[name], begin, until
            begin = until


def _in_no_span(records: Records) -> Pieces:
    """Return the intervals of trajectories without an open span."""
    spans, names = records.spans, ("begin_ns", "end_ns", "loop", "whole_log", "unseen_begin")
    columns = [[getattr(one, name) for one in records.trajectories] for name in names]
    first, last, loop, is_whole, unseen = np.array(columns, dtype=np.int64)
    rows = np.flatnonzero(spans.trajectory >= 0)
    number, begin, end = without(
        first, last, spans.trajectory[rows], spans.begin[rows], spans.end[rows]
    )
    cause = np.where(is_whole[number], _NUMBERS[OWN_CODE], _NUMBERS[UNEXPLAINED])
    cause[(unseen[number] > 0) & (begin == first[number])] = _NUMBERS[BEFORE]
    return Pieces(number, begin, end, cause, loop[number], np.full(len(number), -1), records.names)


def _with_lag(waits: Pieces, blocks: Blocks) -> Pieces:
    """Cut loop lag out of the intervals, each followed by the rest of its interval."""
    if not len(blocks.loop):
        return waits
    until = blocks.end + _TOGETHER_NS
    axes = Axes(
        int(max(blocks.loop.max(), waits.loop.max(initial=0))) + 1, blocks.begin, until, waits.end
    )
    stalls = union(axes.put(blocks.loop, blocks.begin, until))
    loop, since, until = axes.take(stalls)
    last = np.searchsorted(stalls[:, 0], axes.put(waits.loop, waits.end, waits.end)[:, 0]) - 1
    until = until[last] - _TOGETHER_NS
    low, high = np.maximum(since[last], waits.begin), np.minimum(until, waits.end)
    is_late = (loop[last] == waits.loop) & (waits.end <= until + DRAIN_NS) & (low < high)
    late = np.flatnonzero(is_late)
    # The blocks by a trajectory itself are no lag of its waits.
    axes = Axes(
        int(waits.owner.max(initial=0)) + 1, blocks.begin, blocks.end, low[late], high[late]
    )
    own = union(axes.put(blocks.trajectory, blocks.begin, blocks.end))
    mine = axes.put(waits.owner[late], low[late], high[late])
    _, since, until = axes.take(own)
    first = np.searchsorted(own[:, 1], mine[:, 0]).tolist()
    beyond = np.searchsorted(own[:, 0], mine[:, 1]).tolist()
    holes = [
        (place, since[hole], until[hole])
        for place, rows in enumerate(map(range, first, beyond))
        for hole in rows
    ]
    row, begin, end = without(
        low[late], high[late], *np.array(holes, dtype=np.int64).reshape(-1, 3).T
    )
    lag = waits.of(late[row], begin=begin, end=end, cause=np.full(len(row), _NUMBERS[LOOP_LAG]))
    left, begin, end = without(waits.begin[late], waits.end[late], row, begin, end)
    rest = waits.of(late[left], begin=begin, end=end)
    order = np.argsort(
        np.concatenate((np.flatnonzero(~is_late), late[row], late[left])), kind="stable"
    )
    return waits.of(~is_late).joined(lag, rest).of(order)


class Explanation:
    """Attributes any time window to causes.

    An instant is divided equally among the causes of all running trajectories. Without a running
    trajectory, the instant belongs to spans outside trajectories, else to the controller's
    innermost stage, else to requests in an engine. The rest is unexplained.

    Args:
        trajectories: Time of the trajectories by cause.
        processes: Time of the processes outside trajectories by cause.
        stages: The controller's stages.
        requests: Intervals in which an engine had a request.
    """

    def __init__(
        self, trajectories: Pieces, processes: Pieces, stages: Sequence[StageSpan], requests: Spans
    ) -> None:
        nested = sorted(
            (span for span in stages if span.depth), key=lambda span: (-span.depth, span.name)
        )
        inner = {
            name: time_of(nested, name) for name in dict.fromkeys(span.name for span in nested)
        }
        self._names = [
            *trajectories.causes,
            *(f"controller: {name}" for name in inner),
            _NO_TRAJECTORY,
        ]
        self._levels: list[tuple[Ints, Sharing]] = []
        taken = EMPTY
        for pieces in (trajectories, processes):
            self._levels.append((pieces.cause, Sharing(pieces.begin, pieces.end, hidden=taken)))
            taken = union(taken, np.stack((pieces.begin, pieces.end), axis=1))
        for number, spans in enumerate((*inner.values(), requests), start=len(trajectories.causes)):
            left = subtract(spans, taken)
            cause = np.full(len(left), number)
            self._levels.append((cause, Sharing(left[:, 0], left[:, 1])))
            taken = union(taken, left)

    def of(self, window: Spans) -> dict[str, float]:
        """Return seconds by cause, largest first and ``unexplained`` last; they add up to the
        window.

        Args:
            window: Intervals of time; an instant in two intervals counts twice.
        """
        took = np.zeros(len(self._names))
        for cause, sharing in self._levels:
            took += np.bincount(cause, weights=sharing.shares(window), minlength=len(self._names))
        took[self._names.index(UNEXPLAINED)] += length(window) - took.sum()
        return ranked(self._names, took)
