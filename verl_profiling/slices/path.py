"""The path: the chain of slices that made a step as long as it is.

The path goes back from the end of the step. A slice that waits for a peer begins, on the path, when
the peer begins; before that, the path is on the peer's process. In a slice with called slices, the
path goes to the one that ended last, and from its begin back into the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.slices import Ints, Slices
from verl_profiling.slices.waits import last_begins


class PathPart(NamedTuple):
    """A part of the path, in time.

    Attributes:
        row: Row of the slice; -1 in no slice.
        called: Row of the called slice; -1 in the slice's own time.
        begin: Begin (ns).
        end: End (ns).
    """

    row: int
    called: int
    begin: float
    end: float


def path(slices: Slices, waits: Ints, rows: slice, begin: float, end: float) -> list[PathPart]:
    """Return the path of a step through the processes that run a loop, the last part first.

    Args:
        slices: The slices by process and begin, without overlap within a process.
        waits: The peer that each slice waits for, or -1.
        rows: The rows of the step, which are within it.
        begin: Begin of the step (ns).
        end: End of the step (ns).
    """
    parts: list[PathPart] = []
    lanes, begins = slices.who[rows].tolist(), slices.begin[rows].tolist()
    ends, peers = slices.end[rows].tolist(), waits[rows].tolist()
    row = max(range(len(ends)), key=ends.__getitem__, default=-1)
    lane = lanes[row] if lanes else -1
    until = end
    while row >= 0 and lanes[row] == lane:
        if ends[row] < until:
            parts.append(PathPart(-1, -1, ends[row], until))
            until = ends[row]
        on_path, peer = row, peers[row] - rows.start
        if peer >= 0 and begins[peer] < until:
            row = peer
        if begins[row] < until:
            parts.append(PathPart(rows.start + on_path, -1, begins[row], until))
        until, lane = begins[row], lanes[row]
        row -= 1
    if until > begin:
        parts.append(PathPart(-1, -1, begin, until))
    return parts


def with_calls(
    parts: Sequence[PathPart], called: Slices, is_together: NDArray[np.bool_]
) -> Iterator[PathPart]:
    """Yield the parts of a path, divided by the called slices that it goes through.

    Args:
        parts: The path through the caller.
        called: The called slices, with rows of the caller as parents.
        is_together: For each called slice, whether its process leaves it together with its peers.
            Then it lasts from the begin of the last peer.
    """
    order = np.lexsort((called.end, called.parent))
    most = max((part.row for part in parts), default=-1)
    borders = np.searchsorted(called.parent[order], np.arange(most + 2)).tolist()
    since = np.where(is_together, last_begins(called), called.begin)[order]
    ends = called.end[order]
    for part in parts:
        until = part.end
        first, last = (borders[part.row], borders[part.row + 1]) if part.row >= 0 else (0, 0)
        while first < last and until > part.begin:
            # What ended after the part was waited for until then.
            latest = float("inf") if until == part.end else until
            last = first + int(np.searchsorted(ends[first:last], latest, side="right")) - 1
            if last < first or ends[last] <= part.begin:
                break
            end, begin = min(float(ends[last]), until), max(float(since[last]), part.begin)
            if end < until:
                yield part._replace(begin=end, end=until)
            yield part._replace(called=int(order[last]), begin=begin, end=end)
            until = begin
        if until > part.begin:
            yield part._replace(end=until)
