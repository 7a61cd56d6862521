"""Replays of a graph: the times of its segments after changes, their path, and slack."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from verl_profiling.errors import ConfigError
from verl_profiling.predict.segments import Graph
from verl_profiling.slices.slices import PathPart, path

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

    def path(self, last: int | None = None) -> list[PathPart]:
        """Return the critical path to a segment; by default to the last one of the step."""
        return path(
            self.graph.last if last is None else last,
            self.graph.begin_ns,
            self.took_ns.__getitem__,
            self.end_ns.__getitem__,
            self._ended_last,
        )

    def _ended_last(self, at: int) -> int:
        """Return the predecessor of a segment that ended last; -1 without one."""
        return max(self.after[at], key=self.end_ns.__getitem__, default=-1)


class _Queue(NamedTuple):
    """A queue in a replay: the segment that freed each free slot,
    and the segments that wait for one.
    """

    free: deque[int | None]
    waiting: deque[int]


def replay(
    graph: Graph,
    took_ns: Sequence[int] | None = None,
    delay_ns: Sequence[int] | None = None,
    after: Sequence[Sequence[int]] | None = None,
) -> Replay:
    """Return the times of a step in which each segment begins as soon as its edges and its delay
    permit.

    A segment with a queue begins when a slot is free, after all that entered the queue before. It
    enters when it is ready, but not before one that it was behind though it was ready earlier.

    A segment that ends with a poll takes what is left of the period, unless it is given no time at
    all.

    Work that is carried over from the last step has what is left of it, as all steps are alike.
    What is left is negative if the work ended before the step.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; by default as recorded.
        delay_ns: Delay before each segment; by default as recorded.
        after: Edges to each segment; by default as recorded.
    """
    took_ns = [one.recorded_ns for one in graph.segments] if took_ns is None else took_ns
    delay_ns = graph.delay_ns if delay_ns is None else delay_ns
    after = [one.after for one in graph.segments] if after is None else after
    took_ns = list(took_ns)
    whole_ns = [sum(took_ns[at] for at in (one.segment, *one.before)) for one in graph.carried]
    last_ns = [0] * len(whole_ns)
    for _ in range(_MOST_STEPS):
        run = _Schedule(graph, took_ns, delay_ns, after)
        alike = True
        for number, one in enumerate(graph.carried):
            left_ns = whole_ns[number] - (run.end_ns[graph.last] - run.end_ns[one.mark])
            more_ns = left_ns - took_ns[one.segment]
            if more_ns * last_ns[number] < 0:  # long and short steps would alternate
                more_ns = int(more_ns / 2)
            alike = alike and not more_ns
            took_ns[one.segment] += more_ns
            last_ns[number] = more_ns
        if alike:
            break
    return Replay(graph, after, run.edges, took_ns, delay_ns, run.end_ns, alike, run.order)


def followers_of(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the segments that follow each segment, from those that it follows."""
    followers = [list[int]() for _ in after]
    for at, before in enumerate(after):
        for one in before:
            followers[one].append(at)
    return followers


class _Schedule:
    """The times of one replay: each segment ends after its edges, its delay and the slot that it
    waits for.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; that of a segment that ends with a poll is set.
        delay_ns: Delay before each segment.
        after: Edges to each segment.

    Attributes:
        end_ns: End of each segment.
        edges: Edges to each segment, with the release of the slot that it waited for.
        order: Numbers of the segments, each after those in its edges.
    """

    def __init__(
        self,
        graph: Graph,
        took_ns: list[int],
        delay_ns: Sequence[int],
        after: Sequence[Sequence[int]],
    ) -> None:
        self.end_ns, self.order = [0] * len(graph.segments), list[int]()
        self.edges: list[Sequence[int]] = list(after)
        self._graph, self._took_ns, self._delay_ns, self._after = graph, took_ns, delay_ns, after
        if any(one.queue for one in graph.segments):
            self._with_queues()
        else:
            self._in_recorded_order()

    def _in_recorded_order(self) -> None:
        """Play all segments in the recorded order, which is one after changes, too."""
        self.order, polls = self._graph.order, self._graph.polls
        end_ns, took_ns, delay_ns = self.end_ns, self._took_ns, self._delay_ns
        for at in self.order:
            before = self._after[at]
            # Most segments follow one other, and a report replays all of them some 20 times.
            ready_ns = end_ns[before[0]] if len(before) == 1 else self._ready_ns(at)
            if at in polls:
                self._end(at, ready_ns)
            else:
                end_ns[at] = ready_ns + delay_ns[at] + took_ns[at]

    def _ready_ns(self, at: int) -> int:
        """Return when all edges to a segment have ended."""
        return max(map(self.end_ns.__getitem__, self._after[at]), default=self._graph.begin_ns)

    def _end(self, at: int, ready_ns: int) -> None:
        """Set the end of a segment that may begin."""
        begin_ns, poll = ready_ns + self._delay_ns[at], self._graph.polls.get(at)
        if poll and self._took_ns[at]:
            self._took_ns[at] = poll.left_ns(begin_ns - self.end_ns[poll.after])
        self.end_ns[at] = begin_ns + self._took_ns[at]

    def _with_queues(self) -> None:
        """Play all segments in order of time, as each of them may free a slot for another one."""
        graph = self._graph
        self._place = {at: number for number, at in enumerate(graph.order)}
        self._following = followers_of(self._after)
        self._behind = defaultdict[int, list[int]](list)
        for at, one in graph.behind.items():
            self._behind[one].append(at)
        self._missing = {at: len(self._after[at]) + (at in graph.behind) for at in graph.order}
        self._entered_ns = dict[int, int]()
        self._queues = {one.queue: _Queue(deque([None]), deque()) for one in graph.segments}
        self._queues |= {
            name: _Queue(deque([None] * slots), deque()) for name, slots in graph.slots.items()
        }
        self._events: list[
            tuple[int, int, int, bool]
        ] = []  # time, place, segment, whether it frees slots
        for at, count in self._missing.items():
            if not count:
                self._enter(at)
        while self._events:
            now_ns, _, at, is_release = heappop(self._events)
            if is_release:
                self._release(at, now_ns)
            else:
                self._arrive(at, now_ns)
        if len(self.order) < len(graph.order):
            raise ConfigError(
                "what-if", "limits of concurrency wait for each other, so the step has no end"
            )

    def _arrive(self, at: int, now_ns: int) -> None:
        """Let a segment begin, or enter its queue."""
        self._entered_ns[at] = now_ns
        for follower in self._behind[at]:
            self._met(follower)
        if name := self._graph.segments[at].queue:
            self._queues[name].waiting.append(at)
            self._acquire(self._queues[name], now_ns)
        else:
            self._begin(at, now_ns)

    def _release(self, at: int, now_ns: int) -> None:
        for name in self._graph.segments[at].releases:
            self._queues[name].free.append(at)
            self._acquire(self._queues[name], now_ns)

    def _acquire(self, queue: _Queue, now_ns: int) -> None:
        """Give free slots to the first that wait."""
        while queue.free and queue.waiting:
            freed_by, at = queue.free.popleft(), queue.waiting.popleft()
            if freed_by is not None:
                self.edges[at] = [*self._after[at], freed_by]
            self._begin(at, now_ns)

    def _begin(self, at: int, ready_ns: int) -> None:
        self._end(at, ready_ns)
        self.order.append(at)
        if self._graph.segments[at].releases:
            heappush(self._events, (self.end_ns[at], self._place[at], at, True))
        for follower in self._following[at]:
            self._met(follower)

    def _met(self, at: int) -> None:
        """Count one condition of a segment as met."""
        self._missing[at] -= 1
        if not self._missing[at]:
            self._enter(at)

    def _enter(self, at: int) -> None:
        """Let a segment arrive once all its conditions are met."""
        since_ns = self._ready_ns(at)
        if at in self._graph.behind:
            since_ns = max(since_ns, self._entered_ns[self._graph.behind[at]])
        heappush(self._events, (since_ns, self._place[at], at, False))


def slacks_ns(replayed: Replay) -> list[int]:
    """Return how much longer each segment could take without a longer step.

    A segment that the step does not wait for could go on until the end of the step. What ends
    before a poll could go on until then.
    """
    end_ns, last, polls = replayed.end_ns, replayed.graph.last, replayed.graph.polls
    latest_ns = [end_ns[last]] * len(end_ns)
    needed = {last}
    for at in reversed(replayed.order):
        if at not in needed:
            continue
        before, slack_ns = replayed.after[at], latest_ns[at] - end_ns[at]
        ready_ns = max(map(end_ns.__getitem__, before), default=0) + slack_ns
        if poll := polls.get(at):
            before, ready_ns = [*before, poll.after], end_ns[at] - replayed.delay_ns[at] - 1
        for one in before:
            until_ns = end_ns[one] + slack_ns if poll and one == poll.after else ready_ns
            latest_ns[one] = min(latest_ns[one], until_ns)
        needed.update(before)
    return [max(until_ns - end, 0) for until_ns, end in zip(latest_ns, end_ns, strict=True)]
