"""Self time of operators: their duration less that of the operators inside them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_profiling.report.intervals import Spans

__all__ = ["OpTimes", "Window", "self_times"]

_SLICE = 1 << 16  # calls kept as Python numbers at a time, which take four times the space
_PART = 1 << 20  # calls added up at a time

Window = tuple[str, int, int]
"""Name, begin and end (ns) of a stage."""


class OpTimes:
    """Calls of operators, gathered while a trace is read.

    Attributes:
        names: Name by number; several may share one list.
    """

    def __init__(self, names: list[str] | None = None) -> None:
        self.names = [] if names is None else names
        self.clear()

    def clear(self) -> None:
        """Forget all calls."""
        self._spans, self._numbers, self._threads = array("q"), array("i"), array("i")

    def number(self, name: str) -> int:
        """Return a new number for a name; a name may have several."""
        self.names.append(name)
        return len(self.names) - 1

    def add(self, spans: Spans, numbers: ArrayLike, threads: ArrayLike) -> None:
        """Add calls: begin and end, operator, and the thread or stream (calls nest inside one)."""
        self._spans.frombytes(np.ascontiguousarray(spans, np.int64).tobytes())
        self._numbers.frombytes(np.asarray(numbers, np.int32).tobytes())
        self._threads.frombytes(np.asarray(threads, np.int32).tobytes())

    def by_stage(self, windows: Sequence[Window]) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and self time (ns) by stage and operator; a call belongs to the stage it begins in.

        Args:
            windows: Stages that do not overlap; outside of them the stage is ``""``.
        """
        spans = np.frombuffer(self._spans, np.int64).reshape(-1, 2)
        numbers = np.frombuffer(self._numbers, np.int32)
        own = self_times(spans, np.frombuffer(self._threads, np.int32))
        named = [*(name for name, _, _ in sorted(windows, key=lambda w: w[1])), ""]
        result: dict[tuple[str, str], tuple[int, int]] = {}
        for start in range(0, len(own), _PART):
            part = slice(start, start + _PART)
            keys = _stage_of(spans[part, 0], windows) * len(self.names) + numbers[part]
            found, inverse = np.unique(keys, return_inverse=True)
            totals = np.zeros(len(found), np.int64)
            np.add.at(totals, inverse, own[part])
            counts = np.bincount(inverse)
            for key, count, total in zip(found.tolist(), counts.tolist(), totals.tolist(), strict=True):
                stage, number = divmod(key, len(self.names))
                place = (named[stage], self.names[number])
                before = result.get(place, (0, 0))  # a stage that ran twice has two windows
                result[place] = (before[0] + count, before[1] + total)
        return result


def self_times(spans: Spans, threads: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the self time of each call, in nanoseconds.

    On one thread calls nest. Sorted by begin, longest first, a call is inside the nearest
    earlier one that has not ended when it begins.
    """
    own: NDArray[np.int64] = spans[:, 1] - spans[:, 0]
    order = np.lexsort((-own, spans[:, 0], threads))
    inside = array("q", bytes(8 * len(order)))  # for each call, the time in nested calls
    parents, ends = array("q"), array("q")  # of the open calls, index and end
    thread = None
    for start in range(0, len(order), _SLICE):
        part = order[start : start + _SLICE]
        calls = zip(spans[part, 0].tolist(), spans[part, 1].tolist(), threads[part].tolist(), strict=True)
        for index, (begin, end, own_thread) in enumerate(calls, start):
            if own_thread != thread:
                thread = own_thread
                parents, ends = array("q"), array("q")
            while ends and ends[-1] <= begin:
                parents.pop()
                ends.pop()
            if ends:
                inside[parents[-1]] += min(end, ends[-1]) - begin
            parents.append(index)
            ends.append(end)
    own[order] -= np.frombuffer(inside, np.int64)
    return own


def _stage_of(begins: NDArray[np.int64], windows: Iterable[Window]) -> NDArray[np.int64]:
    """Return the index of the window (in order of begin) that contains each instant, or their number."""
    ordered = sorted(windows, key=lambda window: window[1])
    if not ordered:
        return np.zeros(len(begins), np.int64)
    starts = np.array([begin for _, begin, _ in ordered])
    ends = np.array([end for _, _, end in ordered])
    at = np.searchsorted(starts, begins, side="right") - 1
    inside = (at >= 0) & (begins < ends[at])
    return np.where(inside, at, len(ordered))
