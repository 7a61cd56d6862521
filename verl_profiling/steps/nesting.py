"""Rows for spans that nest or overlap, as pictures and graphs need them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from verl_profiling.files.trajectory_log import SpanRecord, TrajectoryRecord
from verl_profiling.manifest import StageSpan

_MOST_ROWS = 64  # of stages, or of the spans of a trajectory


_Span = TypeVar("_Span", bound=StageSpan | TrajectoryRecord | SpanRecord)


def packed_rows(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lowest free row for each span (begin, end), so that no spans of a row overlap."""
    rows = [0] * len(spans)
    busy: list[tuple[int, int]] = []  # end, row
    free: list[int] = []
    for place in sorted(range(len(spans)), key=lambda place: spans[place][0]):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, rows[place]))
    return rows


def nested_rows(spans: Iterable[_Span], is_child: Callable[[_Span, _Span], bool]) -> list[int]:
    """Return a row for each span, so that spans of a row are nested or do not overlap.

    A span has the row of its parent, if the parent is the innermost span there and encloses the
    span, else the first free row. There are at most 64 rows; further concurrent spans share the
    last row.

    Args:
        spans: The spans, parents before their children.
        is_child: Function that returns whether the first span is a child of the second.
    """
    rows: list[list[_Span]] = []  # open spans of each row, outermost first
    row_of_each = []
    for span in spans:
        begin_ns, end_ns = span.begin_ns, span.end_ns
        free, parent = len(rows), None
        for number, opened in enumerate(rows):
            while opened and opened[-1].end_ns <= begin_ns:
                opened.pop()
            if not opened:
                free = min(free, number)
                continue
            inner = opened[-1]
            is_around = (
                inner.begin_ns <= begin_ns and end_ns <= inner.end_ns and is_child(span, inner)
            )
            if is_around and (parent is None or inner.begin_ns > parent.begin_ns):
                parent, row = inner, number
        if parent is None:
            row = min(free, _MOST_ROWS - 1)
        if row == len(rows):
            rows.append([])
        rows[row].append(span)
        row_of_each.append(row)
    return row_of_each


def stages_by_row(spans: Iterable[StageSpan]) -> Iterator[tuple[StageSpan, int]]:
    """Yield stages in order of begin, each with its row; the depth tells the parent."""
    ordered = sorted(spans, key=lambda span: (span.begin_ns, span.depth, -span.end_ns))
    rows = nested_rows(ordered, lambda span, around: around.depth == span.depth - 1)
    return zip(ordered, rows, strict=True)
