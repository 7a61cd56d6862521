"""Arithmetic on sets of time.

A set of time is an ``(n, 2)`` array of disjoint, sorted intervals ``[begin, end)`` in ns. Spans
that are no set of time may overlap, and have any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Spans: TypeAlias = NDArray[np.int64]
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", np.int64, np.float64)

EMPTY: Spans = np.empty((0, 2), dtype=np.int64)
_LARGEST = 1 << 62  # beyond all times (ns), and the end of an axis


def spans_of(pairs: Iterable[tuple[int, int]]) -> Spans:
    """Return the time covered by pairs of begin and end."""
    return union(np.array(list(pairs), dtype=np.int64).reshape(-1, 2))


def time_of(runs: Iterable[Any], *names: str) -> Spans:
    """Return the time covered by objects with ``begin_ns`` and ``end_ns``, e.g. stage spans; with
    names, only by those of these names.
    """
    return spans_of((run.begin_ns, run.end_ns) for run in runs if not names or run.name in names)


def union(*parts: Spans) -> Spans:
    """Return the time that at least one span covers; spans may overlap."""
    spans = np.concatenate((EMPTY, *parts))
    spans = spans[spans[:, 1] > spans[:, 0]]
    if len(spans) == 0:
        return EMPTY
    if (spans[1:, 0] < spans[:-1, 0]).any():
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate(([True], spans[1:, 0] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((spans[first, 0], reach[last]), axis=1)


def length(spans: Spans) -> int:
    """Return the time covered, in nanoseconds."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def subtract(spans: Spans, holes: Spans) -> Spans:
    """Return the time in ``spans`` but not in ``holes``, which are sets of time."""
    return _where(1, spans, holes) if len(spans) and len(holes) else spans


def crowded(sets: Sequence[Spans]) -> Spans:
    """Return the spans that lie in at least two of the sets."""
    return _where(2, np.concatenate((EMPTY, *sets)))


def _where(least: int, spans: Spans, holes: Spans = EMPTY) -> Spans:
    """Return the time in which at least ``least`` spans are open; each open hole subtracts 1."""
    edges = np.concatenate((spans[:, 0], holes[:, 1], spans[:, 1], holes[:, 0]))
    change = np.repeat(
        np.array([1, 1, -1, -1], np.int8), [len(spans), len(holes), len(spans), len(holes)]
    )
    order = np.argsort(edges, kind="stable")
    edges, inside = edges[order], np.cumsum(change[order], dtype=np.int32)
    del order, change  # of millions of edges, each array is tens of megabytes
    keep = np.flatnonzero(inside[:-1] >= least)
    return union(np.stack((edges[keep], edges[keep + 1]), axis=1))


def intersection(spans: Spans, other: Spans) -> Spans:
    """Return the overlap of two sets of spans."""
    return crowded([spans, other]) if len(spans) and len(other) else EMPTY


def common(sets: Sequence[Spans]) -> Spans:
    """Return the time in all of the sets; empty if there are no sets."""
    return reduce(intersection, sets) if sets else EMPTY


def holding(spans: Spans, instants: Ints) -> NDArray[np.bool_]:
    """Return for each instant whether a set of time contains it."""
    begun = np.searchsorted(spans[:, 0], instants, side="right")  # 0: before the first span
    inside: NDArray[np.bool_] = instants < np.append(spans[:, 1], -_LARGEST)[begun - 1]
    return inside


def within(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """Return the part of ``spans`` from ``begin_ns`` to ``end_ns``."""
    first = np.searchsorted(spans[:, 1], begin_ns, side="right")
    last = np.searchsorted(spans[:, 0], end_ns, side="left")
    return np.clip(spans[first:last], begin_ns, end_ns)


def covered_before(spans: NDArray[Any], instants: NDArray[_Number]) -> NDArray[_Number]:
    """Return the total length of the spans before each instant; spans may overlap, and each counts.

    Sums may exceed the range of an integer and wrap around; differences of sums are still exact.
    """
    since = []
    for side in (0, 1):
        ordered = np.sort(spans[:, side])
        count = np.searchsorted(ordered, instants)
        since.append(count * instants - np.concatenate(([0], np.cumsum(ordered)))[count])
    covered: NDArray[_Number] = since[0] - since[1]
    return covered


def overlaps(spans: Spans, other: Spans) -> Ints:
    """Return the overlap (ns) of each span with a set of time."""
    overlap: Ints = np.diff(covered_before(other, spans), axis=1)[:, 0]
    return overlap


class Axes:
    """Shifts the spans of each owner to a separate range of one axis.

    An owner is e.g. a thread. Spans of different threads do not overlap on the axis, so one call of
    :func:`union` handles all threads.

    Args:
        owners: Number of owners.
        times: All instants (ns) that will be shifted; their extent is the length of a range.
    """

    def __init__(self, owners: int, *times: Ints) -> None:
        edges = [edge for part in times if len(part) for edge in (int(part.min()), int(part.max()))]
        self._first = min(edges, default=0)
        took_ns = max(edges, default=0) - self._first + 2
        self._unit = took_ns * max(owners, 1) // _LARGEST + 1  # ns; more than 1 for years of time
        self._stride = took_ns // self._unit + 2

    def put(self, owner: Ints, begin: Ints, end: Ints) -> Spans:
        """Return spans shifted to their owners' ranges, in the given order."""
        places = [
            owner * self._stride + (times - self._first) // self._unit for times in (begin, end)
        ]
        return np.stack(places, axis=1)

    def take(self, spans: Spans) -> tuple[Ints, Ints, Ints]:
        """Return owner, begin and end of shifted spans; the inverse of :meth:`put`."""
        return spans[:, 0] // self._stride, self.time(spans[:, 0]), self.time(spans[:, 1])

    def time(self, edges: Ints) -> Ints:
        """Return the instants (ns) of shifted edges."""
        return edges % self._stride * self._unit + self._first


def without(begin: Ints, end: Ints, owner: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the time of each owner outside its holes, as intervals: owner, begin, end.

    For example, an owner is a span, and its holes are the spans inside it.

    Args:
        begin: Begin of each owner (ns).
        end: End of each owner (ns).
        owner: Owner of each hole.
        low: Begin of each hole (ns); holes may overlap in any way.
        high: End of each hole (ns).
    """
    axes = Axes(len(begin), begin, end, low, high)
    whole = axes.put(np.arange(len(begin)), begin, end)
    return axes.take(subtract(union(whole), union(axes.put(owner, low, high))))


class Sharing:
    """Divides each instant equally among the spans of one owner that are open at that instant.

    For example, two spans of one owner, both from 0 to 10 ns, have a share of 5 ns each.

    Args:
        begin: Begin of each span (ns).
        end: End of each span (ns).
        owner: Owner of each span; ``None`` if all have the same.
        hidden: Time of owner 0 of which no span gets a share.
    """

    def __init__(
        self, begin: Ints, end: Ints, owner: Ints | None = None, hidden: Spans = EMPTY
    ) -> None:
        if owner is None:
            owner = np.zeros_like(begin)
        axes = Axes(int(owner.max(initial=0)) + 1, begin, end, hidden.reshape(-1))
        spans = axes.put(owner, begin, end)
        holes = axes.put(np.zeros_like(hidden[:, 0]), hidden[:, 0], hidden[:, 1])
        edges = np.sort(np.concatenate((spans.reshape(-1), holes.reshape(-1))))
        edges = (
            edges[np.append(True, np.diff(edges) > 0)] if len(edges) else edges
        )  # faster than np.unique
        self._places = np.searchsorted(edges, spans)
        # No span is open after an owner's last edge, so the gap between two owners' ranges gets no
        # share.
        count = _open(self._places, len(edges))
        free = (count > 0) & (_open(np.searchsorted(edges, holes), len(edges)) == 0)
        self._part = np.where(free, 1.0 / np.maximum(count, 1), 0.0)
        self._times = axes.time(edges)

    def shares(self, window: Spans | None = None) -> NDArray[np.float64]:
        """Return each span's share (ns).

        Args:
            window: The intervals to divide; an instant in two intervals counts twice.
        """
        if not len(self._times):
            return np.zeros(len(self._places))
        at = self._times if window is None else covered_before(window, self._times)
        before = np.concatenate(([0.0], np.cumsum(np.diff(at) * self._part[:-1])))
        return before[self._places[:, 1]] - before[self._places[:, 0]]


def _open(places: Ints, edges: int) -> Ints:
    """Return the number of spans that are open after each edge.

    Args:
        places: Indexes of each span's begin and end among the sorted edges.
        edges: Number of edges.
    """
    begun, ended = (np.bincount(places[:, side], minlength=edges) for side in (0, 1))
    return np.cumsum(begun - ended)


class Nesting(NamedTuple):
    """Calls and the calls around them, as columns in order of thread and begin, longest first.

    Attributes:
        order: Index of each call in the input of :func:`nesting_of`.
        begin: Begin of each call, on an axis with a range per thread (see :class:`Axes`).
        end: End of each call, on the same axis.
        inner: Rows of the calls that begin inside another call.
        parent: Row of the innermost call around each inner call; 0 for all other calls.
    """

    order: Ints
    begin: Ints
    end: Ints
    inner: Ints
    parent: NDArray[np.int32]

    @property
    def nests(self) -> bool:
        """Whether all calls end inside the call in which they begin."""
        return bool((self.end[self.inner] <= self.end[self.parent[self.inner]]).all())


def nesting_of(spans: Spans, threads: NDArray[Any]) -> Nesting:
    """Return which call is inside which, in each thread.

    Sorted by begin, longest first, the parent of a call is the nearest earlier call that is still
    open: the previous call, or one of its parents.

    Args:
        spans: Begin and end of each call (ns).
        threads: Number of each call's thread.
    """
    axes = Axes(int(threads.max(initial=0)) + 1, spans.reshape(-1))
    placed = axes.put(threads.astype(np.int64), spans[:, 0], spans[:, 1])
    order = np.lexsort((-placed[:, 1], placed[:, 0]))
    begin, end = placed[order].T
    inner = np.flatnonzero(begin[1:] < np.maximum.accumulate(end)[:-1]) + 1
    parent = np.zeros(len(order), np.int32)
    parent[inner] = inner - 1
    closed = inner
    while len(closed := closed[end[parent[closed]] <= begin[closed]]):
        parent[closed] = parent[parent[closed]]
    return Nesting(order, begin, end, inner, parent)


def nested_times(spans: Spans, threads: NDArray[Any]) -> Ints:
    """Return the self time of each call (ns): its duration minus the durations of its direct
    children.
    """
    order, begin, end, inner, parent = nesting_of(spans, threads)
    self_times: Ints = spans[:, 1] - spans[:, 0]
    took = np.minimum(end[inner], end[parent[inner]]) - begin[inner]
    self_times[order] -= np.bincount(parent[inner], took, len(order)).astype(np.int64)
    return self_times


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return items by key, in the order of the first item of each key."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def percentiles(sample: Sequence[float] | NDArray[np.float64], *which: int) -> list[Any]:
    """Return percentiles of a sample; all are ``None`` for an empty sample."""
    return np.percentile(sample, which).tolist() if len(sample) else [None] * len(which)
