"""The segments of a step, the graph that they make, and its replays.

A segment is a time in which a process, a trajectory or a request does one thing, such as the
decoding of a request. Its predecessors are the segments that had to end before it. The time from
the last of their ends to its begin is its delay. A replay computes all times anew from durations,
delays and predecessors.
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
"""Kinds of time: a segment of the loop, a segment of a worker, and the delay before a segment."""
LAG_BY = f"{LOOP_LAG} by "
"""Prefix of the kind of event loop lag with a known cause, e.g. ``loop lag by tool:search``."""

_MOST_STEPS = 50  # replays, each of the next step, until a step is like the one before

Calls = tuple[tuple[str, int], ...]
"""Name and duration (ns) of a trajectory's nested spans, the outermost first."""


@dataclass(slots=True, eq=False)
class Segment:
    """A time in which a process, a trajectory or a request does one thing.

    Attributes:
        kind: ``own code`` of the loop, ``work`` of a worker, name of a collective, part of a
            request (``decode``), or cause of a trajectory's time (``loop lag``).
        begin_ns: Begin.
        end_ns: End.
        who: Lane, worker, or the loop.
        within: Names of the stages around the segment, the outermost first.
        around: Stages around the delay before the segment.
        after: Its predecessors, as indexes in :attr:`Graph.segments`.
        trajectory: ``GROUP.SAMPLE`` of the trajectory, else its number; empty for others.
        calls: Open spans of the trajectory; for lag, the call that blocks the event loop.
        part: Index in :attr:`Graph.parts` of the worker's stage around the segment, or -1.
        capture_ns: Time in which the loop only waits for recordings to start or stop.
        request: The engine request that the segment is a part of.
        queue: Queue in which the segment waits for a slot, first come first served: of an engine
            that serves one request at a time, or of a limit such as a semaphore; else empty.
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
        """Whether it is a ``wait:NAME`` for something unknown: no limit explains it."""
        return self.kind.startswith(WAIT) and not self.queue

    @property
    def is_capture(self) -> bool:
        """Whether the loop only waits for recordings to start or stop in most of its time."""
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
    """Work that began in the step before, such as a rollout one step ahead of the training.

    All steps count as alike, so similar work begins in this step and goes on in the next.

    Attributes:
        segment: Index of the segment with the rest of the work, which is in this step.
        mark: Index of the segment at whose end the similar work begins.
        before: Indexes of the work's segments before the step; not in :attr:`Graph.order`.
    """

    segment: int
    mark: int
    before: list[int]


class Poll(NamedTuple):
    """Polls: the loop sleeps, and looks once in each period for the data that it waits for.

    Attributes:
        after: Index of the segment after which the loop begins to poll.
        tick_ns: Time from the end of the segment ``after`` to the begin of the first period.
        period_ns: Time between two polls.
    """

    after: int
    tick_ns: int
    period_ns: int

    def left_ns(self, now_ns: int) -> int:
        """Return the time until the next poll; ``now_ns`` counts from the end of ``after``."""
        return self.period_ns - (now_ns - self.tick_ns) % self.period_ns if self.period_ns else 0


@dataclass(eq=False)
class Graph:
    """The segments of a step, and their order; other fields name a segment by its index.

    Attributes:
        begin_ns: Begin of the step.
        end_ns: End of the step.
        segments: The segments.
        last: The segment with which the step ends.
        order: All segments, each after its predecessors.
        delay_ns: Delay before each segment: from the last end of a predecessor to its begin.
        slots: Number of slots of each queue; by default one.
        behind: By segment: the one that its queue served first, though that one was ready later.
        parts: Role, name and count of each worker's stage: ``("actor", "update_actor", 2)`` is the
            second run of the stage on its rank. Ranks have equal entries.
        tails: By segment that waits for a rollout: the last segments of the trajectories or
            requests that it waits for.
        idle: Time in which all lanes of a process were idle, by process.
        capture: Time in which the loop only waited for recordings to start or stop.
        carried: Work that began in the step before.
        polls: The polls of the loop, by the segment that ends with a poll.
        assumed: Number of edges by the sentence on what they assume.
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
        """Return the graph with each polling period multiplied by its segment's factor."""
        polls = dict[int, Poll]()
        for at, poll in self.polls.items():
            polls[at] = poll._replace(period_ns=round(poll.period_ns * factors[at]))
        return replace(self, polls=polls)

    def close(self) -> None:
        """Compute :attr:`order`, :attr:`delay_ns` and :attr:`behind` of the added segments."""
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
        """Add a segment to the order after its predecessors, as an instant may begin with it."""
        if at not in placed:
            placed.add(at)
            for before in self.segments[at].after:
                self._place(before, placed)
            self.order.append(at)

    def _served_ns(self, at: int, ready_ns: int, queue: _Queue) -> int:
        """Return when a segment of a queue was ready and had a free slot."""
        if queue.since_ns > ready_ns:
            self.behind[at] = queue.last
        queue.since_ns = max(queue.since_ns, ready_ns)
        queue.last = at
        slot = queue.entered - self.slots.get(self.segments[at].queue, 1)
        queue.entered += 1
        return max(queue.since_ns, queue.released[slot]) if slot >= 0 else queue.since_ns


@dataclass(slots=True)
class _Queue:
    """A queue, as the recorded segments enter it in order.

    Attributes:
        last: The segment that entered last.
        since_ns: When it entered.
        entered: Number of segments that have entered.
        released: Times at which slots became free (ns).
    """

    last: int = -1
    since_ns: int = 0
    entered: int = 0
    released: list[int] = field(default_factory=list)


class Replay:
    """The times of a step after changes, by index of the segment.

    A segment begins once its predecessors have ended, its delay is over, and it has a free slot.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; the replay sets those that end with a poll.
        delay_ns: Delay before each segment.
        given: Predecessors of each segment.

    Attributes:
        graph: The graph.
        given: Predecessors of each segment, as given to the replay.
        after: The same, with the segment that released the slot for which it waited.
        took_ns: Duration of each segment.
        delay_ns: Delay before each segment.
        end_ns: End of each segment.
        order: All segments, each after its predecessors.
        alike: Whether the next step would be like this one; :func:`replay` sets it.
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
        """Return a segment's predecessor that ended last; -1 without one."""
        return max(self.after[at], key=self.end_ns.__getitem__, default=-1)

    def _in_recorded_order(self) -> None:
        """Compute all ends in the recorded order; predecessors come first after changes, too."""
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
        """Return when all predecessors of a segment have ended."""
        return max(map(self.end_ns.__getitem__, self.given[at]), default=self.graph.begin_ns)

    def _end(self, at: int, ready_ns: int) -> None:
        """Set the end of a segment whose predecessors and slot are ready at ``ready_ns``."""
        begin_ns, poll = ready_ns + self.delay_ns[at], self.graph.polls.get(at)
        if poll and self.took_ns[at]:
            self.took_ns[at] = poll.left_ns(begin_ns - self.end_ns[poll.after])
        self.end_ns[at] = begin_ns + self.took_ns[at]

    def _with_queues(self) -> None:
        """Compute all ends in order of time, as each of them may free a slot for a segment."""
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
        # time, place in the recorded order, segment, whether its end frees slots
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
        """Give free slots of a queue to the segments that wait longest in it."""
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
        """Count one condition of a segment as met; once all are met, let it arrive.

        A condition is the end of a predecessor, or the arrival of the segment that was before it
        in its queue.
        """
        self._missing[at] -= 1
        if not self._missing[at]:
            self._enter(at)

    def _enter(self, at: int) -> None:
        """Schedule the arrival of a segment whose conditions are all met."""
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
    """Return the times of a step in which each segment begins as soon as it can.

    A segment with a queue begins when a slot is free, after all that entered the queue before. It
    enters when it is ready, but not before the segment in :attr:`Graph.behind`.

    A segment that ends with a poll takes what is left of the period, unless its ``took_ns`` is 0.

    Work that began in the step before takes in this step what that one left of it. All steps count
    as alike, so a faster rollout was also faster there. The rest is negative if the work ended
    before the step.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; by default as recorded.
        delay_ns: Delay before each segment; by default as recorded.
        after: Predecessors of each segment; by default as recorded.
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
    """Return the successors of each segment, given its predecessors."""
    followers = [list[int]() for _ in after]
    for at, before in enumerate(after):
        for one in before:
            followers[one].append(at)
    return followers


def slacks_ns(replayed: Replay) -> list[int]:
    """Return how much longer each segment could take without a longer step.

    A segment that the step does not wait for could go on until the end of the step. One that a
    poll waits for could go on until that poll.
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
