"""The time of trajectories divided into intervals with a cause, such as ``queued``, ``decode`` or
``loop lag``.

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

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import Request, StageSpan
from verl_profiling.slices.intervals import (
    EMPTY,
    Axes,
    Ints,
    Sharing,
    Spans,
    grouped,
    length,
    subtract,
    time_of,
    union,
    without,
)
from verl_profiling.steps.trajectory_columns import (
    BEFORE,
    CAUSE_NUMBERS,
    FROM_THE_ENGINE,
    GENERATE,
    LOOP_LAG,
    OWN_CODE,
    REQUEST_PARTS,
    TO_THE_ENGINE,
    UNEXPLAINED,
    Records,
    SpanTable,
)
from verl_profiling.steps.trajectory_spans import column

_JOINED = {
    GENERATE: ("first token", "queued", "prefill", "decode"),
    "first token": ("queued", "prefill"),
}
"""Causes of requests whose engine reports few times, each with the causes that it stands for."""

_IN_ENGINE = range(1, len(REQUEST_PARTS) - 1)
"""Numbers of the causes of requests in an engine, which no block of an event loop delays."""
_NO_TRAJECTORY = "requests of no trajectory"


def joined_causes(*sides: Collection[str]) -> dict[str, str]:
    """Return, by cause of a request, the coarser cause that it counts as in a comparison.

    For example, one report has ``generate`` only. Then ``queued``, ``prefill`` and ``decode`` of
    the other report count as ``generate``.

    Args:
        sides: Causes in each of the compared reports.
    """
    joined: dict[str, str] = {}
    for whole, parts in _JOINED.items():
        if any(whole in names and parts[-1] not in names for names in sides):
            joined = dict.fromkeys(parts, whole) | joined
    return joined


DRAIN_NS = 50_000_000
"""Time (ns) after a block in which the loop runs the tasks that became ready during the block."""

# Blocks with shorter gaps than this count as one block: other tasks run only for a moment between
_TOGETHER_NS = 10_000_000


class Pieces(NamedTuple):
    """Intervals of time with one cause each, as columns.

    Intervals of one trajectory or process may overlap, and then share the time equally.

    Attributes:
        owner: Index of the trajectory, or of the process for time outside trajectories.
        begin: Begin (unix ns).
        end: End (unix ns).
        cause: Index of the cause in ``causes``.
        loop: Number of the event loop whose blocks can delay the interval, or -1.
        span: Row of the innermost span in :attr:`Records.spans`, or -1.
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
        """Return the intervals at the given indices; ``others`` replaces columns by name."""
        return Pieces._make((*(column[rows] for column in self[:-1]), self.causes))._replace(
            **others
        )

    def joined(self, *others: Pieces) -> Pieces:
        """Return these intervals, followed by those of the others."""
        columns = zip(self[:-1], *(other[:-1] for other in others), strict=True)
        return Pieces._make((*map(np.concatenate, columns), self.causes))

    def seconds(self, took: NDArray[Any]) -> dict[str, float]:
        """Return seconds by cause, sorted as by :func:`ranked`.

        Args:
            took: Time of each interval that counts (ns), e.g. its share of a window.
        """
        return ranked(
            self.causes, np.bincount(self.cause, weights=took, minlength=len(self.causes))
        )


def ranked(causes: Sequence[str], took: NDArray[Any]) -> dict[str, float]:
    """Return seconds by cause, largest first and ``unexplained`` last.

    Args:
        causes: Names of the causes.
        took: Time of each cause (ns); causes of less than a nanosecond are left out.
    """
    seconds = [
        (cause, ns / 1e9) for cause, ns in zip(causes, took.tolist(), strict=True) if ns >= 0.5
    ]
    return dict(sorted(seconds, key=lambda item: (item[0] == UNEXPLAINED, -item[1])))


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
        served: The engine's request of each ``generate`` span, by row in :attr:`Records.spans`.
    """
    spans = records.spans
    inside = np.flatnonzero(spans.parent >= 0)
    around = spans.parent[inside]
    index, begin, end = without(
        spans.begin, spans.end, around, spans.begin[inside], spans.reach[inside]
    )
    none = np.full(len(index), -1)
    of_processes = Pieces(
        spans.process[index], begin, end, spans.name[index], none, none, records.names
    )
    owner = spans.trajectory[index]
    of_trajectories = of_processes._replace(owner=owner, loop=spans.loop[index], span=index)
    in_spans = of_trajectories.of(owner >= 0)
    waits = _by_request(in_spans, spans, served).joined(_in_no_span(records))
    return _with_lag(waits, records), of_processes.of(owner < 0)


def _by_request(pieces: Pieces, spans: SpanTable, served: Mapping[int, Request]) -> Pieces:
    """Divide intervals of ``generate`` spans by the parts of their requests, such as ``decode``.

    Parts inside the engine get the loop -1, because no event loop delays them.
    """
    is_served = np.zeros(len(spans.begin), bool)
    is_served[[*served]] = True
    rows = np.flatnonzero(is_served[pieces.span])
    columns = (column[rows].tolist() for column in (pieces.span, pieces.begin, pieces.end))
    parts = [
        (row, *part)
        for row, span, begin_ns, end_ns in zip(rows.tolist(), *columns, strict=True)
        for part in _divided(served[span], begin_ns, end_ns)
    ]
    row, cause, begin, end = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    others = np.flatnonzero(~is_served[pieces.span])
    divided = pieces.of(others).joined(pieces.of(row, cause=cause, begin=begin, end=end))
    divided = divided.of(np.argsort(np.concatenate((others, row)), kind="stable"))
    goes_on = (spans.open[divided.span] > 0) & (spans.end[divided.span] == divided.end)
    is_late_by_loop = ~np.isin(divided.cause, _IN_ENGINE) & ~goes_on
    return divided._replace(loop=np.where(is_late_by_loop, divided.loop, -1))


def _divided(request: Request, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a request in an interval of its span: number of the cause, begin, end.

    Time before the request's begin is ``to the engine``, time after its end ``from the engine``.
    """
    parts: list[tuple[str, int, int]] = list(request.parts())
    if not parts or parts[0][0] != TO_THE_ENGINE:  # the request's arrival is not known
        parts.insert(0, (TO_THE_ENGINE, 0, request.begin_ns))
    for name, _, until in (*parts, (FROM_THE_ENGINE, 0, end)):
        until = min(until, end)
        if until > begin:
            yield CAUSE_NUMBERS[name], begin, until
            begin = until


def _in_no_span(records: Records) -> Pieces:
    """Return the intervals of trajectories without an open span."""
    spans, names = records.spans, ("begin_ns", "end_ns", "loop", "whole_log", "unseen_begin")
    columns = (column(records.trajectories, name) for name in names)
    first, last, loop, is_whole, unseen = columns
    rows = np.flatnonzero(spans.trajectory >= 0)
    number, begin, end = without(
        first, last, spans.trajectory[rows], spans.begin[rows], spans.end[rows]
    )
    cause = np.where(is_whole[number], CAUSE_NUMBERS[OWN_CODE], CAUSE_NUMBERS[UNEXPLAINED])
    cause[(unseen[number] > 0) & (begin == first[number])] = CAUSE_NUMBERS[BEFORE]
    return Pieces(number, begin, end, cause, loop[number], np.full(len(number), -1), records.names)


def _with_lag(waits: Pieces, records: Records) -> Pieces:
    """Return the intervals with loop lag cut out: the lag of an interval, then the rest of it."""
    blocks = records.blocks
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
    # Time in which a trajectory's own code blocks the loop is no lag of this trajectory.
    axes = Axes(
        int(waits.owner.max(initial=0)) + 1, blocks.begin, blocks.end, low[late], high[late]
    )
    owner = np.append(records.spans.trajectory, -1)[blocks.span]
    by_itself = union(axes.put(owner, blocks.begin, blocks.end))
    mine = axes.put(waits.owner[late], low[late], high[late])
    _, since, until = axes.take(by_itself)
    first = np.searchsorted(by_itself[:, 1], mine[:, 0]).tolist()
    beyond = np.searchsorted(by_itself[:, 0], mine[:, 1]).tolist()
    holes = [
        (place, since[hole], until[hole])
        for place, rows in enumerate(map(range, first, beyond))
        for hole in rows
    ]
    row, begin, end = without(
        low[late], high[late], *np.array(holes, dtype=np.int64).reshape(-1, 3).T
    )
    lag = waits.of(
        late[row], begin=begin, end=end, cause=np.full_like(row, CAUSE_NUMBERS[LOOP_LAG])
    )
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
        nested = filter(attrgetter("depth"), stages)
        inner_first = sorted(nested, key=lambda span: (-span.depth, span.name))
        inner = grouped(inner_first, attrgetter("name"))
        self._names = list(trajectories.causes)
        self._names += [f"controller: {name}" for name in inner]
        self._names.append(_NO_TRAJECTORY)
        self._levels: list[tuple[Ints, Sharing]] = []
        taken = EMPTY
        for pieces in (trajectories, processes):
            self._levels.append((pieces.cause, Sharing(pieces.begin, pieces.end, hidden=taken)))
            taken = union(taken, np.stack((pieces.begin, pieces.end), axis=1))
        levels = [*map(time_of, inner.values()), requests]
        for number, spans in enumerate(levels, start=len(trajectories.causes)):
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
