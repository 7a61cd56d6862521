"""Replays of a graph: the times of its segments after changes, the critical path, and slack."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from verl_profiling.predict.graph import Graph

_MOST_STEPS = 50  # until all steps are alike


class Replay(NamedTuple):
    """The times of a step, as recorded or after changes, by the number of the segment.

    Attributes:
        graph: The graph.
        given: Numbers of the segments that end before each segment, as given to the replay.
        after: The same, with the segment before it in its queue.
        took_ns: Duration of each segment.
        delay_ns: Delay before each segment.
        end_ns: End of each segment.
        alike: Whether the next step would be like this one.
        order: Numbers of the segments, each after those in its ``after``.
    """

    graph: Graph
    given: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    took_ns: Sequence[int]
    delay_ns: Sequence[int]
    end_ns: Sequence[int]
    alike: bool
    order: Sequence[int]

    @property
    def span_ns(self) -> int:
        """Duration of the step."""
        return self.end_ns[self.graph.last] - self.graph.begin_ns


class PathPart(NamedTuple):
    """A segment of the critical path, or the delay before a segment."""

    segment: int
    begin_ns: int
    end_ns: int
    is_delay: bool


def replay(
    graph: Graph,
    took_ns: Sequence[int] | None = None,
    delay_ns: Sequence[int] | None = None,
    after: Sequence[Sequence[int]] | None = None,
    before_ns: Sequence[int] | None = None,
) -> Replay:
    """Return the times of a step in which each segment begins as soon as its edges and its delay permit.

    A segment with a queue begins after all that entered the queue before it. It enters when it is ready, but
    not before one that it was behind though it was ready earlier.

    A segment that ends with a poll takes what is left of the period, unless it is given no time at all.

    Work that is carried over from the last step has what is left of it, as all steps are alike. What is left
    is negative if the work ended before the step.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; by default as recorded.
        delay_ns: Delay before each segment; by default as recorded.
        after: Edges to each segment; by default as recorded.
        before_ns: Time of each carried work in the last step; by default as recorded.
    """
    before_ns = [one.before_ns for one in graph.carried] if before_ns is None else before_ns
    took_ns = [one.end_ns - one.begin_ns for one in graph.segments] if took_ns is None else took_ns
    delay_ns = graph.delay_ns if delay_ns is None else delay_ns
    after = [one.after for one in graph.segments] if after is None else after
    took_ns = list(took_ns)
    whole_ns = [took_ns[one.segment] + ns for one, ns in zip(graph.carried, before_ns, strict=True)]
    last_ns = [0] * len(whole_ns)
    for _ in range(_MOST_STEPS):
        end_ns, queued, order = _ends(graph, took_ns, delay_ns, after)
        alike = True
        for number, one in enumerate(graph.carried):
            left_ns = whole_ns[number] - (end_ns[graph.last] - end_ns[one.mark])
            more_ns = left_ns - took_ns[one.segment]
            if more_ns * last_ns[number] < 0:  # long and short steps would alternate
                more_ns = int(more_ns / 2)
            alike = alike and not more_ns
            took_ns[one.segment] += more_ns
            last_ns[number] = more_ns
        if alike:
            break
    return Replay(graph, after, queued, took_ns, delay_ns, end_ns, alike, order)


def _ends(
    graph: Graph, took_ns: list[int], delay_ns: Sequence[int], after: Sequence[Sequence[int]]
) -> tuple[list[int], list[Sequence[int]], list[int]]:
    """Return the end of each segment, all edges with those of the queues, and the order of the segments.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; that of a segment that ends with a poll is set.
        delay_ns: Delay before each segment.
        after: Edges to each segment.
    """
    end_ns, edges, order = [0] * len(graph.segments), list(after), list[int]()

    def end(at: int, ready_ns: int) -> None:
        begin_ns = ready_ns + delay_ns[at]
        if took_ns[at] and (poll := graph.polls.get(at)):
            took_ns[at] = poll.left_ns(begin_ns - end_ns[poll.after])
        end_ns[at] = begin_ns + took_ns[at]

    if not any(one.queue for one in graph.segments):  # the recorded order is one after changes, too
        for at in graph.order:
            ready_ns = max((end_ns[before] for before in after[at]), default=graph.begin_ns)
            end(at, ready_ns)
        return end_ns, edges, graph.order
    place = {at: number for number, at in enumerate(graph.order)}
    following: list[list[int]] = [[] for _ in after]
    for at, before in enumerate(after):
        for one in before:
            following[one].append(at)
    for at, one in enumerate(graph.behind):
        if one >= 0:
            following[one].append(at)
    missing = [len(before) + (one >= 0) for before, one in zip(after, graph.behind, strict=True)]
    ready: list[tuple[int, int, int]] = []
    entered_ns, last = dict[int, int](), dict[str, int]()

    def enter(at: int) -> None:
        since_ns = max((end_ns[before] for before in after[at]), default=graph.begin_ns)
        since_ns = max(since_ns, entered_ns.get(graph.behind[at], since_ns))
        heappush(ready, (since_ns, place[at], at))

    for at, count in enumerate(missing):
        if not count:
            enter(at)
    while ready:
        ready_ns, _, at = heappop(ready)
        entered_ns[at] = ready_ns
        if queue := graph.segments[at].queue:
            if queue in last:
                edges[at] = [*after[at], last[queue]]
                ready_ns = max(ready_ns, end_ns[last[queue]])
            last[queue] = at
        end(at, ready_ns)
        order.append(at)
        for one in following[at]:
            missing[one] -= 1
            if not missing[one]:
                enter(one)
    return end_ns, edges, order


def critical_path(replayed: Replay, last: int | None = None) -> list[PathPart]:
    """Return the chain of segments that made the step as long as it is, in order of time.

    The parts follow each other without a gap, so they add up to the step.

    Args:
        replayed: The replay.
        last: Number of the last segment of the chain; by default that of the step.
    """
    found, end_ns = [], replayed.end_ns
    at: int | None = replayed.graph.last if last is None else last
    while at is not None:
        begin_ns = end_ns[at] - replayed.took_ns[at]
        found.append(PathPart(at, begin_ns, end_ns[at], False))
        before = max(replayed.after[at], key=lambda before: end_ns[before], default=None)
        since_ns = replayed.graph.begin_ns if before is None else end_ns[before]
        found.append(PathPart(at, since_ns, begin_ns, True))
        at = before
    first_ns = replayed.graph.begin_ns
    parts = [part._replace(begin_ns=max(part.begin_ns, first_ns)) for part in reversed(found)]
    return [part for part in parts if part.end_ns > part.begin_ns]


def slacks_ns(replayed: Replay) -> list[int]:
    """Return how much longer each segment could take without a longer step.

    A segment that the step does not wait for could go on until the end of the step. What ends before a poll
    could go on until then.
    """
    end_ns, last = replayed.end_ns, replayed.graph.last
    latest_ns = {last: end_ns[last]}
    for at in reversed(replayed.order):
        if at in latest_ns:
            before = replayed.after[at]
            ready_ns = max((end_ns[one] for one in before), default=0) + latest_ns[at] - end_ns[at]
            limits_ns = dict.fromkeys(before, ready_ns)
            if poll := replayed.graph.polls.get(at):
                limits_ns = dict.fromkeys(before, end_ns[at] - replayed.delay_ns[at] - 1)
                limits_ns[poll.after] = end_ns[poll.after] + latest_ns[at] - end_ns[at]
            latest_ns |= {one: min(latest_ns.get(one, ns), ns) for one, ns in limits_ns.items()}
    return [max(latest_ns.get(at, end_ns[last]) - end, 0) for at, end in enumerate(end_ns)]
