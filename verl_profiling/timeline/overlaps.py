"""Moves the slices of a thread or stream that overlap another one partly to rows of their own.

Perfetto before v57 leaves out a slice that begins inside another one of its row and ends after it.
So overlap kernels of a stream with programmatic dependent launch, and annotations with the Python
frames that open them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import merge
from itertools import pairwise
from math import inf
from typing import NamedTuple

import msgspec

from verl_profiling.manifest import MAX_NS
from verl_profiling.steps.trace import Event
from verl_profiling.timeline.processes import metadata

_FIRST_TID = 1 << 24  # above the rows of stages
_ROWS_PER_TRACE = 1 << 12  # the last one takes all further slices
_MOST_LEVELS = 1 << 8  # of a thread: nobody reads more rows, and each slice is tried on each level
_FLOWS = ("s", "t", "f")

_Row = tuple[int | str | None, int | str | None]  # process, thread


class _Slices(NamedTuple):
    """The slices of one row.

    torch writes a thread in a few runs, e.g. operators before calls of the runtime. A run has its
    slices in order of begin, longer ones first.

    Attributes:
        begins: Begin of each slice (ns).
        minus_ends: End of each slice (ns), negative: so pairs of both sort longer slices first.
        firsts: Index of the first slice of each run but the first.
        opened: Ends of the slices that are open so far, the innermost last.
    """

    begins: array[int]
    minus_ends: array[int]
    firsts: list[int]
    opened: list[float]

    def ordered(self) -> Iterator[tuple[int, int]]:
        """Yield begin and negative end of all slices in order of begin, longer ones first."""
        edges = pairwise((0, *self.firsts, len(self.begins)))
        return merge(*(zip(self.begins[a:b], self.minus_ends[a:b], strict=True) for a, b in edges))


class Overlaps:
    """Finds the slices of one trace that overlap others of their row partly, and moves them.

    It keeps 16 bytes of each slice, and needs no numpy, whose import takes 13 MB.
    """

    def __init__(self, lane_index: int) -> None:
        """Start without slices; ``lane_index`` is the index of the trace among those
        of its lane.
        """
        self._rows: dict[_Row, _Slices] = {}
        self._crossed: set[_Row] = set()  # rows with an overlap in the order of the file
        self._moved: dict[tuple[_Row, int, int], int] = {}  # new thread by row, begin and end (ns)
        self._flows: dict[tuple[_Row, int], int] = {}
        self._tids: dict[tuple[_Row, int], int] = {}  # by row and level, from 1 on
        self._first_tid = _FIRST_TID + lane_index * _ROWS_PER_TRACE

    def add(self, events: list[Event]) -> None:
        """Add the slices among events on the timeline's clock."""
        for event in events:
            if event.ph != "X":
                continue
            slices = self._rows.get((event.pid, event.tid)) or self._add_row(event)
            begins, minus_ends, firsts, opened = slices
            # Inlined, as a call for each of a million slices takes as long as the rest of the loop.
            begin_ns = round((event.ts or 0.0) * 1000)
            end_ns = begin_ns + round((event.dur or 0.0) * 1000)
            last_ns = begins[-1]
            if begin_ns <= last_ns and (begin_ns < last_ns or -end_ns < minus_ends[-1]):
                firsts.append(len(begins))
            while opened[-1] <= begin_ns:
                opened.pop()
            if end_ns > opened[-1]:
                self._crossed.add((event.pid, event.tid))
            opened.append(end_ns)
            begins.append(begin_ns)
            minus_ends.append(-end_ns)

    def _add_row(self, event: Event) -> _Slices:
        """Add the row of a slice, with an empty slice before all others."""
        before_all = array("q", [-2 * MAX_NS])
        slices = _Slices(before_all, array("q", [2 * MAX_NS]), [], [inf])
        self._rows[event.pid, event.tid] = slices
        return slices

    def find(self) -> bool:
        """Return whether slices have to move, after all slices were added."""
        for row, slices in self._rows.items():
            if slices.firsts or row in self._crossed:
                self._place(row, slices)
        self._rows.clear()
        return bool(self._moved)

    def _place(self, row: _Row, slices: _Slices) -> None:
        """Find the levels of all slices of a row."""
        opened: list[list[int]] = []  # ends of the open slices of each level, the innermost last
        for begin_ns, minus_end_ns in slices.ordered():
            if level := _level(opened, begin_ns, -minus_end_ns):
                further = self._first_tid + min(len(self._tids), _ROWS_PER_TRACE - 1)
                tid = self._tids.setdefault((row, level), further)
                self._moved[row, begin_ns, -minus_end_ns] = tid
                self._flows[row, begin_ns] = tid

    def move(self, events: list[Event]) -> None:
        """Change the threads of the slices that move,
        and of the arrows that begin or end with them.
        """
        for event in events:
            row, (begin_ns, end_ns) = (event.pid, event.tid), _times_ns(event)
            if event.ph == "X":
                event.tid = self._moved.get((row, begin_ns, end_ns), event.tid)
            elif event.ph in _FLOWS:
                event.tid = self._flows.get((row, begin_ns), event.tid)

    def names(self, named: list[Event]) -> Iterator[Event]:
        """Yield names of the new threads, and their order, from those of the others."""
        of_thread = {(event.name, event.pid, event.tid): event for event in named}
        for ((pid, tid), level), new_tid in self._tids.items():
            title = of_thread.get(("thread_name", pid, tid))
            name = title.said("name") if title else f"thread {tid}"
            yield metadata("thread_name", pid, new_tid, {"name": f"{name} ({level + 1})"})
            if index := of_thread.get(("thread_sort_index", pid, tid)):
                yield msgspec.structs.replace(index, tid=new_tid)


def _times_ns(event: Event) -> tuple[int, int]:
    begin_ns = round((event.ts or 0.0) * 1000)
    return begin_ns, begin_ns + round((event.dur or 0.0) * 1000)


def _level(opened: list[list[int]], begin_ns: int, end_ns: int) -> int:
    """Return the first level on which a slice is inside the innermost open one, or alone; open it
    there.

    The last level takes all slices that fit no other one, also those that overlap there.
    """
    for level, ends in enumerate(opened):
        while ends and ends[-1] <= begin_ns:
            ends.pop()
        if not ends or end_ns <= ends[-1] or level == _MOST_LEVELS:
            ends.append(end_ns)
            return level
    opened.append([end_ns])
    return len(opened) - 1
