"""Replays of a step: all times anew from durations, delays and predecessors."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from verl_profiling.errors import ConfigError
from verl_profiling.predict.segments import NOTHING
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import Ints
from verl_profiling.slices.slices import PathPart, path

_MOST_STEPS = 50  # replays, each of the next step, until a step is like the one before


class Replay:
    """The times of a step after changes, by index of the segment.

    A segment begins once its predecessors have ended, its delay is over, and it has a free slot.

    Args:
        graph: The graph.
        took_ns: Duration of each segment; the replay sets those that end with a poll.
        delay_ns: Delay before each segment.
        given: Predecessors of each segment outside chains.

    Attributes:
        graph: The graph.
        delay_ns: Delay before each segment.
        given: Predecessors of each segment outside chains, as given to the replay.
        after: The same, with the segment that released the slot for which it waited.
        ends: End of each segment outside chains, and of each chain's last segment; else 0.
        order: All segments outside chains, each after its predecessors.
        alike: Whether the next step would be like this one; :func:`replay` sets it.
    """

    def __init__(
        self, graph: Graph, took_ns: Ints, delay_ns: Ints, given: Sequence[Sequence[int]]
    ) -> None:
        self.graph, self.given, self.after = graph, given, list(given)
        self.delay_ns = delay_ns
        self._chained = chained = graph.segments.chained
        self._in_chains = took_ns[:chained]
        self._took, self._delay = took_ns[chained:].tolist(), delay_ns[chained:].tolist()
        self.ends, self.order = [0] * len(graph.segments), list[int]()
        self.alike = True
        self._lasts = dict[int, list[tuple[int, int]]]()  # last segments and durations of chains
        if graph.segments.chains is not None:
            whole = np.add.reduceat(self._in_chains + delay_ns[:chained], self._edges[:-1])
            lasts = self._edges[1:] - 1
            for caller, numbers in graph.called.items():
                pairs = zip(lasts[numbers].tolist(), whole[numbers].tolist(), strict=True)
                self._lasts[caller] = list(pairs)
        self._end_chains(NOTHING, graph.begin_ns)
        if any(one.queue for one in graph.segments.others):
            self._with_queues()
        else:
            self._in_recorded_order()

    @property
    def _edges(self) -> Ints:
        chains = self.graph.segments.chains
        return np.zeros(1, np.int64) if chains is None else chains.edges

    @property
    def span_ns(self) -> int:
        """Duration of the step."""
        return self.ends[self.graph.last] - self.graph.begin_ns

    @cached_property
    def took_ns(self) -> Ints:
        """Duration of each segment."""
        return np.concatenate((self._in_chains, np.array(self._took, np.int64)))

    @cached_property
    def end_ns(self) -> Ints:
        """End of each segment."""
        ends = np.array(self.ends, np.int64)
        if self._chained:
            since = np.cumsum(self._in_chains + self.delay_ns[: self._chained])
            lasts = self._edges[1:] - 1
            until = np.repeat(ends[lasts] - since[lasts], np.diff(self._edges))
            ends[: self._chained] = since + until
        return ends

    def path(self, last: int | None = None) -> list[PathPart]:
        """Return the critical path to a segment; by default to the last one of the step."""
        return path(
            self.graph.last if last is None else last,
            self.graph.begin_ns,
            self.took_ns.item,
            self.end_ns.item,
            self._ended_last,
        )

    def before(self, at: int) -> Sequence[int]:
        """Return the predecessors of a segment, as in :attr:`after`."""
        if at < self._chained:
            return self.graph.segments[at].after
        return self.after[at - self._chained]

    def _ended_last(self, at: int) -> int:
        """Return a segment's predecessor that ended last; -1 without one."""
        return max(self.before(at), key=self.end_ns.__getitem__, default=NOTHING)

    def _end_chains(self, caller: int, now_ns: int) -> Iterable[tuple[int, int]]:
        """Set the ends of the chains that follow a segment, and return their last segments."""
        lasts = self._lasts.get(caller, ())
        for last, took_ns in lasts:
            self.ends[last] = now_ns + took_ns
        return lasts

    def _in_recorded_order(self) -> None:
        """Compute all ends in the recorded order; predecessors come first after changes, too."""
        self.order, polls, chained = self.graph.order, self.graph.polls, self._chained
        ends, took_ns, delay_ns, lasts = self.ends, self._took, self._delay, self._lasts
        for at in self.order:
            number = at - chained
            before = self.given[number]
            # Most segments follow one other, and a report replays all of them some 20 times.
            ready_ns = ends[before[0]] if len(before) == 1 else self._ready_ns(at)
            if at in polls:
                self._end(at, ready_ns)
            else:
                ends[at] = ready_ns + delay_ns[number] + took_ns[number]
            if at in lasts:
                self._end_chains(at, ends[at])

    def _ready_ns(self, at: int) -> int:
        """Return when all predecessors of a segment have ended."""
        before = self.given[at - self._chained]
        return max(map(self.ends.__getitem__, before), default=self.graph.begin_ns)

    def _end(self, at: int, ready_ns: int) -> None:
        """Set the end of a segment whose predecessors and slot are ready at ``ready_ns``."""
        number = at - self._chained
        begin_ns, poll = ready_ns + self._delay[number], self.graph.polls.get(at)
        if poll and self._took[number]:
            self._took[number] = poll.left_ns(begin_ns - self.ends[poll.after])
        self.ends[at] = begin_ns + self._took[number]

    def _with_queues(self) -> None:
        """Compute all ends in order of time, as each of them may free a slot for a segment."""
        graph = self.graph
        self._place = {at: number for number, at in enumerate(graph.order)}
        self._followers = defaultdict[int, list[int]](list)
        for at, before in enumerate(self.given, self._chained):
            for one in before:
                self._followers[one].append(at)
        self._behind = defaultdict[int, list[int]](list)
        for at, one in graph.behind.items():
            self._behind[one].append(at)
        self._missing = dict[int, int]()
        for at in graph.order:
            self._missing[at] = len(self.given[at - self._chained]) + (at in graph.behind)
        self._entered_ns = dict[int, int]()
        self._free = defaultdict[str, deque[int | None]](lambda: deque([None]))
        for name, slots in graph.slots.items():
            self._free[name] = deque([None] * slots)
        self._waiting = defaultdict[str, deque[int]](deque)
        # time, place in the recorded order, segment, whether its end frees slots
        self._events = list[tuple[int, int, int, bool]]()
        first = [at for at, count in self._missing.items() if not count]
        for at in first:
            self._enter(at)
        for last, _ in self._lasts.get(NOTHING, ()):
            self._follow(last)
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
                number = at - self._chained
                self.after[number] = [*self.given[number], freed_by]
            self._begin(at, now_ns)

    def _begin(self, at: int, ready_ns: int) -> None:
        self._end(at, ready_ns)
        self.order.append(at)
        if self.graph.segments[at].releases:
            heappush(self._events, (self.ends[at], self._place[at], at, True))
        self._follow(at)
        for last, _ in self._end_chains(at, self.ends[at]):
            self._follow(last)

    def _follow(self, at: int) -> None:
        """Count the end of a segment as known, for all that follow it."""
        for follower in self._followers.get(at, ()):
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
    took_ns: Sequence[int] | Ints | None = None,
    delay_ns: Sequence[int] | Ints | None = None,
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
        after: Predecessors of each segment outside chains; by default as recorded.
    """
    took_ns = np.array(graph.segments.recorded_ns() if took_ns is None else took_ns, np.int64)
    delay_ns = np.asarray(graph.delay_ns if delay_ns is None else delay_ns, np.int64)
    after = graph.after() if after is None else after
    whole_ns = [int(took_ns[[one.segment, *one.before]].sum()) for one in graph.carried]
    last_ns = [0] * len(whole_ns)
    for _ in range(_MOST_STEPS):
        replayed = Replay(graph, took_ns, delay_ns, after)
        for number, one in enumerate(graph.carried):
            left_ns = whole_ns[number] - (replayed.ends[graph.last] - replayed.ends[one.mark])
            more_ns = left_ns - int(took_ns[one.segment])
            if more_ns * last_ns[number] < 0:  # long and short steps would alternate
                more_ns = int(more_ns / 2)
            replayed.alike = replayed.alike and not more_ns
            took_ns[one.segment] += more_ns
            last_ns[number] = more_ns
        if replayed.alike:
            break
    return replayed
