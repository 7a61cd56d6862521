"""Slices: named times on the tracks of processes, as in Perfetto's table ``slice``, as columns.

A slice waits for other slices in two ways. A caller, e.g. the loop in ``update_actor``, waits for
the slices that it called in workers. A rank waits for its peers, e.g. in a collective. Both are
assumed from names and times, because nothing records them between processes.

The critical path is the chain of segments that made a step as long as it is. It goes back from the
end of the step, always to the predecessor that ended last. The watch uses the segments of
:func:`segments_of`; predictions use those of a simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LATE_END = 0.05
"""Share of a caller's slice by which a called slice may end later, as clocks of hosts differ."""


class Slices(NamedTuple):
    """Slices as numpy columns of one length; ``who``, ``role`` and ``name`` are indexes of lists
    outside of the table.

    Attributes:
        who: Index of the process.
        role: Index of the role of the process.
        name: Index of the name.
        begin: Begin (ns).
        end: End (ns).
        took: Time in the slice (ns). It is less than ``end - begin`` if a row stands for several
            slices with gaps.
        late: Time by which the process entered the slice's collectives after its peers, summed
            (ns).
        parent: Row of the slice that called this one, in the caller's table; -1 without one.
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
        """Return the slices clipped to one interval, or each to an interval of its own; slices
        outside are left out.
        """
        if (self.begin >= begin).all() and (self.end <= end).all():
            return self.at(self.begin < self.end)
        low, high = np.maximum(self.begin, begin), np.minimum(self.end, end)
        share = (high - low) / np.maximum(self.end - self.begin, 1.0)
        clipped = self._replace(begin=low, end=high, took=self.took * share, late=self.late * share)
        return clipped.at(low < high)

    def flat(self) -> Slices:
        """Return the slices sorted by process and begin, without overlap inside a process.

        Where two slices of a process overlap, the earlier slice keeps the time.
        """
        if (self.who[1:] > self.who[:-1]).all():
            return self
        shift = self.who * self._width()
        key = self.begin + shift
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")  # fast, as most rows are in order
            return self.at(order).flat()
        reached = np.maximum.accumulate(self.end + shift)[:-1]
        if (reached <= key[1:]).all():
            return self
        begin = self.begin.copy()
        begin[1:] = np.clip(reached - shift[1:], self.begin[1:], self.end[1:])
        share = (self.end - begin) / np.maximum(self.end - self.begin, 1.0)
        return self._replace(begin=begin, took=self.took * share)

    def on_path(self, until: Floats) -> Slices:
        """Return the slices like :meth:`flat`, each with its time on the path through its process.

        Of slices that overlap, the one that ended last has its whole time, and the path goes on
        before its begin. A slice that does not end before ``until`` was not waited for.
        """
        flat = self.flat()
        is_sparse = 2 * self.took < self.end - self.begin  # many runs: it hides none between them
        if is_sparse.any() or (flat.end - flat.begin).sum() == (self.end - self.begin).sum():
            return flat
        end = self.begin.copy()
        for who in np.unique(self.who):
            rows = np.flatnonzero(self.who == who)
            until_ns, next_ns = until[rows[0]], np.inf
            while rows.size:
                is_over = self.end[rows] <= until_ns
                last = np.where(is_over, self.end[rows], self.begin[rows])
                row = rows[np.lexsort((self.end[rows], last))[-1]]
                end[row] = min(self.end[row], next_ns)
                until_ns = next_ns = self.begin[row]
                rows = rows[self.begin[rows] < until_ns]
        share = (end - self.begin) / np.maximum(self.end - self.begin, 1.0)
        return self._replace(end=end, took=self.took * share).flat()

    def by_name(self) -> Slices:
        """Return the periods in which at least one process was in a slice of a name, by name."""
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
        """Return a shift (ns) that separates the slices of two processes, or of two names."""
        return float(self.end.max() - self.begin.min()) + 1.0


def joined(parts: list[Slices]) -> Slices:
    """Concatenate tables of slices."""
    if len(parts) == 1:
        return parts[0]
    return Slices(*[np.concatenate(columns) for columns in zip(*parts, strict=True)])


def called_in(caller: Slices, work: Slices, holds: NDArray[np.bool_]) -> Slices:
    """Return the slices that each slice of a caller waits for, with the caller's row as parent.

    A slice was called in the caller's slice that has its middle, unless it ends after that. A name
    of the caller without such slices waits for slices that began earlier and end in it. If a role
    has slices of the caller's name, the slices of other roles are left out. For example,
    ``update_actor`` of the loop waits for ``update_actor`` of the actor's ranks only.

    Args:
        caller: Slices of one process, e.g. the loop, in order and without overlap.
        work: Slices of the workers.
        holds: For each slice of the caller, whether it only waits, e.g. for a rollout in the
            background. Then it waits for all slices that overlap it.
    """
    if not (caller.who.size and work.who.size):
        return work.at(slice(0))
    middle = (work.begin + work.end) / 2
    place = np.searchsorted(caller.begin, middle, side="right") - 1
    late_ns = LATE_END * (caller.end - caller.begin)
    inside = (place >= 0) & (middle < caller.end[place]) & ~holds[place]
    inside &= work.end <= (caller.end + late_ns)[place]
    called = work._replace(parent=place).at(inside)
    names_with_calls = np.bincount(caller.name[called.parent], minlength=caller.name.max() + 1) > 0
    parts = [called]
    for row in np.flatnonzero(~names_with_calls[caller.name]).tolist():
        parts.append(_under_way(caller, row, work, bool(holds[row])))
    return _of_its_name(joined(parts), caller)


def _under_way(caller: Slices, row: int, work: Slices, holds: bool) -> Slices:
    """Return the slices that began before a slice of the caller and end in it, clipped to it; with
    ``holds``, all slices that overlap it.
    """
    begin, end = float(caller.begin[row]), float(caller.end[row])
    if holds:
        goes_on = work.begin < end
    else:
        goes_on = (work.begin < begin) & (work.end <= end + LATE_END * (end - begin))
    goes_on &= work.end > begin
    return work._replace(parent=np.full(work.who.size, row)).at(goes_on).within(begin, end)


def _of_its_name(called: Slices, caller: Slices) -> Slices:
    """Return the called slices; where roles have slices of the caller's name, only these roles'."""
    name = caller.name[called.parent]
    is_same = called.name == name
    if not is_same.any():
        return called
    key = name * (called.role.max() + 1) + called.role
    of_role = np.bincount(key[is_same], minlength=key.max() + 1) > 0
    of_name = np.bincount(name[is_same], minlength=name.max() + 1) > 0
    return called.at(of_role[key] | ~of_name[name])


def peers(slices: Slices) -> Ints:
    """Return for each slice the peer whose begin it waits for, or -1.

    The nth slices of a name in all processes are peers, e.g. the third ``update_actor`` of each
    rank. Each waits for the peer that begins last.

    Args:
        slices: The slices by process and begin.
    """
    rows = np.arange(slices.who.size)
    by_name = np.lexsort((slices.begin, slices.who, slices.name))
    number = _number_in_group(slices.name[by_name], slices.who[by_name])
    group = np.empty_like(rows)
    group[by_name] = slices.name[by_name] * (rows.size + 1) + number
    by_group = np.lexsort((slices.begin, group))
    _, first, counts = np.unique(group[by_group], return_index=True, return_counts=True)
    last = np.empty_like(rows)
    last[by_group] = np.repeat(by_group[first + counts - 1], counts)
    waits = (slices.begin[last] > slices.begin) & (slices.begin[last] < slices.end)
    return np.where(waits, last, -1)


def _number_in_group(name: Ints, who: Ints) -> Ints:
    """Return the index of each row among the rows of its name and process, which follow each
    other.
    """
    rows = np.arange(name.size)
    begins = np.append(True, (name[1:] != name[:-1]) | (who[1:] != who[:-1]))[: name.size]
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))


def last_begins(called: Slices) -> Floats:
    """Return for each called slice the time at which the last rank of its role began.

    Ranks are compared in slices of one name and one parent. A begin after the slice's end does not
    count; then it is the slice's own begin.
    """
    if not called.who.size:
        return called.begin
    of_role = called.parent * (called.role.max() + 1) + called.role
    key = of_role * (called.name.max() + 1) + called.name
    last = np.full(key.max() + 1, -np.inf)
    np.maximum.at(last, key, called.begin)
    return np.where(last[key] < called.end, last[key], called.begin)


class PathPart(NamedTuple):
    """A part of the path: a segment, or the delay between its predecessor's end and its begin.

    Attributes:
        segment: Number of the segment.
        begin_ns: Begin of the part.
        end_ns: End of the part.
        is_delay: Whether the part is the delay before the segment.
    """

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
    """Return the critical path to a segment in order of time, as parts without gaps between them.

    Args:
        last: Number of the segment at the end of the path.
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
    """The segments that paths can have: ends and begins of callers' slices, and called slices.

    The columns have all ends first, then the called slices, then all begins. Ends and begins have
    no duration. A caller's own time is the delay before a called slice, and before its end.

    Attributes:
        took_ns: Duration of the segment; 0 for an end or a begin.
        end_ns: Time at which the segment ends.
        before: Number of the predecessor that ended last; -1 without one.
        row: Row of the caller's slice with the segment and the delay before it; -1 for a begin.
        called: Row of the called slice; -1 for an end or a begin.
    """

    took_ns: Ints
    end_ns: Ints
    before: Ints
    row: Ints
    called: Ints

    def paths_to(self, lasts: Iterable[int]) -> Ints:
        """Return the segments of the critical paths to these segments, from the last one back."""
        before = self.before.item
        on_path = []
        for segment in lasts:
            while segment >= 0:
                on_path.append(segment)
                segment = before(segment)
        return np.array(on_path, np.int64)


def segments_of(
    slices: Slices, peers: Ints, called: Slices, is_together: NDArray[np.bool_]
) -> Segments:
    """Return the segments of callers' slices and of the slices that they called.

    A slice that waits for a peer follows the peer's begin, so the path before that is on the peer's
    process.

    Args:
        slices: The callers' slices by process and begin, without overlap within a process.
        peers: Row of the peer whose begin each slice waits for, or -1, from :func:`peers`.
        called: The slices called by a single caller, with its rows as parents, from
            :func:`called_in`.
        is_together: For each called slice, whether its ranks end it together, as by a collective.
            Then its segment lasts from the begin of the last rank.
    """
    order = called.parent
    if order.size:  # one key: lexsort takes twice as long
        order = np.argsort(called.end + called.parent * called._width(), kind="stable")
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
    no_row = np.full(rows.size, -1)
    return Segments(
        took_ns=_column(0 * rows, end - begin, 0 * rows),
        end_ns=_column(slices.end, end, slices.begin),
        before=_column(before_end, before_called, before_begin),
        row=_column(rows, parent, no_row),
        called=_column(no_row, order, no_row),
    )


def _at(column: Ints, rows: Ints) -> Ints:
    """Return a column's value in each row; for row -1, a value that equals no other (-2)."""
    return np.append(column, -2)[rows]


def _column(*parts: NDArray[np.float64] | Ints) -> Ints:
    return np.concatenate(parts).astype(np.int64)
