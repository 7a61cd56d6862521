"""Where the records of a log of trajectories are shown: the row of each, by its place in the log.

It keeps numbers only, so that a log of 200,000 spans takes tens of megabytes and not hundreds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np

from verl_profiling.timeline.log_shape import Ints, Mask, Shape
from verl_profiling.timeline.rows import NOT_SHOWN, packed_rows, sub_rows
from verl_profiling.trajectory_log import Block, Line, SpanRecord, TrajectoryRecord

__all__ = ["Layout", "Numbers", "lay_out"]

MOST_ROWS = 100_000


class Numbers:
    """The numbers of the records of a log, which are taken as they are read."""

    def __init__(self) -> None:
        self._trajectories = array("q")
        self._spans = array("q")
        self._blocks = array("q")

    def take(self, line: Line) -> None:
        """Take a record."""
        match line:
            case SpanRecord():
                self._spans.extend((line.id, line.trajectory, line.parent, line.begin_ns, line.end_ns))
            case TrajectoryRecord():
                self._trajectories.extend((line.id, line.begin_ns, line.end_ns))
            case Block():
                self._blocks.extend((line.loop, line.span, line.begin_ns, line.end_ns))

    @property
    def trajectories(self) -> Ints:
        """Number, begin and end of each trajectory, in rows."""
        return np.frombuffer(self._trajectories, np.int64).reshape(-1, 3)

    @property
    def spans(self) -> Ints:
        """Number, trajectory, parent, begin and end of each span, in rows."""
        return np.frombuffer(self._spans, np.int64).reshape(-1, 5)

    @property
    def blocks(self) -> Ints:
        """Loop, span, begin and end of each block, in rows."""
        return np.frombuffer(self._blocks, np.int64).reshape(-1, 4)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a log.

    Attributes:
        names: The name of each row, from above to below.
        trajectories: The row of each trajectory, or ``NOT_SHOWN``.
        spans: The row of each span, likewise.
        blocks: The row of each block, likewise.
        left_out: Number of records that are not wanted.
        crowded: Number of those that are, and have no row because there are too many beside them.
    """

    names: list[str]
    trajectories: Ints
    spans: Ints
    blocks: Ints
    left_out: int
    crowded: int


def lay_out(
    numbers: Numbers, shape: Shape, keep: Callable[[Ints, Ints], Mask], loop_name: Callable[[int], str]
) -> Layout:
    """Return the rows of a log: blocks by their loop, trajectories, then the process's own spans.

    What overlaps is on rows of its own, as many as there are at once. A row of trajectories is followed
    by further ones where spans of a trajectory overlap.

    Args:
        numbers: The records.
        shape: What stands of them.
        keep: Tells from begins and ends which records are wanted.
        loop_name: Returns the name of an event loop by its number.
    """
    trajectories, spans, blocks = numbers.trajectories, numbers.spans, numbers.blocks
    rows = _Rows()
    standing_blocks = blocks[:, 2] <= blocks[:, 3]
    wanted_blocks = standing_blocks & keep(blocks[:, 2], blocks[:, 3])
    of_blocks = np.full(len(blocks), NOT_SHOWN)
    for loop in np.unique(blocks[wanted_blocks, 0]).tolist():
        own = np.flatnonzero(wanted_blocks & (blocks[:, 0] == loop))
        one_each = np.ones(len(own), np.int64)
        of_blocks[own] = rows.add(f"{loop_name(loop)} blocked", blocks[own, 2], blocks[own, 3], one_each)

    # Owners are the trajectories, and behind them the outermost spans of the process.
    count = len(trajectories)
    owners = np.where(shape.owner >= 0, shape.owner, count + shape.root)
    begins = np.concatenate((trajectories[:, 1], spans[:, 3]))
    ends = np.concatenate((trajectories[:, 2], spans[:, 4]))
    wanted_trajectories = shape.trajectories & keep(trajectories[:, 1], trajectories[:, 2])
    wanted_spans = shape.spans & keep(spans[:, 3], spans[:, 4])
    below = _below(spans, shape, wanted_spans, owners, begins, ends)
    placed = below != NOT_SHOWN
    np.minimum.at(begins, owners[placed], spans[placed, 3])
    np.maximum.at(ends, owners[placed], spans[placed, 4])
    heights = np.zeros(len(begins), np.int64)
    heights[:count] = wanted_trajectories
    np.maximum.at(heights, owners[placed], below[placed] + 1)
    firsts = np.full(len(begins), NOT_SHOWN)
    for name, first, last in (("trajectories", 0, count), ("spans", count, len(begins))):
        own = first + np.flatnonzero(heights[first:last])
        firsts[own] = rows.add(name, begins[own], ends[own], heights[own])
    of_trajectories = np.where(wanted_trajectories, firsts[:count], NOT_SHOWN)
    of_spans = np.where(placed, firsts[owners] + below, NOT_SHOWN)
    for found in (of_blocks, of_trajectories, of_spans):
        found[found >= MOST_ROWS] = NOT_SHOWN
    standing = sum(int(mask.sum()) for mask in (standing_blocks, shape.trajectories, shape.spans))
    wanted = sum(int(mask.sum()) for mask in (wanted_blocks, wanted_trajectories, wanted_spans))
    shown = sum(int((found != NOT_SHOWN).sum()) for found in (of_blocks, of_trajectories, of_spans))
    return Layout(
        names=rows.names[:MOST_ROWS],
        trajectories=of_trajectories,
        spans=of_spans,
        blocks=of_blocks,
        left_out=standing - wanted,
        crowded=wanted - shown,
    )


class _Rows:
    """The rows that are taken, from above to below."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str, begins: Ints, ends: Ints, heights: Ints) -> Ints:
        """Return the first row of each of some owners; where one takes several, its row has as many."""
        packed = np.array(packed_rows(begins.tolist(), ends.tolist()), np.int64)
        height = np.zeros(packed.max(initial=-1) + 1, np.int64)
        np.maximum.at(height, packed, heights)
        firsts = len(self.names) + np.cumsum(height) - height
        for number, parts in enumerate(height.tolist()):
            named = name if len(height) == 1 else f"{name} {number}"
            self.names += [named if part == 1 else f"{named}.{part}" for part in range(1, parts + 1)]
        return firsts[packed]


def _below(spans: Ints, shape: Shape, wanted: Mask, owners: Ints, begins: Ints, ends: Ints) -> Ints:
    """Return for each wanted span how many rows below its owner's it is, or ``NOT_SHOWN``."""
    order = np.flatnonzero(wanted)
    keys = (shape.depth[order], -spans[order, 4], spans[order, 3], owners[order])
    order = order[np.lexsort(keys)]
    place = np.full(len(spans) + 1, -1)  # the last is that of no parent
    place[order] = np.arange(len(order))
    table = np.column_stack((place[shape.parent[order]], spans[order, 3], spans[order, 4]))
    below = np.full(len(spans), NOT_SHOWN)
    edges = np.flatnonzero(np.diff(owners[order], prepend=-1, append=-1))
    for first, last in pairwise(edges.tolist()):
        owner = owners[order[first]]
        table[first:last, 0] -= first
        below[order[first:last]] = sub_rows(table[first:last].tolist(), int(begins[owner]), int(ends[owner]))
    return below
