"""Lays out what overlaps on rows, on which a trace viewer shows it: side by side, or one inside the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from verl_profiling.timeline.logs import Ints, Mask, Shape, shape_of, tables
from verl_profiling.timeline.requests import packed_rows
from verl_profiling.trajectory_log import TrajectoryLog

NOT_SHOWN = -1
_MOST_AT_ONCE = 100
_OWNER = -1  # what is around the outermost


def sub_rows(spans: Sequence[Sequence[int]], owner_begin: int, owner_end: int) -> list[int]:
    """Return a row for each span below one owner, so that each is inside its parent or on a row alone.

    Row 0 is the owner's. Children of one parent that overlap are on rows of their own, up to a hundred
    at once; what would need more is not shown.

    Args:
        spans: Place of the parent among them (negative for none), begin and end of each, in rows: what
            begins first before the others, and a parent before its children.
        owner_begin: When the owner begins.
        owner_end: When it ends.
    """
    found = [NOT_SHOWN] * len(spans)
    rows: list[list[tuple[int, int]]] = [[(owner_end, _OWNER)]]  # what is open on each: until when, place
    for place, (parent, begin, end) in enumerate(spans):
        parent = max(parent, _OWNER)
        row = found[parent] if parent >= 0 else 0 if begin >= owner_begin else NOT_SHOWN
        if row == NOT_SHOWN or not _is_inside(rows[row], parent, begin, end):
            row = _first_free(rows, begin)
        if row != NOT_SHOWN:
            rows[row].append((end, place))
            found[place] = row
    return found


def _is_inside(opened: list[tuple[int, int]], parent: int, begin: int, end: int) -> bool:
    """Close what ended before; return whether what is open then is the parent, until the end."""
    while opened and opened[-1][1] != parent and opened[-1][0] <= begin:
        opened.pop()
    return bool(opened) and opened[-1][1] == parent and end <= opened[-1][0]


def _first_free(rows: list[list[tuple[int, int]]], begin: int) -> int:
    """Return the first row, behind the owner's, on which nothing is open."""
    for number, opened in enumerate(rows[1:], 1):
        while opened and opened[-1][0] <= begin:
            opened.pop()
        if not opened:
            return number
    if len(rows) < _MOST_AT_ONCE:
        rows.append([])
        return len(rows) - 1
    return NOT_SHOWN


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a log of trajectories, by the place of each record in it.

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
    log: TrajectoryLog, keep: Callable[[Ints, Ints], Mask], loop_name: Callable[[int], str]
) -> Layout:
    """Return the rows of a log: blocks by their loop, trajectories, then the process's own spans.

    What overlaps is on rows of its own, as many as there are at once. A row of trajectories is followed
    by further ones where spans of a trajectory overlap.

    Args:
        log: The log, without contradictions.
        keep: Tells from begins and ends which records are wanted.
        loop_name: Returns the name of an event loop by its number.
    """
    trajectories, spans = tables(log)
    shape = shape_of(trajectories, spans)
    blocks = np.array([(b.loop, b.begin_ns, b.end_ns) for b in log.blocks], np.int64).reshape(-1, 3)
    rows = _Rows()
    wanted_blocks = keep(blocks[:, 1], blocks[:, 2])
    of_blocks = np.full(len(blocks), NOT_SHOWN)
    for loop in np.unique(blocks[wanted_blocks, 0]).tolist():
        own = np.flatnonzero(wanted_blocks & (blocks[:, 0] == loop))
        one_each = np.ones(len(own), np.int64)
        of_blocks[own] = rows.add(f"{loop_name(loop)} blocked", blocks[own, 1], blocks[own, 2], one_each)

    # Owners are the trajectories, and behind them the outermost spans of the process.
    count = len(trajectories)
    owners = np.where(shape.owner >= 0, shape.owner, count + shape.root)
    begins = np.concatenate((trajectories[:, 1], spans[:, 3]))
    ends = np.concatenate((trajectories[:, 2], spans[:, 4]))
    wanted_trajectories = keep(trajectories[:, 1], trajectories[:, 2])
    wanted_spans = keep(spans[:, 3], spans[:, 4])
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
    wanted = np.concatenate((wanted_blocks, wanted_trajectories, wanted_spans))
    return Layout(
        names=rows.names,
        trajectories=np.where(wanted_trajectories, firsts[:count], NOT_SHOWN),
        spans=np.where(placed, firsts[owners] + below, NOT_SHOWN),
        blocks=of_blocks,
        left_out=int((~wanted).sum()),
        crowded=int((wanted_spans & ~placed).sum()),
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
