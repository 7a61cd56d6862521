"""The runs of trajectories and requests, with their time as segments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.predict.limits import Hold, Limit
from verl_profiling.predict.loop_runs import Run
from verl_profiling.predict.segments import LAG_BY, Calls, Segment
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.records import (
    BEFORE,
    FROM_THE_ENGINE,
    GENERATE,
    LOOP_LAG,
    TO_THE_ENGINE,
    Records,
)


def rollout_runs(
    records: Records,
    pieces: Pieces,
    served: Mapping[int, Request],
    limits: Iterable[Limit],
    step: Step,
) -> list[Run]:
    """Return the trajectories that ended in the step, then the requests of no trajectory.

    Args:
        records: The trajectories.
        pieces: Their time by cause.
        served: The request of each span.
        limits: The limits that trajectories wait for.
        step: The step.
    """
    holds = defaultdict[int, list[tuple[str, str, Hold]]](list)
    for limit in limits:
        for hold in limit.holds:
            holds[hold.trajectory].append((limit.name, limit.queue, hold))
    parts, order = _Parts(records, served), np.lexsort((pieces.begin, pieces.owner))
    rows = list(_rows(*(column[order] for column in pieces[:-1])))
    first = np.searchsorted(pieces.owner[order], np.arange(len(records.trajectories) + 1)).tolist()
    runs = list[Run]()
    for number, trajectory in enumerate(records.trajectories):
        if trajectory.cut_end:
            continue
        mine = rows[first[number] : first[number + 1]]
        run = Run(
            trajectory.lane,
            "",
            "",
            trajectory.begin_ns,
            trajectory.end_ns,
            is_cut=trajectory.cut_begin,
        )
        run.trajectory = (
            f"{trajectory.said.group}.{trajectory.said.sample}"
            if trajectory.said.group
            else str(number)
        )
        run.pieces = _acquired(parts.of(mine), holds[number])
        first_span = mine[0][-1] if mine else -1
        if trajectory.cut_begin and first_span >= 0:
            run.before = parts.before(first_span, trajectory.since_ns, trajectory.begin_ns)
        runs.append(run)
    return [*runs, *_requests(step, served.values())]


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
    """Return when the request before ended, by a request's span, for engines that serve one at a
    time.

    Such an engine never served two requests at once, though one was sent before another one began.
    """
    before_ns: dict[int, int] = {}
    engines: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for span, request in served.items():
        since_ns = request.scheduled_ns or request.begin_ns
        engines[request.replica].append((since_ns, request.end_ns, span))
    for served_here in engines.values():
        served_here.sort()
        pairs = list(pairwise(served_here))
        apart = all(end_ns <= begin_ns for (_, end_ns, _), (begin_ns, _, _) in pairs)
        sent_ns = [records.spans.begin[span] for *_, span in served_here[1:]]
        if apart and any(ns < before[0] for ns, (before, _) in zip(sent_ns, pairs, strict=True)):
            before_ns |= {span: 0 for *_, span in served_here}
            before_ns |= {span: end_ns for (_, end_ns, _), (*_, span) in pairs}
    return before_ns


def _acquired(parts: Sequence[Segment], holds: Sequence[tuple[str, str, Hold]]) -> list[Segment]:
    """Return the parts of a trajectory with instants in place of waits for a slot, and what
    releases it.

    A slot may be released when another one is acquired, so the instants are added before the
    releases.

    Args:
        parts: The parts.
        holds: Name and queue of each slot that the trajectory held.
    """
    if not holds:
        return sorted(parts, key=_end_of)
    acquires = [
        Segment(name, hold.begin_ns, hold.begin_ns, queue=queue) for name, queue, hold in holds
    ]
    waits = sorted((hold.since_ns, hold.begin_ns) for _, _, hold in holds)
    until_ns = [0, *accumulate((end_ns for _, end_ns in waits), max)]  # end of the first waits
    left = [
        part for part in parts if until_ns[bisect_left(waits, (part.begin_ns + 1,))] < part.end_ns
    ]
    by_end = sorted([*acquires, *left], key=_end_of)
    for _, queue, hold in holds:
        last = by_end[bisect_right(by_end, hold.end_ns, key=_end_of) - 1]
        last.releases = (*last.releases, queue)
    return by_end


def _end_of(segment: Segment) -> int:
    return segment.end_ns


class _Call(NamedTuple):
    """A span, with the time before the step."""

    name: str
    begin_ns: int
    end_ns: int


def _calls(around: Iterable[_Call]) -> Calls:
    return tuple((call.name, call.end_ns - call.begin_ns) for call in around)


class _Parts:
    """Divides the time of trajectories into segments.

    Args:
        records: The trajectories.
        served: The request of each span.
    """

    def __init__(self, records: Records, served: Mapping[int, Request]) -> None:
        self._records, self._served = records, served
        self._queued = _queued(records, served)
        self._around = list[list[_Call]]()  # each span and all around it
        took, spans = defaultdict[str, list[int]](list), records.spans
        for name, begin, end, parent in _rows(spans.name, spans.since, spans.end, spans.parent):
            around = self._around[parent] if parent >= 0 else []
            self._around.append([*around, _Call(records.names[name], begin, end)])
            took[records.names[name]].append(end - begin)
        self._mean_ns = {name: round(sum(times) / len(times)) for name, times in took.items()}
        self._blocks = defaultdict[int, list[tuple[int, int]]](list)
        blocks = records.blocks
        for loop, begin, what in sorted(_rows(blocks.loop, blocks.begin, blocks.what)):
            self._blocks[loop].append((begin, what))

    def _called(self, begin: int, end: int, cause: int, loop: int, span: int) -> tuple[str, Calls]:
        """Return the kind of a time, and the calls around it;
        loop lag is part of the call that blocks.
        """
        kind, around = self._records.names[cause], self._around[span] if span >= 0 else []
        if kind == LOOP_LAG and (place := bisect_left(self._blocks[loop], (end,))):
            blocker = self._records.blockers[self._blocks[loop][place - 1][1]][1]
            mean_ns = self._mean_ns.get(blocker, 0)
            return LAG_BY + blocker, ((blocker, mean_ns),) if mean_ns else ()
        return kind, _calls(call for call in around if call.end_ns > begin)

    def before(self, span: int, since_ns: int, until_ns: int) -> list[Segment]:
        """Return a trajectory's time from its begin to an instant in a span, by open calls."""
        opened = [call for call in self._around[span] if call.begin_ns < until_ns]
        ends_ns = [*(call.begin_ns for call in opened), until_ns]
        parts = [Segment(BEFORE, since_ns, ends_ns[0])]
        for number, call in enumerate(opened, start=1):
            calls = _calls(opened[:number])
            parts.append(Segment(call.name, call.begin_ns, ends_ns[number], calls=calls))
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
        """Add a part of a request in an engine that serves one at a time: its wait is no segment,
        and the rest is one.
        """
        if part.kind not in (TO_THE_ENGINE, "queued"):
            part.queue = f"replica {self._served[span].replica}"
            part.releases = (part.queue,)
            if parts and parts[-1].queue and parts[-1].end_ns == part.begin_ns:
                part.begin_ns, part.kind = parts.pop().begin_ns, GENERATE
            parts.append(part)
        elif self._queued[span] <= self._records.spans.begin[span]:  # the engine was free
            parts.append(part)
