"""Arithmetic on sets of spans, each an ``(n, 2)`` array of disjoint, sorted ``[begin, end)`` in ns."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Spans: TypeAlias = NDArray[np.int64]

EMPTY: Spans = np.empty((0, 2), dtype=np.int64)
_FEW = 1 << 16
_SLICE = 1 << 16  # calls kept as Python numbers at a time, which take four times the space


def spans_of(pairs: Iterable[tuple[int, int]]) -> Spans:
    """Return the time covered by pairs of begin and end."""
    return union(np.array(list(pairs), dtype=np.int64).reshape(-1, 2))


def union(*parts: Spans) -> Spans:
    """Return the time covered by at least one span; the parts may overlap in any way."""
    spans = np.concatenate((EMPTY, *parts))
    spans = spans[spans[:, 1] > spans[:, 0]]
    if len(spans) == 0:
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((spans[first, 0], reach[last]), axis=1)


class Cover:
    """The time covered by spans that are added little by little: each is sorted a few times at most."""

    def __init__(self) -> None:
        self._covered = EMPTY
        self._added: list[Spans] = []
        self._waiting = 0

    def add(self, spans: Spans) -> None:
        """Add spans, which may overlap in any way."""
        self._added.append(union(spans))
        self._waiting += len(self._added[-1])
        if self._waiting > max(len(self._covered), _FEW):
            self.spans()

    def spans(self) -> Spans:
        """Return the time covered so far."""
        if self._added:
            self._covered = union(self._covered, *self._added)
            self._added, self._waiting = [], 0
        return self._covered


def length(spans: Spans) -> int:
    """Return the time covered, in nanoseconds."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def subtract(spans: Spans, holes: Spans) -> Spans:
    """Return the time that is in ``spans`` but not in ``holes``."""
    if len(spans) == 0 or len(holes) == 0:
        return spans
    edges = np.concatenate((spans[:, 0], holes[:, 1], spans[:, 1], holes[:, 0]))
    change = np.repeat(np.array([1, 1, -1, -1]), [len(spans), len(holes), len(spans), len(holes)])
    order = np.argsort(edges, kind="stable")
    edges, inside = edges[order], np.cumsum(change[order])
    # Inside a span and outside every hole the running count is 1; a hole lowers it by 1.
    keep = inside[:-1] >= 1
    return union(np.stack((edges[:-1][keep], edges[1:][keep]), axis=1))


def intersection(spans: Spans, other: Spans) -> Spans:
    """Return the overlap of two sets of spans."""
    return subtract(spans, subtract(spans, other))


def holding(spans: Spans, instants: Sequence[int]) -> list[bool]:
    """Return of each instant whether it is in a set of time."""
    if not len(spans) or not instants:
        return [False] * len(instants)
    at = np.array(instants, dtype=np.int64)
    begun = np.searchsorted(spans[:, 0], at, side="right")
    inside: list[bool] = ((begun > 0) & (at < spans[np.maximum(begun - 1, 0), 1])).tolist()
    return inside


def within(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """Return the part of ``spans`` from ``begin_ns`` to ``end_ns``."""
    first = np.searchsorted(spans[:, 1], begin_ns, side="right")
    last = np.searchsorted(spans[:, 0], end_ns, side="left")
    return np.clip(spans[first:last], begin_ns, end_ns)


def crowded(sets: Sequence[Spans]) -> Spans:
    """Return the time that is in more than one of the sets."""
    edges, count, _ = _counted(sets)
    keep = count > 1
    return union(np.stack((edges[:-1][keep], edges[1:][keep]), axis=1))


def divided(sets: Sequence[Spans]) -> list[float]:
    """Return each set's part of the time covered, in nanoseconds.

    Time in ``n`` sets counts for each of them with ``1 / n``, so the parts add up to the time covered.
    """
    edges, count, places = _counted(sets)
    before = np.concatenate(([0.0], np.cumsum(np.diff(edges) / np.maximum(count, 1))))
    return [float((before[place[:, 1]] - before[place[:, 0]]).sum()) for place in places]


def covered_before(spans: Spans, instants: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how much of the time before each instant is in ``spans``."""
    if not len(spans):
        return np.zeros_like(instants)
    total = np.concatenate(([0], np.cumsum(spans[:, 1] - spans[:, 0])))
    begun = np.searchsorted(spans[:, 0], instants, side="right")
    ahead = np.maximum(spans[np.maximum(begun - 1, 0), 1] - instants, 0)
    found: NDArray[np.int64] = total[begun] - np.where(begun > 0, ahead, 0)
    return found


def _counted(sets: Sequence[Spans]) -> tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return all edges, in how many sets the time between neighbours is, and where each set's edges are."""
    edges = np.unique(np.concatenate((EMPTY, *sets)))
    places = [np.searchsorted(edges, spans) for spans in sets]
    change = np.zeros(len(edges), dtype=np.int64)
    for place in places:
        change[place[:, 0]] += 1
        change[place[:, 1]] -= 1
    return edges, np.cumsum(change)[:-1], places


def nested_times(spans: Spans, threads: NDArray[Any]) -> NDArray[np.int64]:
    """Return the self time of each call (ns): its duration less that of the calls directly inside it.

    On one thread calls nest. Sorted by begin, longest first, a call is inside the nearest
    earlier one that has not ended when it begins.
    """
    own: NDArray[np.int64] = spans[:, 1] - spans[:, 0]
    order = np.lexsort((-own, spans[:, 0], threads))
    ordered = threads[order]
    reaches = spans[order[1:], 0] < spans[order[:-1], 1]
    nesting = np.unique(ordered[1:][reaches & (ordered[1:] == ordered[:-1])])  # few streams of devices nest
    order = order[np.isin(ordered, nesting)]
    inside = np.zeros(len(order), np.int64)  # for each call, the time in nested calls
    parents, ends, thread = array("q"), array("q"), None  # of the open calls: index and end
    for start in range(0, len(order), _SLICE):
        part = order[start : start + _SLICE]
        calls = zip(spans[part, 0].tolist(), spans[part, 1].tolist(), threads[part].tolist(), strict=True)
        for index, (begin, end, own_thread) in enumerate(calls, start):
            if own_thread != thread:
                thread, parents, ends = own_thread, array("q"), array("q")
            while ends and ends[-1] <= begin:
                parents.pop()
                ends.pop()
            if ends:
                inside[parents[-1]] += min(end, ends[-1]) - begin
            parents.append(index)
            ends.append(end)
    own[order] -= inside
    return own


def percentiles(sample: Sequence[float] | NDArray[np.float64], *which: int) -> list[Any]:
    """Return percentiles of a sample; ``None`` for each where it is empty."""
    return np.percentile(sample, which).tolist() if len(sample) else [None] * len(which)
