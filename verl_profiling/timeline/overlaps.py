"""Moves the slices of a thread or stream that overlap another one partly to rows of their own.

Perfetto before v57 leaves out a slice that begins inside another one of its row and ends after it.
Examples are kernels of a stream with programmatic dependent launch, and annotations, which overlap
the Python frames that open them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.intervals import Ints, Spans, nesting_of
from verl_profiling.steps.trace import Event
from verl_profiling.timeline.processes import metadata

_FIRST_TID = 1 << 24  # above the rows of stages
_ROWS_PER_TRACE = 1 << 12  # the last one takes all further slices
_MOST_LEVELS = 1 << 8  # of a thread: nobody reads more rows, and each slice is tried on each level
_BATCH = 1 << 14  # slices as Python numbers take three times as much memory as in columns
_FLOWS = ("s", "t", "f")

_Row = tuple[int | str | None, int | str | None]  # process, thread


class Overlaps:
    """Finds the slices of one trace that overlap others of their row partly, and moves them.

    It takes some 60 bytes of memory per slice.
    """

    def __init__(self, lane_index: int) -> None:
        """Start without slices; ``lane_index`` is the index of the trace among the traces of its
        lane.
        """
        self._numbers: defaultdict[_Row, int] = defaultdict(count().__next__)
        self._rows, self._begins_us, self._took_us = array("i"), array("d"), array("d")
        self._moved: dict[tuple[_Row, int, int], int] = {}  # new thread by row, begin and end (ns)
        self._flows: dict[tuple[_Row, int], int] = {}
        self._tids: dict[tuple[_Row, int], int] = {}  # by row and level, from 1 on
        self._first_tid = _FIRST_TID + lane_index * _ROWS_PER_TRACE

    def add(self, events: list[Event]) -> None:
        """Add the slices among events on the timeline's clock."""
        slices = [event for event in events if event.ph == "X"]
        self._rows.extend([self._numbers[event.pid, event.tid] for event in slices])
        self._begins_us.extend([event.ts or 0.0 for event in slices])
        self._took_us.extend([event.dur or 0.0 for event in slices])

    def find(self) -> bool:
        """Return whether slices have to move, after all slices were added."""
        spans = np.empty((len(self._rows), 2), np.int64)
        spans[:, 0] = np.rint(np.frombuffer(self._begins_us) * 1000)
        spans[:, 1] = spans[:, 0] + np.rint(np.frombuffer(self._took_us) * 1000)
        numbers = np.frombuffer(self._rows, np.int32)
        nesting = nesting_of(spans, numbers)
        if not nesting.nests:
            self._place(spans, numbers, nesting.order)
        return bool(self._moved)

    def _place(self, spans: Spans, numbers: NDArray[np.int32], order: Ints) -> None:
        """Find the level of each slice: 0 stays in its row, others move to a further row each.

        ``order`` sorts the slices by row and begin, longer ones first.
        """
        rows, row = list(self._numbers), -1
        opened: list[list[int]] = []  # ends of the open slices of each level, the innermost last
        for batch in np.array_split(order, len(order) // _BATCH + 1):
            columns = (numbers[batch].tolist(), *spans[batch].T.tolist())
            for number, begin_ns, end_ns in zip(*columns, strict=True):
                if number != row:
                    row, opened = number, []
                if level := _level(opened, begin_ns, end_ns):
                    further = self._first_tid + min(len(self._tids), _ROWS_PER_TRACE - 1)
                    tid = self._tids.setdefault((rows[row], level), further)
                    self._moved[rows[row], begin_ns, end_ns] = tid
                    self._flows[rows[row], begin_ns] = tid

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
        """Yield name and order of each new thread, taken from the thread whose slices were moved to
        it.
        """
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
    """Return the first level on which no open slice overlaps a slice partly; open the slice there.

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
