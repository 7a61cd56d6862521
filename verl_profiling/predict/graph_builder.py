"""Divides the runs of a step (stages, trajectories, requests) into the segments of its graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from verl_profiling.predict.loop_runs import Run
from verl_profiling.predict.segments import NOTHING, OWN, WORK, Link, Segment
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import EMPTY, overlaps
from verl_profiling.slices.slices import Slices, peers
from verl_profiling.steps.calls import Calls
from verl_profiling.steps.kinds import LAUNCHES
from verl_profiling.steps.lanes import Lane
from verl_profiling.steps.requests import VALIDATE

_MOST_COLLECTIVES = 5_000  # those with the longest waits; others get no segment
# share of a collective that overlaps computation, above which no rank counts as waiting in it
_HIDDEN = 0.5
_ENTRIES = "ranks without recorded collectives wait in a stage for the last one to enter it"

_Waits = tuple[list[str], str, NDArray[np.int64]]
"""Processes that wait for the last of them, the segment's kind, and begin and end (ns) in each."""


class GraphBuilder:
    """Divides runs into the segments of a graph.

    Args:
        graph: The graph.
        calls: The matched collectives.
        name_of: Function that returns the process of a lane.
        ranks: The ranks of an SPMD program, else the loop.

    Attributes:
        graph: The graph.
        runs: The runs that were added.
        joins: Pairs of a segment, and a run that has to end before it.
        joined: Segment of each collective that was added, by index of the collective.
        times: How often each process has run each stage so far.
        calls: Begin, end (ns) and index of the collectives of each process.
    """

    def __init__(
        self,
        graph: Graph,
        calls: Iterable[Calls],
        name_of: Callable[[Lane], str],
        ranks: Iterable[Run],
    ) -> None:
        self.graph = graph
        self.runs: list[Run] = []
        self.joins: list[tuple[int, Run]] = []
        self.joined: dict[int, int] = {}
        self.times: Counter[tuple[str, str]] = Counter()
        self.calls: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._collectives: list[tuple[str, str, int, int]] = []
        for whose, name, runs in chain(_waited_for(calls, name_of), self._entries(ranks)):
            for who, (begin_ns, end_ns) in zip(whose, runs.tolist(), strict=True):
                self.calls[who].append((begin_ns, end_ns, len(self._collectives)))
            last = whose[int(runs[:, 0].argmax())]
            self._collectives.append((last, name, int(runs[:, 0].max()), int(runs[:, 1].min())))
        for mine in self.calls.values():
            mine.sort()

    def _entries(self, ranks: Iterable[Run]) -> Iterator[_Waits]:
        """Yield assumed waits of ranks without recorded collectives.

        In a stage, ranks wait for the last of them to enter it; the watch assumes the same.
        """
        runs = [
            run
            for rank in ranks
            if rank.who not in self.graph.synced
            for run in sorted(rank.inner, key=_begin_of)
            if run.who == rank.who
        ]
        waits = peers(_slices_of(runs, self.graph.begin_ns))
        for last in np.unique(waits[waits >= 0]).tolist():
            self.graph.assumed[_ENTRIES] += 1
            last_ns = runs[last].begin_ns
            whose, times = [runs[last].who], [(last_ns, last_ns)]
            for row in np.flatnonzero(waits == last).tolist():
                whose.append(runs[row].who)
                times.append((_last_edge(runs[row], last_ns), last_ns))
            yield whose, OWN, np.array(times)

    def build(self, root: Run, loose: Iterable[Run]) -> None:
        """Add all segments and edges.

        Args:
            root: The step.
            loose: Runs that no stage calls, such as a rollout in the background.
        """
        segments, graph = self.graph.segments, self.graph
        self.add(root, -1, (), -1)
        graph.last = root.exit
        ends = sorted((one.end_ns, at) for at, one in segments.of_others() if one.who == root.who)
        for run in loose:
            place = bisect_right(ends, (run.begin_ns, len(segments)))
            is_later = place and run.begin_ns > root.begin_ns
            self.add(run, ends[place - 1][1] if is_later else -1, run.around, -1)
        last: dict[object, int] = {}
        for run in sorted(self.runs, key=lambda run: (run.begin_ns, run.end_ns)):
            if run.row in last:
                self.link(last[run.row], run.entry)
            if run.row is not None:
                before = last.get(run.row, run.exit)
                last[run.row] = max(run.exit, before, key=lambda at: segments[at].end_ns)
        for at, run in self.joins:
            self.link(run.exit, at)
            if run.is_rollout and run.has_own_end and VALIDATE not in segments[at].within:
                graph.tails.setdefault(at, []).append(run.exit)

    def link(self, before: int, after: int) -> None:
        """Add an edge between two segments, if the first ended before the second began."""
        segments = self.graph.segments
        if before >= 0 and self._end_ns(before) <= segments[after].begin_ns:
            segments[after].after.append(before)

    def _end_ns(self, at: int) -> int:
        table = self.graph.segments
        if table.chains is not None and at < table.chained:
            return table.chains.end.item(at)
        return table[at].end_ns

    def add(self, run: Run, caller: int, around: tuple[str, ...], part: int) -> None:
        """Add the segments of a run, and of all runs inside it.

        Args:
            run: The run.
            caller: Number of the segment that calls it, or -1.
            around: Stages around the run.
            part: Index in :attr:`Graph.parts` of the worker's stage around the run, or -1.
        """
        within = (*around, run.name) if run.name and run.name not in around else around
        if part < 0 and run.role and run.name:
            part = len(self.graph.parts)
            self.times[run.who, run.name] += 1
            self.graph.parts.append((run.role, run.name, self.times[run.who, run.name]))
        self.runs.append(run)
        if run.chain != NOTHING:
            self._add_chain(run, Link(caller, around, part, len(self.graph.segments.others)))
            return
        if run.pieces:
            self._add_pieces(run, caller, around, part)
            return
        inner = sorted(run.inner, key=_begin_of)
        at, now_ns, place = caller, run.begin_ns, 0
        waited: list[Run] = []
        for begin_ns, end_ns, following in [*_blocks(run), (run.end_ns, run.end_ns, [])]:
            kind = WORK if run.role else OWN
            own = Segment(kind, now_ns, begin_ns, run.who, within, around, part=part)
            first, last = self._own(own, at)
            if run.entry < 0:
                run.entry = first
            for one in waited:
                self.joins.append((first, one))
            waited = following
            while place < len(inner) and inner[place].begin_ns < end_ns:
                since = last if inner[place].begin_ns >= begin_ns else at
                self.add(inner[place], since, within, part)
                place += 1
            at, now_ns, around = last, end_ns, within
        run.exit = at
        for one in inner[place:]:
            self.add(one, at, within, part)

    def _own(self, own: Segment, before: int) -> tuple[int, int]:
        """Add the time of a run between two of its waits; return the first and the last segment.

        The collectives in it divide this time. A collective is one segment, shared by all ranks.
        """
        first, until_ns = len(self.graph.segments), own.end_ns
        calls = self.calls.get(own.who, [])
        for called_ns, left_ns, number in calls[bisect_left(calls, (own.begin_ns,)) :]:
            if called_ns >= until_ns:
                break
            if called_ns < own.begin_ns or left_ns > until_ns:
                continue
            if called_ns > own.begin_ns or before < 0:
                before = self._new(replace(own, end_ns=called_ns, after=[]), before)
            if number not in self.joined:
                who, name, arrived_ns, free_ns = self._collectives[number]
                joint = Segment(name, arrived_ns, free_ns, who, own.within, own.within)
                self.joined[number] = self._new(joint, -1)
            self.graph.segments[self.joined[number]].after.append(before)
            before = self.joined[number]
            own.begin_ns, own.around = left_ns, own.within
        return first, self._new(own, before)

    def _add_chain(self, run: Run, link: Link) -> None:
        """Link the chain of a trajectory."""
        chains = self.graph.segments.chains
        assert chains is not None
        chains.linked(run.chain, link, run.begin_ns, run.end_ns)
        run.entry, run.exit = chains.edges.item(run.chain), chains.edges.item(run.chain + 1) - 1

    def _add_pieces(self, run: Run, caller: int, around: tuple[str, ...], part: int) -> None:
        """Add the segments of a trajectory or a request; each segment follows the last one that
        ended before it.
        """
        ends: list[tuple[int, int]] = []
        begun = len(self.graph.segments)
        for one in sorted(run.pieces, key=lambda piece: (piece.begin_ns, piece.end_ns)):
            one.who, one.within, one.around = run.who, around, around
            one.trajectory, one.part = run.trajectory, part
            place = bisect_right(ends, (one.begin_ns, one.begin_ns))
            at = self._new(one, ends[place - 1][1] if place else caller)
            insort(ends, (one.end_ns, at))
        added = self.graph.segments.others[begun - self.graph.segments.chained :]
        followed = {at for one in added for at in one.after}
        last = [at for at in range(begun, len(self.graph.segments)) if at not in followed]
        if len(last) != 1:  # the run ends when all of its last segments have ended
            done = Segment(
                OWN, run.end_ns, run.end_ns, run.who, around, around, [], run.trajectory, part=part
            )
            last.append(self._new(done, -1))
            for at in last[:-1]:
                self.link(at, last[-1])
        run.entry, run.exit = begun, last[-1]

    def _new(self, segment: Segment, before: int) -> int:
        """Add a segment with a predecessor, unless that is -1; return the segment's index."""
        if before >= 0:
            segment.after.append(before)
        return self.graph.segments.append(segment)


def _blocks(run: Run) -> list[tuple[int, int, list[Run]]]:
    """Return the waits of a stage: begin, end, and the runs that it waits for in this time."""
    blocks: list[tuple[int, int, list[Run]]] = []
    for waited in sorted(run.waits, key=lambda waited: waited.begin_ns):
        begin_ns, end_ns = max(waited.begin_ns, run.begin_ns), min(waited.end_ns, run.end_ns)
        if blocks and begin_ns < blocks[-1][1]:
            begun_ns, until_ns, others = blocks[-1]
            others.append(waited)
            blocks[-1] = (begun_ns, max(until_ns, end_ns), others)
        else:
            blocks.append((begin_ns, end_ns, [waited]))
    return blocks


def _slices_of(runs: Sequence[Run], begin_ns: int) -> Slices:
    """Return runs as slices, in ns since ``begin_ns``: a float holds no unix time to the ns."""
    who = np.unique([run.who for run in runs], return_inverse=True)[1]
    name = np.unique([run.name for run in runs], return_inverse=True)[1]
    begin = np.array([run.begin_ns - begin_ns for run in runs], float)
    end = np.array([run.end_ns - begin_ns for run in runs], float)
    none = np.full(who.size, -1)
    return Slices(who, none, name, begin, end, end - begin, 0.0 * begin, none)


def _last_edge(run: Run, until_ns: int) -> int:
    """Return the last time until ``until_ns`` at which a stage, or one inside, began or ended."""
    edges_ns = [run.begin_ns]
    for inner in run.inner:
        if inner.end_ns <= until_ns:
            edges_ns.append(inner.end_ns)
        elif inner.begin_ns <= until_ns:
            edges_ns.append(_last_edge(inner, until_ns))
    return max(edges_ns)


def _waited_for(calls: Iterable[Calls], name_of: Callable[[Lane], str]) -> Iterator[_Waits]:
    """Yield the calls of collectives in which processes wait for each other.

    Left out are calls that overlap computation of the device, and host calls that only launch one.
    If a rank leaves before another one enters, nobody waited, or the clocks are wrong: left out.

    Yields:
        The processes, the name, and begin and end (ns) in each process.
    """
    found = []
    for one in calls:
        if one.name.startswith(LAUNCHES) or len(set(map(name_of, one.lanes))) < len(one.lanes):
            continue
        enter, leave = one.runs[:, :, 0], one.runs[:, :, 1]
        beside = np.stack(
            [
                overlaps(runs, lane.compute if lane.on_device else EMPTY)
                for lane, runs in zip(one.lanes, one.runs[:, :, :2], strict=True)
            ]
        )
        waited = leave.min(axis=0) > enter.max(axis=0)
        waited &= (beside <= _HIDDEN * (leave - enter)).all(axis=0)
        waits = (enter.max(axis=0) - enter).sum(axis=0)
        found += [(int(waits[call]), one, call) for call in np.flatnonzero(waited).tolist()]
    found.sort(key=lambda call: -call[0])
    for _, one, call in found[:_MOST_COLLECTIVES]:
        yield [name_of(lane) for lane in one.lanes], one.name, one.runs[:, call, :2]


_begin_of = attrgetter("begin_ns")
