"""The segments of a step, and the graph that they make.

A segment is a time in which a process, a trajectory or a request does one thing, such as the
decoding of a request. Its predecessors are the segments that had to end before it. The time from
the last of their ends to its begin is its delay.

A step may have a million segments of trajectories, so these are columns (:class:`Chains`). Indexes
of segments count those of chains first, then all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.trajectory_log import NO_SPAN
from verl_profiling.manifest import WAIT, Request
from verl_profiling.slices.intervals import Ints
from verl_profiling.steps.trajectory_columns import LOOP_LAG, Records

OWN, WORK, DELAY = "own code", "work", "delay"
"""Kinds of time: a segment of the loop, a segment of a worker, and the delay before a segment."""
LAG_BY = f"{LOOP_LAG} by "
"""Prefix of the kind of event loop lag with a known cause, e.g. ``loop lag by tool:search``."""
NOTHING = -1
"""Index in place of a predecessor, for a segment without one."""

Bools = NDArray[np.bool_]
Calls = tuple[tuple[str, int], ...]
"""Name and duration (ns) of nested spans, the outermost first."""


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
        calls: Open spans of the trajectory; for lag, those of the task that blocks the event loop.
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
        """Whether the segment is a ``wait:NAME`` for something unknown: no limit explains it."""
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


class Link(NamedTuple):
    """How a chain is linked to the rest of the graph; the fields hold for all its segments.

    Attributes:
        caller: Index of the segment that its first segment follows, or ``NOTHING``.
        within: Stages around the chain.
        part: Index in :attr:`Graph.parts`, or -1.
        place: Number of segments outside chains that were added to the graph before it.
    """

    caller: int
    within: tuple[str, ...]
    part: int
    place: int


@dataclass(eq=False)
class Chains:
    """The segments of trajectories that wait for nothing, as columns.

    Each trajectory is a chain: its segments follow each other, and nothing waits for one of them
    but the last. So a replay computes the end of a chain as one sum.

    Attributes:
        begin: Begin of each segment (ns).
        end: End of each segment (ns).
        kind: Index of each segment's kind in ``kinds``.
        span: Row of the innermost span of each segment in the records, or ``NO_SPAN``; for lag,
            that of the task that blocks the event loop.
        edges: Index at which each chain begins, and the number of all segments.
        kinds: The kinds.
        who: Lane of each chain.
        trajectory: Name of each chain's trajectory, as in :attr:`Segment.trajectory`.
        links: How each chain is linked to the graph.
        records: The trajectories and their spans.
        served: The engine's request of each span that has one.
    """

    begin: Ints
    end: Ints
    kind: Ints
    span: Ints
    edges: Ints
    kinds: Sequence[str]
    who: Sequence[str]
    trajectory: Sequence[str]
    links: list[Link]
    records: Records
    served: Mapping[int, Request]

    @property
    def first(self) -> Ints:
        """Index of each chain's first segment."""
        return self.edges[:-1]

    @property
    def last(self) -> Ints:
        """Index of each chain's last segment."""
        return self.edges[1:] - 1

    def of_each(self, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        """Return a value of each chain as a column of the segments."""
        return np.repeat(np.asarray(values), np.diff(self.edges))

    def linked_to(self) -> Iterable[tuple[Link, str]]:
        """Return the link and the lane of each chain."""
        return zip(self.links, self.who, strict=True)

    def each(self) -> Iterator[tuple[Link, str, range]]:
        """Yield link, lane and indexes of the segments of each chain."""
        for link, who, (first, stop) in zip(
            self.links, self.who, pairwise(self.edges.tolist()), strict=True
        ):
            yield link, who, range(first, stop)

    def rows_of(self, numbers: Sequence[int]) -> Ints:
        """Return the indexes of the segments of some chains."""
        is_wanted = np.zeros(len(self.links), bool)
        is_wanted[numbers] = True
        return np.flatnonzero(self.of_each(is_wanted))

    def linked(self, number: int, link: Link, begin_ns: int, end_ns: int) -> None:
        """Link a chain to the graph, and clip its segments to a time."""
        self.links[number] = link
        first, stop = self.edges.item(number), self.edges.item(number + 1)
        if begin_ns <= self.begin.item(first) and self.end.item(stop - 1) <= end_ns:
            return
        for column in (self.begin, self.end):
            np.clip(column[first:stop], begin_ns, end_ns, out=column[first:stop])

    def of_kinds(self, prefix: str) -> Bools:
        """Return for each segment whether its kind begins with the prefix."""
        has_prefix = np.array([kind.startswith(prefix) for kind in self.kinds], bool)
        return has_prefix[self.kind]

    def in_stage(self, name: str) -> Bools:
        """Return for each segment whether it is inside a stage."""
        return self.of_each([name in link.within for link in self.links]).astype(bool)

    def with_requests(self) -> Ints:
        """Return the indexes of segments that are parts of requests."""
        return np.flatnonzero(np.isin(self.span, [*self.served]))

    def open_spans(self) -> Iterator[Ints]:
        """Yield the innermost open span of each segment, then the spans around it, level by level.

        Segments without one have ``NO_SPAN``, as have waits.
        """
        spans = self.records.spans
        row = np.where(self.of_kinds(WAIT), NO_SPAN, self.span)
        while (row != NO_SPAN).any():
            is_open = (row != NO_SPAN) & (spans.end[row] > self.begin)
            yield np.where(is_open, row, NO_SPAN)
            row = np.where(row != NO_SPAN, spans.parent[row], NO_SPAN)

    def segment(self, at: int) -> Segment:
        """Return one segment."""
        number = int(np.searchsorted(self.edges, at, side="right")) - 1
        link, kind = self.links[number], self.kinds[self.kind[at]]
        before = link.caller if at == self.edges[number] else at - 1
        begin_ns, span = self.begin.item(at), self.span.item(at)
        return Segment(
            kind,
            begin_ns,
            self.end.item(at),
            self.who[number],
            link.within,
            link.within,
            [] if before == NOTHING else [before],
            self.trajectory[number],
            open_calls(self.records, span, begin_ns),
            link.part,
            request=self.served.get(span),
        )


def spans_around(records: Records, span: int) -> list[tuple[str, int, int]]:
    """Return name, begin and end (ns) of a span and of all spans around it, the outermost first;
    they may begin before the step.
    """
    table, around = records.spans, list[tuple[str, int, int]]()
    while span != NO_SPAN:
        name = records.names[table.name[span]]
        around.append((name, table.since.item(span), table.end.item(span)))
        span = table.parent.item(span)
    return around[::-1]


def open_calls(records: Records, span: int, begin_ns: int) -> Calls:
    """Return the spans around a span, and the span itself, that are open after ``begin_ns``."""
    around = spans_around(records, span)
    return tuple((name, end - since) for name, since, end in around if end > begin_ns)


class SegmentTable(Sequence[Segment]):
    """All segments of a graph by index: those of chains, then all others.

    Attributes:
        chains: The chains, if there are any.
        others: All other segments.
        chained: Number of segments in chains.
    """

    def __init__(self, chains: Chains | None = None) -> None:
        self.chains = chains
        self.others: list[Segment] = []
        self.chained = len(chains.begin) if chains else 0

    def __len__(self) -> int:
        return self.chained + len(self.others)

    @overload
    def __getitem__(self, at: int) -> Segment: ...
    @overload
    def __getitem__(self, at: slice) -> list[Segment]: ...
    def __getitem__(self, at: int | slice) -> Segment | list[Segment]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if self.chains is None or not 0 <= at < self.chained:
            return self.others[at - self.chained if at >= 0 else at]
        return self.chains.segment(at)

    def __iter__(self) -> Iterator[Segment]:
        return map(self.__getitem__, range(len(self)))

    def append(self, segment: Segment) -> int:
        """Add a segment outside chains; return its index."""
        self.others.append(segment)
        return len(self) - 1

    def of_others(self) -> Iterable[tuple[int, Segment]]:
        """Return index and segment of each segment outside chains."""
        return enumerate(self.others, self.chained)

    def recorded_ns(self) -> Ints:
        """Return the recorded durations of all segments."""
        others = np.array([one.recorded_ns for one in self.others], np.int64)
        if self.chains is None:
            return others
        return np.concatenate((self.chains.end - self.chains.begin, others))

    def by_stages(self) -> Iterator[tuple[tuple[str, ...], Ints]]:
        """Yield the stages around segments, and the indexes of these segments."""
        withins = defaultdict[tuple[str, ...], list[int]](list)
        for at, one in self.of_others():
            withins[one.within].append(at)
        for within, ats in withins.items():
            yield within, np.array(ats)
        if self.chains is not None:
            of_chains = defaultdict[tuple[str, ...], list[int]](list)
            for number, link in enumerate(self.chains.links):
                of_chains[link.within].append(number)
            for within, numbers in of_chains.items():
                yield within, self.chains.rows_of(numbers)

    def stages(self) -> set[str]:
        """Return the outermost stages around all segments."""
        return {within[0] for within, _ in self.by_stages() if within}

    def kinds(self) -> set[str]:
        """Return the kinds of all segments."""
        kinds = {one.kind for one in self.others}
        if self.chains is not None:
            kinds |= {self.chains.kinds[kind] for kind in np.unique(self.chains.kind)}
        return kinds

    def requested(self) -> Iterator[tuple[int, Segment]]:
        """Yield index and segment of each part of a request."""
        if self.chains is not None:
            for at in self.chains.with_requests().tolist():
                yield at, self[at]
        yield from ((at, one) for at, one in self.of_others() if one.request is not None)
