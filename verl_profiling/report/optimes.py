"""Self time of operators: their duration less that of the operators inside them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_profiling.report.intervals import Spans

__all__ = ["OpTimes", "Window", "self_times"]

_SLICE = 1 << 16  # calls kept as Python numbers at a time, which take four times the space

Window = tuple[str, int, int]
"""Name, begin and end (ns) of a stage."""


class OpTimes:
    """Calls of operators, gathered while a trace is read.

    Attributes:
        names: Name by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._calls: list[tuple[Spans, NDArray[np.int32], NDArray[np.int64]]] = []

    def number(self, name: str) -> int:
        """Return a new number for a name; a name may have several."""
        self.names.append(name)
        return len(self.names) - 1

    def add(self, spans: Spans, numbers: ArrayLike, threads: Sequence[int]) -> None:
        """Add calls: begin and end, operator, and the thread or stream (calls nest inside one)."""
        if len(spans):
            self._calls.append((spans, np.array(numbers, np.int32), np.array(threads, np.int64)))

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()

    def by_stage(self, windows: Sequence[Window]) -> dict[tuple[str, str], tuple[int, int]]:
        """Return calls and self time (ns) by stage and operator; a call belongs to the stage it begins in.

        Args:
            windows: Stages that do not overlap; outside of them the stage is ``""``.
        """
        if not self._calls:
            return {}
        spans, numbers, threads = (np.concatenate(part) for part in zip(*self._calls, strict=True))
        own = self_times(spans, threads)
        stages = _stage_of(spans[:, 0], windows)
        keys = stages * len(self.names) + numbers
        found, inverse = np.unique(keys, return_inverse=True)
        calls = np.bincount(inverse)
        totals = np.zeros(len(found), np.int64)
        np.add.at(totals, inverse, own)
        named = [*(name for name, _, _ in sorted(windows, key=lambda w: w[1])), ""]
        result: dict[tuple[str, str], tuple[int, int]] = {}
        for key, count, total in zip(found.tolist(), calls.tolist(), totals.tolist(), strict=True):
            stage, number = divmod(key, len(self.names))
            place = (named[stage], self.names[number])
            before = result.get(place, (0, 0))  # a stage that ran twice has two windows
            result[place] = (before[0] + count, before[1] + total)
        return result


def self_times(spans: Spans, threads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the self time of each call, in nanoseconds.

    On one thread calls nest. Sorted by begin, longest first, a call is inside the nearest
    earlier one that has not ended when it begins.
    """
    own = spans[:, 1] - spans[:, 0]
    order = np.lexsort((-own, spans[:, 0], threads))
    inside = array("q", bytes(8 * len(order)))  # for each call, the time in nested calls
    stack: list[tuple[int, int]] = []  # index and end of the open calls
    thread = None
    for start in range(0, len(order), _SLICE):
        part = order[start : start + _SLICE]
        calls = zip(spans[part, 0].tolist(), spans[part, 1].tolist(), threads[part].tolist(), strict=True)
        for index, (begin, end, own_thread) in enumerate(calls, start):
            if own_thread != thread:
                thread = own_thread
                stack.clear()
            while stack and stack[-1][1] <= begin:
                stack.pop()
            if stack:
                parent, parent_end = stack[-1]
                inside[parent] += min(end, parent_end) - begin
            stack.append((index, end))
    result: NDArray[np.int64] = own.copy()
    result[order] -= np.frombuffer(inside, np.int64)
    return result


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
