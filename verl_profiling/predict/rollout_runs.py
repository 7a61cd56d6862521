"""The runs of trajectories and requests, with their time as segments or as chains."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter

import numpy as np

from verl_profiling.files.trajectory_log import NO_SPAN
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
from verl_profiling.slices.intervals import Axes, grouped
from verl_profiling.steps.causes import Pieces
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.read import Content
from verl_profiling.steps.trajectory_columns import (
    BEFORE,
    LOOP_LAG,
    Records,
)
from verl_profiling.steps.trajectory_spans import column


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
    pieces, runs = _by_blocker(content.pieces, records), list[Run]()
    is_chain = _chained(content, pieces)
    is_chain &= np.array([one.lane != loop for one in records.trajectories], bool)
    is_chain[[*{*holds} - {NO_SPAN}]] = False
    others = (column.tolist() for column in pieces.of(~is_chain[pieces.owner])[:-1])
    rows, chains = grouped(zip(*others, strict=True), itemgetter(0)), list[int]()
    for number, trajectory in enumerate(records.trajectories):
        if trajectory.cut_end:
            continue
        run = Run(trajectory.lane, "", "", trajectory.begin_ns, trajectory.end_ns)
        run.trajectory = str(number)
        if trajectory.said.group:
            run.trajectory = f"{trajectory.said.group}.{trajectory.said.sample}"
        runs.append(run)
        if is_chain[number]:
            run.chain = len(chains)
            chains.append(number)
            continue
        run.is_cut = trajectory.cut_begin
        mine = list(_cut(rows.get(number, ()), [hold for _, hold in holds[number]]))
        parts = [
            Segment(
                pieces.causes[cause],
                begin_ns,
                end_ns,
                calls=open_calls(records, span, begin_ns),
                request=served.get(span),
            )
            for _, begin_ns, end_ns, cause, _, span in mine
        ]
        run.pieces = _acquired(parts, holds[number])
        own = (span for *_, cause, _, span in mine if cause < len(records.names))  # lag has none
        first_span = next(own, NO_SPAN)
        if trajectory.cut_begin and first_span != NO_SPAN:
            run.before = _before(records, first_span, trajectory.since_ns, trajectory.begin_ns)
    table = _chains(content, pieces, chains, runs) if chains else None
    return [*runs, *_requests(step, served.values())], table


def _chained(content: Content, pieces: Pieces) -> Bools:
    """Return for each trajectory whether its time is a chain if it waits for nothing: it begins and
    ends in the step, and does one thing at a time.

    Args:
        content: Everything that was read of the step.
        pieces: The time of the trajectories, by trajectory and begin.
    """
    trajectories, names = content.records.trajectories, ("cut_begin", "cut_end", "begin_ns")
    cut_begin, cut_end, begin = (column(trajectories, name) for name in names)
    # what begins before the step may be carried work
    is_chain: Bools = (cut_begin + cut_end == 0) & (begin > content.step.begin_ns)
    is_chain &= np.bincount(pieces.owner, minlength=len(is_chain)) > 0
    is_same = pieces.owner[1:] == pieces.owner[:-1]
    is_chain[pieces.owner[1:][is_same & (pieces.begin[1:] < pieces.end[:-1])]] = False
    return is_chain


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


def _by_blocker(pieces: Pieces, records: Records) -> Pieces:
    """Return the time of trajectories by trajectory and begin, with loop lag divided at the begin
    of each block: each part has its blocker as its cause, and the span that blocks the loop.
    """
    blocks, loops = records.blocks, int(pieces.loop.max(initial=0)) + 1
    is_lag = pieces.cause == records.names.index(LOOP_LAG)
    lag = pieces.of(is_lag)
    axes = Axes(loops, blocks.begin, blocks.end, lag.begin, lag.end)
    begins = axes.put(blocks.loop, blocks.begin, blocks.end)[:, 0]
    order = np.argsort(begins)
    held = axes.put(lag.loop, lag.begin, lag.end)
    first = np.searchsorted(begins, held[:, 0], "right", order) - 1
    many = np.searchsorted(begins, held[:, 1], "left", order) - first
    row, edges = np.repeat(np.arange(len(many)), many), np.cumsum(many)
    block = order[np.arange(len(row)) + np.repeat(first - edges + many, many)]
    begin = np.maximum(blocks.begin[block], lag.begin[row])
    end = np.roll(begin, -1)
    end[edges - 1] = lag.end
    cause = len(records.names) + blocks.what[block]
    divided = lag.of(row, begin=begin, end=end, cause=cause, span=blocks.span[block])
    every = pieces.of(~is_lag).joined(divided)
    kinds = [*records.names, *(LAG_BY + name for _, name, _ in records.blockers)]
    return every.of(np.lexsort((every.begin, every.owner)), causes=kinds)


def _chains(
    content: Content, pieces: Pieces, numbers: Sequence[int], runs: Iterable[Run]
) -> Chains:
    """Return the time of trajectories as chains.

    Args:
        content: Everything that was read of the step.
        pieces: The time of all trajectories, by trajectory and begin.
        numbers: The trajectories, in order.
        runs: The runs of all trajectories.
    """
    mine = pieces.of(np.flatnonzero(np.isin(pieces.owner, numbers)))
    chained = [run for run in runs if run.chain != NOTHING]
    return Chains(
        begin=mine.begin,
        end=mine.end,
        kind=mine.cause,
        span=mine.span,
        edges=np.append(np.searchsorted(mine.owner, numbers), len(mine.owner)),
        kinds=mine.causes,
        who=[run.who for run in chained],
        trajectory=[run.trajectory for run in chained],
        links=[Link(NOTHING, (), NOTHING, 0)] * len(chained),
        records=content.records,
        served=content.served,
    )


def _before(records: Records, span: int, since_ns: int, until_ns: int) -> list[Segment]:
    """Return a trajectory's segments from its begin to an instant in a span.

    Each ends where the next open call begins, and is named after the call around it.
    """
    parts = [Segment(BEFORE, since_ns, until_ns)]
    around, calls = spans_around(records, span), Calls()
    for name, begin_ns, end_ns in around:
        calls = (*calls, (name, end_ns - begin_ns))
        if begin_ns < until_ns:
            parts[-1].end_ns = begin_ns
            parts.append(Segment(name, begin_ns, until_ns, calls=calls))
    return parts


_end_of = attrgetter("end_ns")
