"""The runs of trajectories and requests, with their time as segments or as chains."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.predict.loop_runs import Run
from verl_profiling.predict.segments import (
    LAG_BY,
    NOTHING,
    Bools,
    Calls,
    Chains,
    Link,
    Segment,
    open_calls,
    spans_around,
)
from verl_profiling.predict.step_graph import Hold, Limit
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.read import Content
from verl_profiling.steps.trajectory_columns import (
    BEFORE,
    LOOP_LAG,
    Records,
)


def rollout_runs(
    content: Content, limits: Iterable[Limit], loop: str
) -> tuple[list[Run], Chains | None]:
    """Return the trajectories that ended in the step, then the requests of no trajectory; and the
    segments of the trajectories that are chains.

    Args:
        content: Everything that was read of the step.
        limits: The limits that trajectories wait for.
        loop: Process of the loop, whose trajectories are no chains.
    """
    records, served, step = content.records, content.served, content.step
    holds = defaultdict[int, list[tuple[Limit, Hold]]](list)
    for limit in limits:
        for hold in limit.holds:
            holds[hold.trajectory].append((limit, hold))
    pieces = content.pieces.of(np.lexsort((content.pieces.begin, content.pieces.owner)))
    parts, runs = _Parts(records, served), list[Run]()
    is_chain = _chained(content, pieces)
    chains, rows = list[int](), _rows_of_others(pieces, is_chain)
    for number, trajectory in enumerate(records.trajectories):
        if trajectory.cut_end:
            continue
        run = Run(trajectory.lane, "", "", trajectory.begin_ns, trajectory.end_ns)
        run.trajectory = str(number)
        if trajectory.said.group:
            run.trajectory = f"{trajectory.said.group}.{trajectory.said.sample}"
        runs.append(run)
        if is_chain[number] and number not in holds and trajectory.lane != loop:
            run.chain = len(chains)
            chains.append(number)
            continue
        run.is_cut = trajectory.cut_begin
        mine = list(_cut(rows(number), [hold for _, hold in holds[number]]))
        run.pieces = _acquired(parts.of(mine), holds[number])
        first_span = mine[0][-1] if mine else -1
        if trajectory.cut_begin and first_span >= 0:
            run.before = parts.before(first_span, trajectory.since_ns, trajectory.begin_ns)
    table = parts.chains(pieces, chains, runs) if chains else None
    return [*runs, *_requests(step, served.values())], table


def _chained(content: Content, pieces: Pieces) -> Bools:
    """Return for each trajectory whether its time is a chain if it waits for nothing: it begins and
    ends in the step, and does one thing at a time.

    Args:
        content: Everything that was read of the step.
        pieces: The time of the trajectories, by trajectory and begin.
    """
    records = content.records
    is_chain = np.array([not (one.cut_begin or one.cut_end) for one in records.trajectories], bool)
    begin = np.array([one.begin_ns for one in records.trajectories], np.int64)
    is_chain &= begin > content.step.begin_ns  # what begins earlier may be carried work
    is_chain &= np.bincount(pieces.owner, minlength=len(is_chain)) > 0
    is_same = pieces.owner[1:] == pieces.owner[:-1]
    is_chain[pieces.owner[1:][is_same & (pieces.begin[1:] < pieces.end[:-1])]] = False
    return is_chain


def _rows_of_others(pieces: Pieces, is_chain: Bools) -> Callable[[int], list[tuple[int, ...]]]:
    """Return the function that returns the pieces of a trajectory as rows."""
    edges = np.searchsorted(pieces.owner, np.arange(len(is_chain) + 1)).tolist()

    def rows(number: int) -> list[tuple[int, ...]]:
        return list(_rows(*(column[edges[number] : edges[number + 1]] for column in pieces[:-1])))

    return rows


def _rows(*columns: Ints) -> Iterator[tuple[int, ...]]:
    return zip(*(column.tolist() for column in columns), strict=True)


def _cut(rows: Iterable[tuple[int, ...]], holds: Sequence[Hold]) -> Iterator[tuple[int, ...]]:
    """Cut the time of a trajectory where it gets or releases a slot inside of a span."""
    edges = sorted({edge for hold in holds for edge in (hold.begin_ns, hold.end_ns)})
    for owner, begin, end, *more in rows:
        inside = [edge for edge in edges if begin < edge < end]
        for since, until in pairwise([begin, *inside, end]):
            yield owner, since, until, *more


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


def _acquired(parts: Sequence[Segment], holds: Sequence[tuple[Limit, Hold]]) -> list[Segment]:
    """Return a trajectory's segments, with an instant in place of each wait for a slot.

    A replay computes how long the instant waits. Loop lag after a slot was free follows it, as it
    goes with the call that blocks the loop. The segment that ends with the release of the slot gets
    its queue in ``releases``. It may be such an instant, so these are added first.

    Args:
        parts: The segments.
        holds: Each slot that the trajectory held, with its limit.
    """
    acquires, lag = list[Segment](), list[Segment]()
    for limit, hold in holds:
        late = [part for part in parts if _is_late(part, hold)]
        lag += [replace(part, begin_ns=max(part.begin_ns, hold.free_ns)) for part in late]
        got_ns = min((part.begin_ns for part in lag[len(lag) - len(late) :]), default=hold.begin_ns)
        acquires.append(Segment(limit.name, got_ns, got_ns, queue=limit.queue))
    waits = sorted((hold.since_ns, hold.begin_ns) for _, hold in holds)
    until_ns = [0, *accumulate((end_ns for _, end_ns in waits), max)]  # last end of n waits
    left = [
        part for part in parts if until_ns[bisect_left(waits, (part.begin_ns + 1,))] < part.end_ns
    ]
    by_end = sorted([*acquires, *lag, *left], key=_end_of)
    for limit, hold in holds:
        last = by_end[bisect_right(by_end, hold.end_ns, key=_end_of) - 1]
        last.releases = (*last.releases, limit.queue)
    return by_end


def _is_late(part: Segment, hold: Hold) -> bool:
    """Return whether a segment is loop lag in a wait whose slot was free."""
    is_in_wait = hold.free_ns < part.end_ns <= hold.begin_ns
    return is_in_wait and hold.since_ns <= part.begin_ns and part.kind.startswith(LOOP_LAG)


class _Parts:
    """Divides the time of trajectories into segments.

    Args:
        records: The trajectories.
        served: The engine request of each span that has one.
    """

    def __init__(self, records: Records, served: Mapping[int, Request]) -> None:
        self._records, self._served = records, served
        spans = records.spans
        counts = np.bincount(spans.name, minlength=len(records.names))
        took_ns = np.bincount(spans.name, spans.end - spans.since, minlength=len(counts))
        self._mean_ns = {
            name: round(took_ns[number] / counts[number])
            for number, name in enumerate(records.names)
            if counts[number]
        }
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
        return kind, open_calls(self._records, span, begin)

    def chains(self, pieces: Pieces, numbers: Sequence[int], runs: Iterable[Run]) -> Chains:
        """Return the time of trajectories as chains.

        Args:
            pieces: The time of all trajectories, by trajectory and begin.
            numbers: The trajectories, in order.
            runs: The runs of all trajectories.
        """
        mine = pieces.of(np.flatnonzero(np.isin(pieces.owner, numbers)))
        kinds = [*self._records.names, *(LAG_BY + name for _, name, _ in self._records.blockers)]
        chained = [run for run in runs if run.chain != NOTHING]
        return Chains(
            begin=mine.begin,
            end=mine.end,
            kind=self._kinds(mine),
            span=mine.span,
            edges=np.append(np.searchsorted(mine.owner, numbers), len(mine.owner)),
            kinds=kinds,
            who=[run.who for run in chained],
            trajectory=[run.trajectory for run in chained],
            links=[Link(NOTHING, (), NOTHING, 0)] * len(chained),
            records=self._records,
            served=self._served,
            blocked_ns=self._mean_ns,
        )

    def _kinds(self, pieces: Pieces) -> Ints:
        """Return the kind of each piece: its cause, or of lag by a known call, its blocker."""
        kind: Ints = pieces.cause.copy()
        blocks = self._records.blocks
        lag = np.flatnonzero(pieces.cause == self._records.names.index(LOOP_LAG))
        for loop in np.unique(pieces.loop[lag]):
            mine = np.flatnonzero(blocks.loop == loop)
            mine = mine[np.lexsort((blocks.what[mine], blocks.begin[mine]))]
            of_loop = lag[pieces.loop[lag] == loop]
            place = np.searchsorted(blocks.begin[mine], pieces.end[of_loop])
            known = of_loop[place > 0]
            kind[known] = len(self._records.names) + blocks.what[mine[place[place > 0] - 1]]
        return kind

    def before(self, span: int, since_ns: int, until_ns: int) -> list[Segment]:
        """Return a trajectory's segments from its begin to an instant in a span.

        Each ends where the next open call begins, and is named after the call around it.
        """
        parts = [Segment(BEFORE, since_ns, until_ns)]
        around, calls = spans_around(self._records, span), Calls()
        for name, begin_ns, end_ns in around:
            calls = (*calls, (name, end_ns - begin_ns))
            if begin_ns < until_ns:
                parts[-1].end_ns = begin_ns
                parts.append(Segment(name, begin_ns, until_ns, calls=calls))
        return parts

    def of(self, rows: Iterable[tuple[int, ...]]) -> list[Segment]:
        """Return the segments of a trajectory; rows are owner, begin, end, cause, loop and span."""
        parts: list[Segment] = []
        for _, begin, end, cause, loop, span in rows:
            kind, calls = self._called(begin, end, cause, loop, span)
            parts.append(Segment(kind, begin, end, calls=calls, request=self._served.get(span)))
        return parts


_end_of = attrgetter("end_ns")
