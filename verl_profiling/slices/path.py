"""The path: the chain of segments that made a step as long as it is.

The path goes back from the end of the step, always to the predecessor that ended last. Predictions
have the segments of a replay, the watch those of :func:`segments_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.slices import Ints, Slices, last_begins


class PathPart(NamedTuple):
    """A segment of the path, or the delay before a segment."""

    segment: int
    begin_ns: int
    end_ns: int
    is_delay: bool


def path(
    last: int,
    first_ns: int,
    took_ns: Callable[[int], int],
    end_ns: Callable[[int], int],
    before: Callable[[int], int],
) -> list[PathPart]:
    """Return the path to a segment in order of time; the parts follow each other without a gap.

    Args:
        last: Number of the last segment.
        first_ns: Begin of the step.
        took_ns: Returns the duration of a segment.
        end_ns: Returns the end of a segment.
        before: Returns the predecessor of a segment that ended last; -1 without one.
    """
    parts_back: list[PathPart] = []
    segment = last
    while segment >= 0:
        until_ns = end_ns(segment)
        begin_ns = max(until_ns - took_ns(segment), first_ns)
        if begin_ns < until_ns:
            parts_back.append(PathPart(segment, begin_ns, until_ns, False))
        earlier = before(segment)
        since_ns = max(end_ns(earlier), first_ns) if earlier >= 0 else first_ns
        if since_ns < begin_ns:
            parts_back.append(PathPart(segment, since_ns, begin_ns, True))
        segment = earlier
    return parts_back[::-1]


class Segments(NamedTuple):
    """Slices of callers and the slices that they called, as columns of segments of paths.

    A slice of a caller is two instants: first those at the ends of all slices, last those at the
    begins. Its own time is the delay before its end, and before each called slice. Between them are
    the called slices.

    Attributes:
        took_ns: Duration.
        end_ns: End.
        before: The predecessor that ended last; -1 without one.
        row: The caller's slice in which the segment and the delay before it are; -1 in none.
        called: Row of the called slice; -1 for instants.
    """

    took_ns: Ints
    end_ns: Ints
    before: Ints
    row: Ints
    called: Ints

    def path(self, last: int, first_ns: int) -> list[PathPart]:
        """Return the path to a segment, see :func:`path`."""
        return path(last, first_ns, self.took_ns.item, self.end_ns.item, self.before.item)


def segments_of(
    slices: Slices, peers: Ints, called: Slices, is_together: NDArray[np.bool_]
) -> Segments:
    """Return the segments of callers.

    A slice that waits for a peer follows the peer's begin, so the path before that is on the peer's
    process.

    Args:
        slices: The slices by process and begin, without overlap within a process.
        peers: The peer whose begin each slice waits for, or -1.
        called: The called slices of a single process, with rows of it as parents.
        is_together: For each called slice, whether its process leaves it together with its peers.
            Then it lasts from the begin of the last peer.
    """
    order = np.lexsort((called.end, called.parent))
    parent = called.parent[order]
    since = np.where(is_together, last_begins(called), called.begin)[order]
    # Clipped to their parents, which are in order of time, all ends are in order.
    begin = np.maximum(since, slices.begin[parent])
    end = np.minimum(called.end[order], slices.end[parent])

    rows = np.arange(slices.who.size)
    first_called = rows.size
    first_begin = first_called + order.size
    last_of_row = np.searchsorted(parent, rows, side="right") - 1
    last_before = np.searchsorted(end, begin, side="right") - 1
    before_end = np.where(
        _at(parent, last_of_row) == rows,
        first_called + last_of_row,
        first_begin + np.where(peers >= 0, peers, rows),
    )
    before_called = np.where(
        _at(parent, last_before) == parent, first_called + last_before, first_begin + parent
    )
    before_begin = np.where(_at(slices.who, rows - 1) == slices.who, rows - 1, -1)
    return Segments(
        took_ns=_column(0 * rows, end - begin, 0 * rows),
        end_ns=_column(slices.end, end, slices.begin),
        before=_column(before_end, before_called, before_begin),
        row=_column(rows, parent, np.full(rows.size, -1)),
        called=_column(np.full(rows.size, -1), order, np.full(rows.size, -1)),
    )


def _at(column: Ints, rows: Ints) -> Ints:
    """Return the values of rows, which may be -1: none, as no value is that low."""
    return np.append(column, -2)[rows]


def _column(*parts: NDArray[np.float64] | Ints) -> Ints:
    return np.concatenate(parts).astype(np.int64)
