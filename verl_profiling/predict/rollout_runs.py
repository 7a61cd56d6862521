"""The runs of trajectories and requests, with their time as segments, and limits of concurrency.

A limit, such as a semaphore around a tool, has n slots. A trajectory waits for one in a span
``wait:NAME``, or in its own code before the call. A limit explains the waits if acquire number i
comes just after release number i - n. A slot may be held until the end of a later span, of the span
around the wait, or of the trajectory. For each of these, the least n that all holders need is
computed, and the share of the waiting time that it explains.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from verl_profiling.files.trajectory_log import NO_SPAN
from verl_profiling.manifest import WAIT, Request
from verl_profiling.predict.loop_runs import Run
from verl_profiling.predict.segments import LAG_BY, Calls, Segment
from verl_profiling.slices.intervals import Ints, grouped
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.read import Content
from verl_profiling.steps.records import (
    BEFORE,
    FROM_THE_ENGINE,
    GENERATE,
    LOOP_LAG,
    OWN_CODE,
    TO_THE_ENGINE,
    Records,
)

# the holder's span may end this much after the next acquire: both are tasks of one event loop
_ERROR_NS = 1_000_000
# minimum share of the waiting time that a limit explains; by chance, it explains less
_LEAST_SHARE = 0.9
_LEAST_WAITS = 3  # fewer may end with another span by chance
_LEAST_WAIT_NS = 5_000_000  # shorter ones are code, or the way to the next task of the loop


class Hold(NamedTuple):
    """A slot that a trajectory waits for and then holds.

    Attributes:
        trajectory: Number of the trajectory.
        since_ns: Begin of the wait.
        begin_ns: End of the wait, when the trajectory gets the slot.
        end_ns: Release of the slot.
    """

    trajectory: int
    since_ns: int
    begin_ns: int
    end_ns: int


class Limit(NamedTuple):
    """A limit of concurrency.

    Attributes:
        name: Name of the spans that wait, or of the calls before which trajectories wait.
        slots: Most trajectories that hold a slot at once.
        holds: All slots that trajectories held.
        queue: Name of its queue, which no other limit has.
    """

    name: str
    slots: int
    holds: list[Hold]
    queue: str


def limits_of(records: Records, pieces: Pieces) -> list[Limit]:
    """Return the limits that explain waits of trajectories.

    Each process has a limit of its own if that explains the waits of all, else they share one.

    Args:
        records: The trajectories.
        pieces: Their time by cause.
    """
    waits, processes = _Waits(records, pieces), records.spans.process.tolist()
    calls = defaultdict[str, list[int]](list)
    for trajectory, spans in waits.inner.items():
        if trajectory < 0:
            continue
        for span in spans:
            calls[waits.names[span]].append(span)
    limits = list[Limit]()
    for name, spans in calls.items():
        by_process = defaultdict[int, list[int]](list)
        for span in spans:
            by_process[processes[span]].append(span)
        alone = [waits.limit(name, of_process) for of_process in by_process.values()]
        if all(alone):
            limits += filter(None, alone)
        elif len(alone) > 1:
            limits += filter(None, [waits.limit(name, spans)])
    return limits


class _Waits:
    """The waits of trajectories, and what may have ended them.

    Args:
        records: The trajectories.
        pieces: Their time by cause.

    Attributes:
        inner: The spans of each trajectory, in order of begin.
        names: Name of each span.
    """

    def __init__(self, records: Records, pieces: Pieces) -> None:
        table, self._trajectories = records.spans, records.trajectories
        self.names = [records.names[name] for name in table.name.tolist()]
        self._owner, self._parent = table.trajectory.tolist(), table.parent.tolist()
        self._begin, self._end = table.begin.tolist(), table.end.tolist()
        self.inner = defaultdict[int, list[int]](list)
        for span, trajectory in enumerate(self._owner):
            self.inner[trajectory].append(span)
        is_code = pieces.cause == records.names.index(OWN_CODE)
        ends = zip(pieces.owner[is_code].tolist(), pieces.end[is_code].tolist(), strict=True)
        self._code = dict(zip(ends, pieces.begin[is_code].tolist(), strict=True))

    def limit(self, name: str, spans: list[int]) -> Limit | None:
        """Return the limit that explains the waits in, or before, spans of a name, if one does."""
        if any(self._trajectories[self._owner[span]].cut_end for span in spans):
            return None  # the release of a slot that is held beyond the step is unknown
        times = dict[int, tuple[int, int]]()  # begin and end of the wait, by span
        for span in spans:
            begin_ns = self._begin[span]
            if name.startswith(WAIT):
                times[span] = begin_ns, self._end[span]
            else:
                times[span] = self._code.get((self._owner[span], begin_ns), begin_ns), begin_ns
        ordered = sorted(times, key=lambda span: times[span][1])
        since, begin = np.array([times[span] for span in ordered]).T
        if (begin - since >= _LEAST_WAIT_NS).sum() < _LEAST_WAITS:
            return None
        best, limit = _LEAST_SHARE, None
        for ends in self._releases(times):
            if len(ends) == len(times):
                share, slots = _explained(since, begin, np.array([ends[span] for span in ordered]))
                if share >= best:
                    best, limit = share, (slots, ends)
        if limit is None:
            return None
        holds = [Hold(self._owner[span], *times[span], limit[1][span]) for span in ordered]
        return Limit(name, limit[0], holds, f"{name} {ordered[0]}")

    def _releases(self, times: Mapping[int, tuple[int, int]]) -> Iterable[dict[int, int]]:
        """Return the release of each slot by the wait's span, for each event that may release it:
        the end of a later span, of the span around, or of the trajectory.
        """
        first, last = defaultdict[str, dict[int, int]](dict), defaultdict[str, dict[int, int]](dict)
        whole, around = dict[int, int](), dict[int, int]()
        for trajectory in dict.fromkeys(self._owner[span] for span in times):
            wait, until_ns = NO_SPAN, 0
            for span in self.inner[trajectory]:
                if span in times:
                    wait, until_ns = span, times[span][1]
                    whole[wait] = self._trajectories[trajectory].end_ns
                    if self._parent[span] != NO_SPAN:
                        around[wait] = self._end[self._parent[span]]
                if wait != NO_SPAN and self._begin[span] >= until_ns:
                    first[self.names[span]].setdefault(wait, self._end[span])
                    last[self.names[span]][wait] = self._end[span]
        return [whole, around, *first.values(), *last.values()]


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
    free = np.concatenate((since[:slots], released[:-slots]))
    left = (begin - np.maximum(since, free)).clip(0)
    return float(1 - left.sum() / (begin - since).sum()), slots


def rollout_runs(content: Content, limits: Iterable[Limit]) -> list[Run]:
    """Return the trajectories that ended in the step, then the requests of no trajectory.

    Args:
        content: Everything that was read of the step.
        limits: The limits that trajectories wait for.
    """
    records, pieces, served = content.records, content.pieces, content.served
    holds = defaultdict[int, list[tuple[Limit, Hold]]](list)
    for limit in limits:
        for hold in limit.holds:
            holds[hold.trajectory].append((limit, hold))
    parts, order = _Parts(records, served), np.lexsort((pieces.begin, pieces.owner))
    columns = [column[order] for column in pieces[:-1]]
    rows = grouped(_rows(*columns), itemgetter(0))
    runs = list[Run]()
    for number, trajectory in enumerate(records.trajectories):
        if trajectory.cut_end:
            continue
        mine = rows.get(number, [])
        run = Run(trajectory.lane, "", "", trajectory.begin_ns, trajectory.end_ns)
        run.is_cut = trajectory.cut_begin
        run.trajectory = str(number)
        if trajectory.said.group:
            run.trajectory = f"{trajectory.said.group}.{trajectory.said.sample}"
        run.pieces = _acquired(parts.of(mine), holds[number])
        first_span = mine[0][-1] if mine else -1
        if trajectory.cut_begin and first_span >= 0:
            run.before = parts.before(first_span, trajectory.since_ns, trajectory.begin_ns)
        runs.append(run)
    return [*runs, *_requests(content.step, served.values())]


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _requests(step: Step, served: Iterable[Request]) -> Iterator[Run]:
    """Yield the requests of no trajectory."""
    of_trajectories = {id(request) for request in served}
    for worker in step.workers:
        for request in worker.requests:
            if id(request) in of_trajectories or request.end_ns <= step.begin_ns:
                continue
            run = Run(worker.name, worker.identity.role, "", request.begin_ns, request.end_ns)
            run.pieces = [Segment(*part, request=request) for part in request.parts()]
            run.is_cut = request.begin_ns < step.begin_ns
            run.clip(step.begin_ns, step.end_ns)
            yield run


def _queued(records: Records, served: Mapping[int, Request]) -> dict[int, int]:
    """Return when the request before ended (ns), by a request's span, for engines that serve one
    request at a time.

    Such an engine never served two at once, though a request arrived while another one ran.
    """
    before_ns: dict[int, int] = {}
    engines: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for span, request in served.items():
        since_ns = request.scheduled_ns or request.begin_ns
        engines[request.replica].append((since_ns, request.end_ns, span))
    for rows in engines.values():
        begin, end, span = np.array(sorted(rows)).T
        is_apart = bool((end[:-1] <= begin[1:]).all())
        if is_apart and (records.spans.begin[span[1:]] < begin[:-1]).any():
            before_ns.update(zip(span.tolist(), [0, *end[:-1].tolist()], strict=True))
    return before_ns


def _acquired(parts: Sequence[Segment], holds: Sequence[tuple[Limit, Hold]]) -> list[Segment]:
    """Return a trajectory's segments, with an instant in place of each wait for a slot.

    A replay computes how long the instant waits. The segment that ends with the release of the slot
    gets its queue in ``releases``. It may be such an instant, so these are added first.

    Args:
        parts: The segments.
        holds: Each slot that the trajectory held, with its limit.
    """
    acquires = []
    for limit, hold in holds:
        acquires.append(Segment(limit.name, hold.begin_ns, hold.begin_ns, queue=limit.queue))
    waits = sorted((hold.since_ns, hold.begin_ns) for _, hold in holds)
    until_ns = [0, *accumulate((end_ns for _, end_ns in waits), max)]  # last end of n waits
    left = [
        part for part in parts if until_ns[bisect_left(waits, (part.begin_ns + 1,))] < part.end_ns
    ]
    by_end = sorted([*acquires, *left], key=_end_of)
    for limit, hold in holds:
        last = by_end[bisect_right(by_end, hold.end_ns, key=_end_of) - 1]
        last.releases = (*last.releases, limit.queue)
    return by_end


_Spans = list[tuple[str, int, int]]
"""Name, begin and end (ns) of nested spans; they may begin before the step."""


def _calls(around: _Spans) -> Calls:
    return tuple((name, end_ns - begin_ns) for name, begin_ns, end_ns in around)


class _Parts:
    """Divides the time of trajectories into segments.

    Args:
        records: The trajectories.
        served: The engine request of each span that has one.
    """

    def __init__(self, records: Records, served: Mapping[int, Request]) -> None:
        self._records, self._served = records, served
        self._queued = _queued(records, served)
        self._around: dict[int, _Spans] = {NO_SPAN: []}  # each span and all around it
        took, spans = defaultdict[str, list[int]](list), records.spans
        rows = _rows(spans.name, spans.since, spans.end, spans.parent)
        for span, (number, begin, end, parent) in enumerate(rows):
            name = records.names[number]
            self._around[span] = [*self._around[parent], (name, begin, end)]
            took[name].append(end - begin)
        self._mean_ns = {name: round(sum(times) / len(times)) for name, times in took.items()}
        self._blocks = defaultdict[int, list[tuple[int, int]]](list)
        blocks = records.blocks
        for loop, begin, what in sorted(_rows(blocks.loop, blocks.begin, blocks.what)):
            self._blocks[loop].append((begin, what))

    def _called(self, begin: int, end: int, cause: int, loop: int, span: int) -> tuple[str, Calls]:
        """Return the kind of a piece of a trajectory's time, and the open spans around it.

        While a call blocks the event loop, the kind and the span are that call's.

        Args:
            begin: Begin of the piece.
            end: Its end.
            cause: Index of its cause among the names of the records.
            loop: The event loop of the trajectory.
            span: The innermost span of the trajectory.
        """
        kind = self._records.names[cause]
        blocks = self._blocks[loop]
        place = bisect_left(blocks, (end,))
        if kind == LOOP_LAG and place:
            blocker = self._records.blockers[blocks[place - 1][1]][1]
            mean_ns = self._mean_ns.get(blocker, 0)
            return LAG_BY + blocker, ((blocker, mean_ns),) if mean_ns else ()
        return kind, _calls([call for call in self._around[span] if call[2] > begin])

    def before(self, span: int, since_ns: int, until_ns: int) -> list[Segment]:
        """Return a trajectory's segments from its begin to an instant in a span.

        Each ends where the next open call begins, and is named after the call around it.
        """
        parts = [Segment(BEFORE, since_ns, until_ns)]
        for number, (name, begin_ns, _) in enumerate(self._around[span], start=1):
            if begin_ns < until_ns:
                parts[-1].end_ns = begin_ns
                calls = _calls(self._around[span][:number])
                parts.append(Segment(name, begin_ns, until_ns, calls=calls))
        return parts

    def of(self, rows: Iterable[tuple[int, ...]]) -> list[Segment]:
        """Return the segments of a trajectory; rows are owner, begin, end, cause, loop and span."""
        parts: list[Segment] = []
        for _, begin, end, cause, loop, span in rows:
            kind, calls = self._called(begin, end, cause, loop, span)
            part = Segment(kind, begin, end, calls=calls, request=self._served.get(span))
            if span in self._queued and not kind.startswith((LOOP_LAG, FROM_THE_ENGINE)):
                self._add_served_alone(part, span, parts)
            else:
                parts.append(part)
        return parts

    def _add_served_alone(self, part: Segment, span: int, parts: list[Segment]) -> None:
        """Add a part of a request in an engine that serves one request at a time.

        Its wait for the engine gives no segment, as a replay computes it. The rest is one segment.
        """
        if part.kind not in (TO_THE_ENGINE, "queued"):
            part.queue = f"replica {self._served[span].replica}"
            part.releases = (part.queue,)
            if parts and parts[-1].queue and parts[-1].end_ns == part.begin_ns:
                part.begin_ns, part.kind = parts.pop().begin_ns, GENERATE
            parts.append(part)
        elif self._queued[span] <= self._records.spans.begin[span]:  # the engine was free
            parts.append(part)


_end_of = attrgetter("end_ns")
