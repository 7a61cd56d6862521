"""Lays out what overlaps on rows, on which a trace viewer shows it: side by side, or one inside the other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["NOT_SHOWN", "packed_rows", "sub_rows"]

NOT_SHOWN = -1
_MOST_AT_ONCE = 100
_OWNER = -1  # what is around the outermost


def packed_rows(begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return a row for each of some spans: as many as overlap at once, and of those free the first."""
    rows = [0] * len(begins)
    busy: list[tuple[int, int]] = []  # until when, row
    free: list[int] = []
    for place in sorted(range(len(begins)), key=begins.__getitem__):
        while busy and busy[0][0] <= begins[place]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ends[place], rows[place]))
    return rows


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
