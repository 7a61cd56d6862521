"""The segments of a step, the graph that they make, and its replays.

A segment is a time in which a process, a trajectory or a request does one thing. Time between a
segment's begin and the last end before it is the segment's delay.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from verl_profiling.errors import ConfigError
from verl_profiling.manifest import WAIT, Request
from verl_profiling.slices.intervals import EMPTY, Spans
from verl_profiling.slices.slices import PathPart, path
from verl_profiling.steps.records import LOOP_LAG

OWN, WORK, DELAY = "own code", "work", "delay"
"""Kinds of segments: one of the loop, one of workers, and the time before a segment."""
LAG_BY = f"{LOOP_LAG} by "
"""Begin of the kind of loop lag whose cause is known."""

_MOST_STEPS = 50  # until all steps are alike

Calls = tuple[tuple[str, int], ...]
"""Name and duration (ns) of nested calls, the outermost first."""


@dataclass(slots=True, eq=False)
class Segment:
    """A time in which a process, a trajectory or a request does one thing.

    Attributes:
        kind: ``own code`` of the loop, ``work`` of a worker, the collective, part of a request, or
            cause of a trajectory's time.
        begin_ns: Begin.
        end_ns: End.
        who: Lane, worker, or the loop.
        within: Names of the stages around the segment, the outermost first.
        around: Stages around the delay before the segment.
        after: Numbers of the segments that end before this segment begins.
        trajectory: Group and sample of the trajectory.
        calls: Name and duration (ns) of each call around the segment, the outermost first.
        part: Number in :attr:`Graph.parts`, or -1.
        capture_ns: Time of the capture itself in a segment of the loop.
        request: The request that the segment is a part of.
        queue: Engine that serves such segments one at a time, or limit with a slot for each, first
            come first served; empty for others.
        releases: Queues that get a free slot at the end of the segment.
    """

    kind: str
    begin_ns: int
    end_ns: int
    who: str = ""
    within: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    after: list[int] = field(default_factory=list)
    trajectory: str = ""
    calls: Calls = ()
    part: int = -1
    capture_ns: int = 0
    request: Request | None = None
    queue: str = ""
    releases: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it is a wait for something unknown, and no work."""
        return self.kind.startswith(WAIT) and not self.queue

    @property
    def is_capture(self) -> bool:
        """Whether most of its time is that of the capture itself."""
        return 2 * self.capture_ns > self.recorded_ns

    @property
    def stage(self) -> str:
        """Outermost stage around the segment; empty outside stages."""
        return self.within[0] if self.within else ""

    @property
    def recorded_ns(self) -> int:
        """Recorded duration."""
        return self.end_ns - self.begin_ns


class Carried(NamedTuple):
    """Work that began in the last step, like other work that begins in this step and goes on in the
    next.

    Attributes:
        segment: Number of the segment with the rest of the work.
        mark: Number of the segment at whose end the next work begins.
        before: Numbers of the segments of the work in the last step, which are in no order.
    """

    segment: int
    mark: int
    before: list[int]


class Poll(NamedTuple):
    """Times at which the loop looks for what it waits for.

    Attributes:
        after: Number of the segment after which the loop begins to look.
        tick_ns: Time from the end of the segment ``after`` to one of the looks.
        period_ns: Time between two of them.
    """

    after: int
    tick_ns: int
    period_ns: int

    def left_ns(self, now_ns: int) -> int:
        """Return the time until the next one; ``now_ns`` is counted from the same segment."""
        return self.period_ns - (now_ns - self.tick_ns) % self.period_ns if self.period_ns else 0


@dataclass(eq=False)
class Graph:
    """The segments of a step, and their order.

    Attributes:
        begin_ns: Begin of the step.
        end_ns: End of the step.
        segments: The segments.
        last: Number of the segment with which the step ends.
        order: Numbers of the segments, each after those in its ``after``.
        delay_ns: Time between each segment's begin and the last end before it.
        slots: Number of slots of each queue; by default one.
        behind: Numbers of segments that were ready before another one entered their queue, each
            with the number of the other one.
        parts: Role, stage and number of the run in its process, of each ``part``: the same for all
            ranks.
        tails: Number of a segment, and those of a rollout's trajectories or requests that it waits
            for.
        idle: Time in which all lanes of a process were idle, by process.
        capture: Time in which the loop only waited for tools.
        carried: Work that began in the last step.
        polls: The polls with which a segment ends, by its number.
        assumed: Number of edges by assumption.
        unknown: Sentences on stages whose waits are not known.
        whole: Whether all rollouts begin and end in the step.
        lanes: Number of the step's devices, else of its workers.
        on_device: Whether the lanes are devices, and not processes on CPUs.
        engines: Names of the workers that are replicas of an engine.
        synced: Processes whose waits for other ranks are recorded.
        cut: Last segments of trajectories and requests that began before the step.
    """

    begin_ns: int
    end_ns: int
    segments: list[Segment] = field(default_factory=list)
    last: int = 0
    order: list[int] = field(default_factory=list)
    delay_ns: list[int] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    parts: list[tuple[str, str, int]] = field(default_factory=list)
    tails: dict[int, list[int]] = field(default_factory=dict)
    idle: dict[str, Spans] = field(default_factory=dict)
    capture: Spans = field(default_factory=lambda: EMPTY)
    carried: list[Carried] = field(default_factory=list)
    polls: dict[int, Poll] = field(default_factory=dict)
    assumed: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)
    whole: bool = True
    lanes: int = 0
    on_device: bool = False
    engines: set[str] = field(default_factory=set)
    synced: set[str] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)

    def recorded_ns(self) -> list[int]:
        """Return the recorded durations of all segments."""
        return [segment.recorded_ns for segment in self.segments]

    def with_polls(self, factors: Sequence[float]) -> Graph:
        """Return the graph with each period of polling times the factor of its segment."""
        polls = dict[int, Poll]()
        for at, poll in self.polls.items():
            polls[at] = poll._replace(period_ns=round(poll.period_ns * factors[at]))
        return replace(self, polls=polls)

    def close(self) -> None:
        """Set order and delays, once all segments are there."""
        segments = self.segments
        in_last_step = chain.from_iterable(one.before for one in self.carried)
        placed = set(in_last_step)
        self.order = []
        by_time = sorted(
            range(len(segments)), key=lambda at: (segments[at].begin_ns, segments[at].end_ns)
        )
        for at in by_time:
            self._place(at, placed)
        self.delay_ns, self.behind = [0] * len(segments), {}
        queues = defaultdict[str, _Queue](_Queue)
        for segment in sorted(segments, key=lambda segment: segment.end_ns):
            for queue in segment.releases:
                queues[queue].released.append(segment.end_ns)
        end_ns = [segment.end_ns for segment in segments].__getitem__
        for at in self.order:
            ready_ns = max(map(end_ns, segments[at].after), default=self.begin_ns)
            if segments[at].queue:
                ready_ns = self._served_ns(at, ready_ns, queues[segments[at].queue])
            self.delay_ns[at] = segments[at].begin_ns - ready_ns

    def _place(self, at: int, placed: set[int]) -> None:
        """Add a segment to the order, after instants of the same time that it follows."""
        if at not in placed:
            placed.add(at)
            for before in self.segments[at].after:
                self._place(before, placed)
            self.order.append(at)

    def _served_ns(self, at: int, ready_ns: int, queue: _Queue) -> int:
        """Return when the next segment of a queue had a free slot."""
        if queue.since_ns > ready_ns:
            self.behind[at] = queue.last
        queue.since_ns = max(queue.since_ns, ready_ns)
        queue.last = at
        slot = queue.entered - self.slots.get(self.segments[at].queue, 1)
        queue.entered += 1
        return max(queue.since_ns, queue.released[slot]) if slot >= 0 else queue.since_ns


@dataclass(slots=True)
class _Queue:
    """A queue as recorded: the segment that entered last, when, and how many have.

    ``released`` has when slots became free.
    """

    last: int = -1
    since_ns: int = 0
    entered: int = 0
    released: list[int] = field(default_factory=list)


class Replay:
    """The times of a step in which each segment begins as soon as its edges, its delay and the slot
    that it waits for permit; by the number of the segment.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; that of a segment that ends with a poll is set.
        delay_ns: Delay before each segment.
        given: Numbers of the segments that end before each segment.

    Attributes:
        graph: The graph.
        given: Numbers of the segments that end before each segment, as given to the replay.
        after: The same, with the release of the slot that it waited for.
        took_ns: Duration of each segment.
        delay_ns: Delay before each segment.
        end_ns: End of each segment.
        order: Numbers of the segments, each after those in its ``after``.
        alike: Whether the next step would be like this one.
    """

    def __init__(
        self,
        graph: Graph,
        took_ns: list[int],
        delay_ns: Sequence[int],
        given: Sequence[Sequence[int]],
    ) -> None:
        self.graph, self.given, self.after = graph, given, list(given)
        self.took_ns, self.delay_ns = took_ns, delay_ns
        self.end_ns, self.order = [0] * len(graph.segments), list[int]()
        self.alike = True
        if any(one.queue for one in graph.segments):
            self._with_queues()
        else:
            self._in_recorded_order()

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

    def _in_recorded_order(self) -> None:
        """Play all segments in the recorded order, which is one after changes, too."""
        self.order, polls = self.graph.order, self.graph.polls
        end_ns, took_ns, delay_ns = self.end_ns, self.took_ns, self.delay_ns
        for at in self.order:
            before = self.given[at]
            # Most segments follow one other, and a report replays all of them some 20 times.
            ready_ns = end_ns[before[0]] if len(before) == 1 else self._ready_ns(at)
            if at in polls:
                self._end(at, ready_ns)
            else:
                end_ns[at] = ready_ns + delay_ns[at] + took_ns[at]

    def _ready_ns(self, at: int) -> int:
        """Return when all edges to a segment have ended."""
        return max(map(self.end_ns.__getitem__, self.given[at]), default=self.graph.begin_ns)

    def _end(self, at: int, ready_ns: int) -> None:
        """Set the end of a segment that may begin."""
        begin_ns, poll = ready_ns + self.delay_ns[at], self.graph.polls.get(at)
        if poll and self.took_ns[at]:
            self.took_ns[at] = poll.left_ns(begin_ns - self.end_ns[poll.after])
        self.end_ns[at] = begin_ns + self.took_ns[at]

    def _with_queues(self) -> None:
        """Play all segments in order of time, as each of them may free a slot for another one."""
        graph = self.graph
        self._place = {at: number for number, at in enumerate(graph.order)}
        self._followers = followers_of(self.given)
        self._behind = defaultdict[int, list[int]](list)
        for at, one in graph.behind.items():
            self._behind[one].append(at)
        self._missing = {at: len(self.given[at]) + (at in graph.behind) for at in graph.order}
        self._entered_ns = dict[int, int]()
        self._free = defaultdict[str, deque[int | None]](lambda: deque([None]))
        for name, slots in graph.slots.items():
            self._free[name] = deque([None] * slots)
        self._waiting = defaultdict[str, deque[int]](deque)
        # time, place, segment, whether it frees slots
        self._events = list[tuple[int, int, int, bool]]()
        for at, count in self._missing.items():
            if not count:
                self._enter(at)
        while self._events:
            now_ns, _, at, is_release = heappop(self._events)
            if is_release:
                for name in graph.segments[at].releases:
                    self._free[name].append(at)
                    self._acquire(name, now_ns)
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
        name = self.graph.segments[at].queue
        if name:
            self._waiting[name].append(at)
            self._acquire(name, now_ns)
        else:
            self._begin(at, now_ns)

    def _acquire(self, name: str, now_ns: int) -> None:
        """Give free slots of a queue to the first that wait."""
        free, waiting = self._free[name], self._waiting[name]
        while free and waiting:
            freed_by, at = free.popleft(), waiting.popleft()
            if freed_by is not None:
                self.after[at] = [*self.given[at], freed_by]
            self._begin(at, now_ns)

    def _begin(self, at: int, ready_ns: int) -> None:
        self._end(at, ready_ns)
        self.order.append(at)
        if self.graph.segments[at].releases:
            heappush(self._events, (self.end_ns[at], self._place[at], at, True))
        for follower in self._followers[at]:
            self._met(follower)

    def _met(self, at: int) -> None:
        """Count one condition of a segment as met."""
        self._missing[at] -= 1
        if not self._missing[at]:
            self._enter(at)

    def _enter(self, at: int) -> None:
        """Let a segment arrive once all its conditions are met."""
        since_ns = self._ready_ns(at)
        if at in self.graph.behind:
            since_ns = max(since_ns, self._entered_ns[self.graph.behind[at]])
        heappush(self._events, (since_ns, self._place[at], at, False))


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
    took_ns = graph.recorded_ns() if took_ns is None else list(took_ns)
    delay_ns = graph.delay_ns if delay_ns is None else delay_ns
    after = [one.after for one in graph.segments] if after is None else after
    whole_ns = [sum(took_ns[at] for at in (one.segment, *one.before)) for one in graph.carried]
    last_ns = [0] * len(whole_ns)
    for _ in range(_MOST_STEPS):
        replayed = Replay(graph, took_ns, delay_ns, after)
        for number, one in enumerate(graph.carried):
            left_ns = whole_ns[number] - (replayed.end_ns[graph.last] - replayed.end_ns[one.mark])
            more_ns = left_ns - took_ns[one.segment]
            if more_ns * last_ns[number] < 0:  # long and short steps would alternate
                more_ns = int(more_ns / 2)
            replayed.alike = replayed.alike and not more_ns
            took_ns[one.segment] += more_ns
            last_ns[number] = more_ns
        if replayed.alike:
            break
    return replayed


def followers_of(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the segments that follow each segment, from those that it follows."""
    followers = [list[int]() for _ in after]
    for at, before in enumerate(after):
        for one in before:
            followers[one].append(at)
    return followers


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
        poll = polls.get(at)
        if poll:
            before, ready_ns = [*before, poll.after], end_ns[at] - replayed.delay_ns[at] - 1
        for one in before:
            until_ns = end_ns[one] + slack_ns if poll and one == poll.after else ready_ns
            latest_ns[one] = min(latest_ns[one], until_ns)
        needed.update(before)
    return [max(until_ns - end, 0) for until_ns, end in zip(latest_ns, end_ns, strict=True)]
