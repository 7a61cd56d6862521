"""Slices: named times on the tracks of processes, as in Perfetto's table ``slice``, as columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Slices(NamedTuple):
    """Slices as numpy columns of one length; processes, roles and names are indexes of tables.

    Attributes:
        who: Index of the process.
        role: Index of the role of the process.
        name: Index of the name.
        begin: Begin (ns).
        end: End (ns).
        took: Time in the slice (ns), less than from begin to end if a row is several slices.
        late: Total lateness of the process to collectives in the slice (ns).
        parent: Index of the slice that called it, in the caller's table; -1: none.
    """

    who: Ints
    role: Ints
    name: Ints
    begin: Floats
    end: Floats
    took: Floats
    late: Floats
    parent: Ints

    def at(self, rows: NDArray[np.bool_] | Ints | slice) -> Slices:
        """Return the rows that a mask, indices or a slice select."""
        if isinstance(rows, np.ndarray) and rows.dtype == bool:
            if rows.all():
                return self
            rows = np.flatnonzero(rows)  # once, and not for each column
        return Slices(*[column[rows] for column in self])  # type: ignore[arg-type]

    def within(self, begin: Floats | float, end: Floats | float) -> Slices:
        """Return the slices clipped to an interval, or each to its own; those outside are left
        out.
        """
        if (self.begin >= begin).all() and (self.end <= end).all():
            return self.at(self.begin < self.end)
        low, high = np.maximum(self.begin, begin), np.minimum(self.end, end)
        share = (high - low) / np.maximum(self.end - self.begin, 1.0)
        clipped = self._replace(begin=low, end=high, took=self.took * share, late=self.late * share)
        return clipped.at(low < high)

    def flat(self) -> Slices:
        """Return the slices by process and begin, each without the time of earlier ones."""
        if (self.who[1:] > self.who[:-1]).all():
            return self
        shift = self.who * self._width()
        key = self.begin + shift
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")  # mostly in order, which it makes use of
            return self.at(order).flat()
        reached = np.maximum.accumulate(self.end + shift)[:-1]
        if (reached <= key[1:]).all():
            return self
        begin = self.begin.copy()
        begin[1:] = np.clip(reached - shift[1:], self.begin[1:], self.end[1:])
        share = (self.end - begin) / np.maximum(self.end - self.begin, 1.0)
        return self._replace(begin=begin, took=self.took * share)

    def by_name(self) -> Slices:
        """Return the time in which any process was in a slice of each name, ordered by name."""
        if not self.name.size:
            return self
        shift = self.name * self._width()
        order = np.argsort(self.begin + shift)
        shift = shift[order]
        begin, end = self.begin[order] + shift, self.end[order] + shift
        reached = np.maximum.accumulate(end)
        first = np.flatnonzero(np.append(True, begin[1:] > reached[:-1]))
        last = np.append(first[1:], order.size) - 1
        union = self.at(order[first])
        return union._replace(end=reached[last] - shift[first])

    def _width(self) -> float:
        """Return a shift with which slices of two owners do not overlap (ns)."""
        return float(self.end.max() - self.begin.min()) + 1.0


def joined(parts: list[Slices]) -> Slices:
    """Concatenate tables of slices."""
    if len(parts) == 1:
        return parts[0]
    return Slices(*[np.concatenate(columns) for columns in zip(*parts, strict=True)])
