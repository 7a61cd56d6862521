"""Lays out what overlaps on rows, on which a trace viewer shows it: side by side, or one inside the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import msgspec

from verl_profiling.trajectory_log import NO_SPAN, Block, SpanRecord, TrajectoryLog, TrajectoryRecord

_NOT_SHOWN = -1
_MOST_AT_ONCE = 100
_OWNER = -1  # what is around the outermost


def packed_rows(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return a row for each span (begin, end): as many as overlap at once, and of those free the first."""
    rows = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # until when, row
    free: list[int] = []
    for place in sorted(range(len(spans)), key=lambda place: spans[place][0]):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[place]))
    return rows


class Layout(msgspec.Struct, kw_only=True):
    """The rows of a log of trajectories; records without one are not shown.

    Attributes:
        names: The name of each row, from above to below.
        trajectories: The row of each trajectory, by its number.
        spans: The row of each span, by its number.
        blocks: The row of each block, by its place in the log.
        left_out: Number of records that are not wanted.
        crowded: Number of those that are, and have no row because there are too many beside them.
    """

    names: list[str] = []
    trajectories: dict[int, int] = {}
    spans: dict[int, int] = {}
    blocks: dict[int, int] = {}
    left_out: int = 0
    crowded: int = 0

    def add_rows(self, name: str, owners: Sequence[_Owner]) -> list[int]:
        """Add rows for some owners, and return the first one of each."""
        packed = packed_rows([(owner.begin, owner.end) for owner in owners])
        heights = [0] * (max(packed, default=-1) + 1)
        for owner, row in zip(owners, packed, strict=True):
            heights[row] = max(heights[row], owner.height)
        firsts = []
        for number, height in enumerate(heights):
            firsts.append(len(self.names))
            named = name if len(heights) == 1 else f"{name} {number}"
            self.names += [named if part == 1 else f"{named}.{part}" for part in range(1, height + 1)]
        return [firsts[row] for row in packed]


class _Owner(msgspec.Struct, kw_only=True):
    """An owner of rows: a block, a trajectory, or an outermost span of the process.

    Attributes:
        begin: Begin of it and its spans.
        end: End of it and its spans.
        height: Number of rows that they take.
        spans: The spans that are wanted.
    """

    begin: int
    end: int
    height: int = 0
    spans: list[SpanRecord] = []


def lay_out(
    log: TrajectoryLog,
    is_wanted: Callable[[Block | TrajectoryRecord | SpanRecord], bool],
    loop_name: Callable[[int], str],
) -> Layout:
    """Return the rows of a log: blocks by their loop, trajectories, then the process's own spans.

    What overlaps is on rows of its own, as many as there are at once. A row of trajectories is followed
    by further ones where spans of a trajectory overlap.

    Args:
        log: The log, without contradictions.
        is_wanted: Tells which records are shown.
        loop_name: Returns the name of an event loop by its number.
    """
    layout = Layout()
    by_loop: dict[int, dict[int, _Owner]] = {}
    for place, block in enumerate(log.blocks):
        if is_wanted(block):
            owner = _Owner(begin=block.begin_ns, end=block.end_ns, height=1)
            by_loop.setdefault(block.loop, {})[place] = owner
    for loop, blocks in sorted(by_loop.items()):
        rows = layout.add_rows(f"{loop_name(loop)} blocked", list(blocks.values()))
        layout.blocks.update(zip(blocks, rows, strict=True))
    trajectories = {
        one.id: _Owner(begin=one.begin_ns, end=one.end_ns, height=int(is_wanted(one)))
        for one in log.trajectories
    }
    wanted = {number for number, owner in trajectories.items() if owner.height}
    outermost: dict[int, _Owner] = {}
    owned: dict[int, _Owner] = {}  # by span of the process, the outermost around it
    for span in log.spans:
        if span.trajectory != NO_SPAN:
            owner = trajectories[span.trajectory]
        elif span.parent != NO_SPAN:
            owner = owned[span.id] = owned[span.parent]
        else:
            owner = owned[span.id] = outermost[span.id] = _Owner(begin=span.begin_ns, end=span.end_ns)
        if is_wanted(span):
            owner.spans.append(span)
    below: dict[int, int] = {}
    for owner in (*trajectories.values(), *outermost.values()):
        owner.spans.sort(key=lambda span: (span.begin_ns, -span.end_ns))  # of two alike the parent is first
        _nest(owner, below)
    for name, owners in (("trajectories", trajectories), ("spans", outermost)):
        shown = {number: owner for number, owner in owners.items() if owner.height}
        for number, first in zip(shown, layout.add_rows(name, list(shown.values())), strict=True):
            if number in wanted and owners is trajectories:
                layout.trajectories[number] = first
            for span in shown[number].spans:
                if span.id in below:
                    layout.spans[span.id] = first + below[span.id]
    asked = sum(len(owner.spans) for owner in (*trajectories.values(), *outermost.values()))
    of_blocks = len(log.blocks) - len(layout.blocks)
    layout.left_out = of_blocks + len(log.trajectories) - len(wanted) + len(log.spans) - asked
    layout.crowded = asked - len(below)
    return layout


def _nest(owner: _Owner, below: dict[int, int]) -> None:
    """Note for each span how many rows below its owner's it is, inside its parent or on a row alone.

    Children of one parent that overlap are on rows of their own, up to a hundred at once; what would need
    more is not shown. The owner grows by what is shown of it.
    """
    begin, shown = owner.begin, {span.id for span in owner.spans}
    rows: list[list[tuple[int, int]]] = [[(owner.end, _OWNER)]]  # what is open on each: until when, number
    for span in owner.spans:
        parent = span.parent if span.parent in shown else _OWNER
        row = (
            below.get(parent, _NOT_SHOWN) if parent != _OWNER else 0 if span.begin_ns >= begin else _NOT_SHOWN
        )
        if row == _NOT_SHOWN or not _is_inside(rows[row], parent, span):
            row = _first_free(rows, span.begin_ns)
        if row != _NOT_SHOWN:
            rows[row].append((span.end_ns, span.id))
            below[span.id] = row
            owner.begin, owner.end = min(owner.begin, span.begin_ns), max(owner.end, span.end_ns)
            owner.height = max(owner.height, row + 1)


def _is_inside(opened: list[tuple[int, int]], parent: int, span: SpanRecord) -> bool:
    """Close what ended before; return whether what is open then is the parent, until the span's end."""
    while opened and opened[-1][1] != parent and opened[-1][0] <= span.begin_ns:
        opened.pop()
    return bool(opened) and opened[-1][1] == parent and span.end_ns <= opened[-1][0]


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
    return _NOT_SHOWN
