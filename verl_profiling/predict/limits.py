"""Limits of concurrency, such as a semaphore around a tool, that explain waits of trajectories.

A limit has n slots. A trajectory waits for one in a span ``wait:NAME``, or in its own code before
the call. A limit explains the waits if acquire number i comes just after release number i - n. A
slot may be held until the end of a later span, of the span around the wait, or of the trajectory.
For each of these, the least n that all holders need is computed, and the share of the waiting time
that it explains.

A service is a worker whose stage serves a span of its name, of a trajectory. A service or an engine
that serves one call at a time is a limit of one: the first part of a call may be a wait for those
before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import numpy as np

from verl_profiling.files.trajectory_log import NO_SPAN
from verl_profiling.manifest import WAIT, Request
from verl_profiling.predict.changes import tool_name
from verl_profiling.predict.loop_runs import Run
from verl_profiling.predict.step_graph import Hold, Limit
from verl_profiling.slices.intervals import Ints, grouped
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.trajectory_columns import GENERATE, OWN_CODE, Records

# the holder's span may end this much after the next acquire: both are tasks of one event loop
_ERROR_NS = 1_000_000
# minimum share of the waiting time that a limit explains; by chance, it explains less
_LEAST_SHARE = 0.9
_LEAST_WAITS = 3  # fewer may end with another span by chance
_LEAST_WAIT_NS = 5_000_000  # shorter ones are code, or the way to the next task of the loop

ENGINE = "replica "
"""Prefix of the queue of an engine that serves one request at a time."""


def limits_of(records: Records, pieces: Pieces) -> list[Limit]:
    """Return the limits that explain waits of trajectories.

    Each process has a limit of its own if that explains the waits of all, else they share one.

    Args:
        records: The trajectories.
        pieces: Their time by cause.
    """
    waits, spans = _Waits(records, pieces), records.spans
    limits = list[Limit]()
    for rows in _parts(waits.rows, spans.name):
        name = records.names[spans.name[rows[0]]]
        of_processes = _parts(rows, spans.process)
        alone = [waits.limit(name, of_process) for of_process in of_processes]
        if all(alone):
            limits += filter(None, alone)
        elif len(alone) > 1:
            limits += filter(None, [waits.limit(name, rows)])
    return limits


def services_of(runs: Sequence[Run], records: Records) -> tuple[set[Run], list[Limit]]:
    """Return the stages of services, and a limit for each service that serves one call at a time.

    The calls of a name and the stages of that name are as many, and in order of their ends each
    stage is inside its call.

    Args:
        runs: The outermost stages of workers.
        records: The trajectories.
    """
    spans, served, limits = records.spans, set[Run](), list[Limit]()
    names = np.array(list(map(tool_name, records.names)))
    for name, of_name in grouped(sorted(runs, key=attrgetter("end_ns")), _name_of).items():
        rows = np.flatnonzero((names[spans.name] == name) & (spans.trajectory >= 0))
        rows = rows[np.argsort(spans.end[rows], kind="stable")]
        begin, end = np.array([(run.begin_ns, run.end_ns) for run in of_name]).T
        if len(rows) != len(of_name):
            continue
        if (spans.begin[rows] <= begin).all() and (end <= spans.end[rows]).all():
            served.update(of_name)
            calls = defaultdict[str, list[Hold]](list)
            owners, since = spans.trajectory[rows].tolist(), spans.begin[rows].tolist()
            for run, owner, since_ns in zip(of_name, owners, since, strict=True):
                calls[run.who].append(Hold(owner, since_ns, run.begin_ns, run.end_ns, run.begin_ns))
            for who, of_service in calls.items():
                limits += _serial(name, f"{name} of {who}", of_service)
    return served, limits


def engines_of(records: Records, served: Mapping[int, Request]) -> Iterator[Limit]:
    """Yield a limit for each engine that serves one request at a time.

    Args:
        records: The trajectories.
        served: The engine request of each span that has one.
    """
    spans, calls = records.spans, defaultdict[int, list[Hold]](list)
    for row, request in served.items():
        since_ns, begin_ns = int(spans.begin[row]), request.scheduled_ns or request.begin_ns
        hold = Hold(int(spans.trajectory[row]), since_ns, begin_ns, request.end_ns, begin_ns)
        calls[request.replica].append(hold)
    for replica, of_replica in calls.items():
        yield from _serial(GENERATE, f"{ENGINE}{replica}", of_replica)


def _serial(name: str, queue: str, calls: list[Hold]) -> Iterator[Limit]:
    """Yield the limit of what served one call at a time, though a call came before another began.

    A call that came while nothing was served has no wait: until its begin, it was on its way.
    """
    calls.sort(key=attrgetter("begin_ns"))
    pairs = list(pairwise(calls))
    is_serial = all(one.end_ns <= following.begin_ns for one, following in pairs)
    if is_serial and any(following.since_ns < one.begin_ns for one, following in pairs):
        holds, free_ns = list[Hold](), 0
        for call in calls:
            is_way = call.since_ns >= free_ns
            holds.append(call._replace(since_ns=call.begin_ns) if is_way else call)
            free_ns = call.end_ns
        yield Limit(name, 1, holds, queue)


def _parts(rows: Ints, column: Ints) -> list[Ints]:
    """Divide rows by their value in a column, in the order of the first row of each value."""
    values, first, which = np.unique(column[rows], return_index=True, return_inverse=True)
    order = np.argsort(which, kind="stable")
    parts = np.split(rows[order], np.cumsum(np.bincount(which, minlength=len(values)))[:-1])
    return [parts[place] for place in np.argsort(first)] if len(rows) else []


class _Waits:
    """The waits of trajectories, and what may have ended them.

    Args:
        records: The trajectories.
        pieces: Their time by cause.

    Attributes:
        rows: Rows of the spans of trajectories, in order of trajectory and begin.
    """

    def __init__(self, records: Records, pieces: Pieces) -> None:
        self._spans, owner = records.spans, records.spans.trajectory
        self._cut = np.array([one.cut_end for one in records.trajectories], bool)
        self._until = np.array([one.end_ns for one in records.trajectories], np.int64)
        rows = np.flatnonzero(owner >= 0)
        first = np.full(len(records.trajectories), len(owner))
        np.minimum.at(first, owner[rows], rows)
        self.rows = rows[np.argsort(first[owner[rows]], kind="stable")]
        self._place, self._stop = np.full(len(owner), NO_SPAN), np.zeros(len(first), np.int64)
        self._place[self.rows] = np.arange(len(rows))
        self._stop[owner[self.rows]] = np.arange(len(rows)) + 1  # that of a trajectory's last span
        is_code = pieces.cause == records.names.index(OWN_CODE)
        self._since = self._code_before(pieces.of(np.flatnonzero(is_code)))

    def limit(self, name: str, rows: Ints) -> Limit | None:
        """Return the limit that explains the waits in, or before, spans of a name, if one does."""
        spans = self._spans
        if self._cut[spans.trajectory[rows]].any():
            return None  # the release of a slot that is held beyond the step is unknown
        if name.startswith(WAIT):
            since, until = spans.begin[rows], spans.end[rows]
        else:
            since, until = self._since[rows], spans.begin[rows]
        order = np.argsort(until, kind="stable")
        if (until - since >= _LEAST_WAIT_NS).sum() < _LEAST_WAITS:
            return None
        best, limit = _LEAST_SHARE, None
        for ends in self._releases(rows, until):
            share, slots = _explained(since[order], until[order], ends[order])
            if share >= best:
                best, limit = share, (slots, ends)
        if limit is None:
            return None
        slots, ends = limit
        ordered = [column[order] for column in (spans.trajectory[rows], since, until, ends)]
        columns = (*ordered, _freed(ordered[1], ordered[3], slots).clip(max=ordered[2]))
        holds = [Hold(*hold) for hold in zip(*(column.tolist() for column in columns))]  # noqa: B905
        return Limit(name, slots, holds, f"{name} {rows[order[0]]}")

    def _code_before(self, code: Pieces) -> Ints:
        """Return the begin of the trajectory's own code before each span; of the span without."""
        begin, owner = self._spans.begin, self._spans.trajectory
        # Pairs of trajectory and time as one number each, without an overflow.
        times, number = np.unique(np.concatenate((code.end, begin)), return_inverse=True)
        keys = code.owner * len(times) + number[: len(code.end)]
        wanted = owner * len(times) + number[len(code.end) :]
        order = np.argsort(keys)
        if not len(keys):
            return begin
        before = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
        return np.where(keys[before] == wanted, code.begin[before], begin)

    def _releases(self, rows: Ints, until: Ints) -> Iterator[Ints]:
        """Yield the release of each slot for each event that may release all of them: the end of
        the trajectory, of the span around the wait, or of a later span.

        Args:
            rows: The spans with the waits.
            until: The end of each wait (ns).
        """
        spans = self._spans
        yield self._until[spans.trajectory[rows]]
        around = spans.parent[rows]
        if (around != NO_SPAN).all():
            yield spans.end[around]
        inner, wait = self._later(rows, until)
        by_name = [np.flatnonzero(of_name) for of_name in self._masks(inner)]
        for is_last in (False, True):
            for places in by_name:
                ordered = places[::-1] if is_last else places
                waits, first = np.unique(wait[ordered], return_index=True)
                if len(waits) == len(rows):
                    yield spans.end[inner[ordered[first]]]

    def _masks(self, inner: Ints) -> Iterator[Ints]:
        names = self._spans.name[inner]
        values, first = np.unique(names, return_index=True)
        for value in values[np.argsort(first)]:
            yield names == value

    def _later(self, rows: Ints, until: Ints) -> tuple[Ints, Ints]:
        """Return the spans that begin after a wait of their trajectory, and the last such wait.

        The second column has the place of the wait in ``rows``.
        """
        spans, places = self._spans, self._place[rows]
        inner = self.rows[places[0] : self._stop[spans.trajectory[rows[-1]]]]
        wait = np.searchsorted(places - places[0], np.arange(len(inner)), side="right") - 1
        is_later = spans.trajectory[inner] == spans.trajectory[rows[wait]]
        is_later &= spans.begin[inner] >= until[wait]
        return inner[is_later], wait[is_later]


def slots_of(since: Ints, begin: Ints, end: Ints) -> int | None:
    """Return the slots of a semaphore that explains the waits; ``None`` if none does.

    The arguments are those of :func:`_explained`.
    """
    if (begin - since >= _LEAST_WAIT_NS).sum() < _LEAST_WAITS:
        return None
    share, slots = _explained(since, begin, end)
    return slots if share >= _LEAST_SHARE else None


def _explained(since: Ints, begin: Ints, end: Ints) -> tuple[float, int]:
    """Return which share of the waiting time a semaphore would explain, and its number of slots.

    It has as many slots as are held at once.

    Args:
        since: When each holder of a slot began to wait for it, in order of ``begin``.
        begin: When it got the slot.
        end: When it released the slot.
    """
    released = np.sort(end)
    holders = np.arange(1, len(begin) + 1) - np.searchsorted(released, begin + _ERROR_NS, "right")
    slots = int(holders.max())
    if not 0 < slots < len(begin):  # 0 slots: all calls are shorter than the error
        return 0.0, slots
    left = (begin - _freed(since, end, slots)).clip(0)
    return float(1 - left.sum() / (begin - since).sum()), slots


def _freed(since: Ints, end: Ints, slots: int) -> Ints:
    """Return when each holder of a slot waits, and a slot is free; arguments as above."""
    return np.maximum(since, np.concatenate((since[:slots], np.sort(end)[:-slots])))


_name_of = attrgetter("name")
