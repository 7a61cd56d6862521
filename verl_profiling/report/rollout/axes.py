"""Arithmetic on spans of many owners at once, such as those of each trajectory."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verl_profiling.report.intervals import EMPTY, Spans, subtract, union

_LARGEST = 1 << 62

Ints: TypeAlias = NDArray[np.int64]


class Axes:
    """Gives each owner an axis of its own, so that sets of spans are computed for all owners together.

    Args:
        owners: Number of owners.
        times: All instants that will be put on an axis (ns).
    """

    def __init__(self, owners: int, *times: Ints) -> None:
        found = [part for part in times if len(part)]
        self._first = min((int(part.min()) for part in found), default=0)
        self._stride = max((int(part.max()) for part in found), default=0) - self._first + 2
        self._instants: Ints | None = None
        if (
            self._stride * max(owners, 1) > _LARGEST
        ):  # places in the order of the instants then stand for them
            self._instants = _distinct(*times)
            self._stride = len(self._instants) + 1

    def put(self, owner: Ints, begin: Ints, end: Ints) -> Spans:
        """Return spans on their owners' axes, in their order."""
        return np.stack([owner * self._stride + self._place(times) for times in (begin, end)], axis=1)

    def _place(self, times: Ints) -> Ints:
        if self._instants is None:
            return times - self._first
        return np.searchsorted(self._instants, times).astype(np.int64)

    def take(self, spans: Spans) -> tuple[Ints, Ints, Ints]:
        """Return owner, begin and end of spans on their owners' axes."""
        return spans[:, 0] // self._stride, self.time(spans[:, 0]), self.time(spans[:, 1])

    def time(self, edges: Ints) -> Ints:
        """Return the instants (ns) of edges on any axes."""
        places = edges % self._stride
        return places + self._first if self._instants is None else self._instants[places]

    def left(self, spans: Spans, holes: Spans) -> tuple[Ints, Ints, Ints]:
        """Return owner, begin and end of what is in spans but in no hole of the same owner.

        Args:
            spans: At most one for each owner, of any length.
            holes: Spans that may overlap in any way.
        """
        return self.take(subtract(union(spans), union(holes)))


class Sharing:
    """Divides each instant equally among the spans of an owner that are open then.

    Args:
        owner: Owner of each span.
        begin: Begin of each span (ns).
        end: End of each span (ns).
        hidden: Time of owner 0 that no span gets.
    """

    def __init__(self, owner: Ints, begin: Ints, end: Ints, hidden: Spans = EMPTY) -> None:
        axes = Axes(int(owner.max(initial=0)) + 1, begin, end, hidden.reshape(-1))
        spans = axes.put(owner, begin, end)
        holes = axes.put(np.zeros(len(hidden), dtype=np.int64), hidden[:, 0], hidden[:, 1])
        edges = _distinct(spans.reshape(-1), holes.reshape(-1))
        self._places = np.searchsorted(edges, spans)
        # Behind the last edge of an owner nothing is open, so what lies between two axes is nobody's.
        count = _open(self._places, len(edges))
        free = (count > 0) & (_open(np.searchsorted(edges, holes), len(edges)) == 0)
        self._part = np.where(free, 1.0 / np.maximum(count, 1), 0.0)
        self._times = axes.time(edges)

    def shares(self, window: Spans | None = None) -> NDArray[np.float64]:
        """Return each span's share (ns).

        Args:
            window: The time that counts; an instant in several of its spans counts as often.
        """
        if not len(self._times):
            return np.zeros(len(self._places))
        at = self._times if window is None else _counted_before(window, self._times)
        before = np.concatenate(([0.0], np.cumsum(np.diff(at) * self._part[:-1])))
        return before[self._places[:, 1]] - before[self._places[:, 0]]


def _distinct(*parts: Ints) -> Ints:
    """Return the numbers in order, each once; sorting is several times as fast here as ``np.unique``."""
    found = np.sort(np.concatenate((np.empty(0, dtype=np.int64), *parts)))
    return found[np.concatenate(([True], found[1:] != found[:-1]))] if len(found) else found


def _open(places: Ints, edges: int) -> Ints:
    """Return how many spans are open behind each edge."""
    begun, ended = (np.bincount(places[:, side], minlength=edges) for side in (0, 1))
    return np.cumsum(begun - ended)


def _counted_before(window: Spans, instants: Ints) -> Ints:
    """Return the time of a window before each instant; what is in several of its spans counts as often."""
    if not len(window):
        return np.zeros_like(instants)
    edges = _distinct(window.reshape(-1))
    depth = _open(np.searchsorted(edges, window), len(edges))
    total = np.concatenate(([0], np.cumsum(np.diff(edges) * depth[:-1])))
    place = np.maximum(np.searchsorted(edges, instants, side="right") - 1, 0)
    found: Ints = total[place] + np.maximum(instants - edges[place], 0) * depth[place]
    return found


def ragged(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the numbers from ``first`` up to ``last`` of each row, one after the other, and their rows."""
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - starts[rows] + first[rows], rows


def innermost(owner: Ints, begin: Ints, end: Ints, parent: Ints) -> tuple[Ints, Ints, Ints]:
    """Return when spans have no other one open inside them: numbers of the spans, begins and ends.

    A span inside another that has ended is inside the one around that. A parent that comes later, or of
    another owner, is none, so there are no circles.

    Args:
        owner: Whose span each is: of which trajectory, or process.
        begin: Begins (ns); those of one owner are in order.
        end: Ends (ns).
        parent: Number of the span around each, or -1.
    """
    inside = np.flatnonzero(parent >= 0)
    around, reach = _nested(owner, begin, end, parent, inside)
    held = around >= 0
    children, parents = inside[held], around[held]
    axes = Axes(len(begin), begin, end, reach)
    whole = axes.put(np.arange(len(begin)), begin, end)
    return axes.left(whole, axes.put(parents, begin[children], reach[children]))


def _nested(owner: Ints, begin: Ints, end: Ints, parent: Ints, inside: Ints) -> tuple[Ints, Ints]:
    """Return the open parent of each selected span, and the end of each span with its descendants."""
    begins, ends, reach = begin.tolist(), end.tolist(), end.tolist()
    up, owners = np.where(parent < np.arange(len(parent)), parent, -1).tolist(), owner.tolist()
    found = []
    for child in inside.tolist():
        # An ended span stays ended for all that begin later, so the way past it is shortened for them.
        around, way = up[child], []
        while around >= 0 and ends[around] <= begins[child]:
            way.append(around)
            around = up[around]
        for passed in way:
            up[passed] = around
        found.append(around if around >= 0 and owners[around] == owners[child] else -1)
        up[child] = found[-1]
    for child, around in zip(reversed(inside.tolist()), reversed(found), strict=True):
        if around >= 0 and reach[child] > reach[around]:
            reach[around] = reach[child]
    return np.array(found, dtype=np.int64), np.array(reach, dtype=np.int64)
