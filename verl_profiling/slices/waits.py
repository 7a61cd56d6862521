"""Edges between slices: a slice waits for the slices that it called, and for its peers.

Both are assumed from names and times, because nothing records them between processes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verl_profiling.slices.slices import Floats, Ints, Slices, joined

LATE_END = 0.05
"""Share of a slice by which a called slice may end after it, because clocks of hosts differ."""


def called_in(caller: Slices, work: Slices, holds: NDArray[np.bool_]) -> Slices:
    """Return the slices that each slice of a caller waits for, with the caller's row as parent.

    A slice was called where its middle lies, unless it goes on after that. A name of the caller
    without such slices waits for those that began before and end in it. If a role has slices of
    the caller's name, the slices of other roles are left out.

    Args:
        caller: Slices of one process, in order and without overlap.
        work: Slices of the processes that it calls.
        holds: For each slice of the caller, whether it waits for all that goes on meanwhile.
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
    """Return the slices that go on when a slice of the caller begins, clipped to it."""
    begin, end = float(caller.begin[row]), float(caller.end[row])
    if holds:
        goes_on = work.begin < end
    else:
        goes_on = (work.begin < begin) & (work.end <= end + LATE_END * (end - begin))
    goes_on &= work.end > begin
    return work._replace(parent=np.full(work.who.size, row)).at(goes_on).within(begin, end)


def _of_its_name(called: Slices, caller: Slices) -> Slices:
    """Leave out other roles where a role has slices of the caller's name."""
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

    Slices of one name and number in their processes are peers, such as the ranks' parts in a
    collective. Each waits for the last peer that begins.

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
    """Return the index of each row among the rows of its name and process, which are adjacent."""
    rows = np.arange(name.size)
    begins = np.append(True, (name[1:] != name[:-1]) | (who[1:] != who[:-1]))[: name.size]
    return rows - np.maximum.accumulate(np.where(begins, rows, 0))


def last_begins(called: Slices) -> Floats:
    """Return for each called slice the last begin of its role's slices of its name in the same
    caller, if before its end; else its own begin.
    """
    if not called.who.size:
        return called.begin
    of_role = called.parent * (called.role.max() + 1) + called.role
    key = of_role * (called.name.max() + 1) + called.name
    last = np.full(key.max() + 1, -np.inf)
    np.maximum.at(last, key, called.begin)
    return np.where(last[key] < called.end, last[key], called.begin)
