"""The segments of a step, and the graph that they make.

A segment is a time in which a process, a trajectory or a request does one thing. Time between a
segment's begin and the last end before it is the segment's delay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from verl_profiling.manifest import WAIT, Request
from verl_profiling.slices.intervals import EMPTY, Spans
from verl_profiling.steps.records import LOOP_LAG

OWN, WORK, DELAY = "own code", "work", "delay"
"""Kinds of segments: one of the loop, one of workers, and the time before a segment."""
LAG_BY = f"{LOOP_LAG} by "
"""Begin of the kind of loop lag whose cause is known."""

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
