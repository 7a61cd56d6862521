"""The graph of a step: its segments, their order, and what they wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import WAIT
from verl_profiling.numbers.given_work import Load
from verl_profiling.predict.segments import NOTHING, OWN, Chains, Segment, SegmentTable
from verl_profiling.slices.intervals import EMPTY, Ints, Spans
from verl_profiling.steps.trajectory_spans import UNKNOWN


class Hold(NamedTuple):
    """A slot that a trajectory waits for and then holds.

    Attributes:
        trajectory: Number of the trajectory.
        since_ns: Begin of the wait.
        begin_ns: End of the wait, when the trajectory gets the slot.
        end_ns: Release of the slot.
        free_ns: When the slot was free for it; ``begin_ns`` if that is not known.
    """

    trajectory: int
    since_ns: int
    begin_ns: int
    end_ns: int
    free_ns: int


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
        order: All segments outside chains, each after its predecessors.
        called: The chains that follow each segment, by its index; ``NOTHING`` for the others.
        delay_ns: Delay before each segment: from the last end of a predecessor to its begin.
        limits: The limits of concurrency.
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
        paced_by_rollout: Whether the loop may wait longer for a rollout in the background once
            something else is faster: the capture has no end of work that it waits for.
        lanes: Number of the step's devices, else of its workers.
        on_device: Whether the lanes are devices, and not processes on CPUs.
        engines: Names of the workers that are replicas of an engine.
        misses_engines: Whether there are replicas, and nothing was recorded of them.
        synced: Processes whose waits for other ranks are recorded.
        cut: Last segments of trajectories and requests that began before the step.
        loads: Function that returns the runs with known work in a stage, by worker.
    """

    begin_ns: int
    end_ns: int
    segments: SegmentTable = field(default_factory=SegmentTable)
    last: int = 0
    order: list[int] = field(default_factory=list)
    called: dict[int, Ints] = field(default_factory=dict)
    delay_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    limits: list[Limit] = field(default_factory=list)
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
    paced_by_rollout: bool = False
    lanes: int = 0
    on_device: bool = False
    engines: set[str] = field(default_factory=set)
    misses_engines: bool = False
    synced: set[str] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    loads: Callable[[str], Mapping[str, Load]] = lambda stage: {}

    def after(self) -> list[list[int]]:
        """Return the predecessors of each segment outside chains, in order of their indexes."""
        return [one.after for one in self.segments.others]

    def kind_of(self, segment: Segment) -> str:
        """Return the kind of a segment on the path: own code may be a wait, or unknown."""
        inner = segment.within[-1] if segment.within else ""
        if segment.kind == OWN and inner.startswith(WAIT):
            return WAIT.removesuffix(":")
        if segment.kind == OWN and inner == ROLLOUT and self.misses_engines:
            return UNKNOWN
        return segment.kind

    def with_polls(self, factor_of: Callable[[int], float]) -> Graph:
        """Return the graph with each polling period multiplied by its segment's factor."""
        polls = dict[int, Poll]()
        for at, poll in self.polls.items():
            polls[at] = poll._replace(period_ns=round(poll.period_ns * factor_of(at)))
        return replace(self, polls=polls)

    def close(self) -> None:
        """Compute what follows from the added segments: :attr:`order`, :attr:`called`,
        :attr:`delay_ns` and :attr:`behind`.
        """
        table = self.segments
        ends = dict[int, int]()  # of the segments that others may follow
        if table.chains is not None:
            last = table.chains.last
            ends.update(zip(last.tolist(), table.chains.end[last].tolist(), strict=True))
        ends.update((at, one.end_ns) for at, one in table.of_others())
        ends[NOTHING] = self.begin_ns
        self._sort()
        self.behind = {}
        queues = defaultdict[str, _Queue](_Queue)
        for segment in sorted(table.others, key=lambda segment: segment.end_ns):
            for queue in segment.releases:
                queues[queue].released.append(segment.end_ns)
        delay_ns = [0] * len(table.others)
        for at in self.order:
            segment = table[at]
            ready_ns = max(map(ends.__getitem__, segment.after), default=self.begin_ns)
            if segment.queue:
                ready_ns = self._served_ns(at, ready_ns, queues[segment.queue])
            delay_ns[at - table.chained] = segment.begin_ns - ready_ns
        self.delay_ns = np.array(delay_ns, np.int64)
        if table.chains is not None:
            self._link(table.chains, ends)

    def _link(self, chains: Chains, ends: Mapping[int, int]) -> None:
        """Add the chains to :attr:`called`, and their delays to :attr:`delay_ns`."""
        callers = np.array([link.caller for link in chains.links], np.int64)
        for caller in np.unique(callers).tolist():
            self.called[caller] = np.flatnonzero(callers == caller)
        ready_ns = np.append(0, chains.end[:-1])
        ready_ns[chains.first] = [ends[caller] for caller in callers.tolist()]
        self.delay_ns = np.concatenate((chains.begin - ready_ns, self.delay_ns))

    def _sort(self) -> None:
        """Compute :attr:`order`."""
        table, placed = self.segments, set(chain.from_iterable(one.before for one in self.carried))
        callers = dict[int, int]()
        if table.chains is not None:
            links = zip(table.chains.last.tolist(), table.chains.links, strict=True)
            callers = {last: link.caller for last, link in links}
        self.order, self.called = [], {}
        by_time = sorted(table.of_others(), key=lambda item: (item[1].begin_ns, item[1].end_ns))
        for at, _ in by_time:
            self._place(at, placed, callers)

    def _place(self, at: int, placed: set[int], callers: Mapping[int, int]) -> None:
        """Add a segment to the order after its predecessors, as an instant may begin with it."""
        if at not in placed and at != NOTHING:
            placed.add(at)
            for before in self.segments[at].after:
                self._place(callers.get(before, before), placed, callers)
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
