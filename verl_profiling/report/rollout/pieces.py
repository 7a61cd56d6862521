"""What trajectories waited for, in pieces of time that have one cause each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_profiling.manifest import Request
from verl_profiling.report.intervals import union
from verl_profiling.report.rollout.axes import Axes, Ints
from verl_profiling.report.rollout.innermost import innermost
from verl_profiling.report.rollout.lag import standing_still
from verl_profiling.report.rollout.records import Records
from verl_profiling.report.rollout.requests import (
    FROM_THE_ENGINE,
    PARTS,
    TO_THE_ENGINE,
    divided_requests,
)

__all__ = [
    "BEFORE",
    "CAUSES",
    "LOOP_LAG",
    "OWN_CODE",
    "UNEXPLAINED",
    "Pieces",
    "process_pieces",
    "trajectory_pieces",
]

GENERATE, LOOP_LAG, OWN_CODE, UNEXPLAINED = "generate", "loop lag", "own code", "unexplained"
BEFORE = "began before the capture"
CAUSES = (*PARTS, LOOP_LAG, OWN_CODE, BEFORE, UNEXPLAINED)
"""Causes that are no names of spans."""

_NUMBERS = {name: number for number, name in enumerate(CAUSES)}
_ON_THE_WAY = (_NUMBERS[TO_THE_ENGINE], _NUMBERS[FROM_THE_ENGINE])


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Time by cause, as columns. Pieces of one owner may overlap: they share that time.

    Attributes:
        owner: Number of the trajectory (or process).
        begin: Begin (ns).
        end: End (ns).
        cause: Number of the cause in ``causes``.
        loop: Number of the event loop, or -1.
        causes: Names of the causes.
        uncertain: It is lag of which the begin is not known: an upper bound.
    """

    owner: Ints
    begin: Ints
    end: Ints
    cause: Ints
    loop: Ints
    causes: Sequence[str]
    uncertain: NDArray[np.bool_]

    def of(self, rows: Ints) -> Pieces:
        """Return some of the pieces."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return Pieces(causes=self.causes, **columns)


_COLUMNS = ("owner", "begin", "end", "cause", "loop", "uncertain")


def _causes(records: Records) -> tuple[list[str], Ints]:
    """Return the names of all causes, and the number of the cause of each name of a span."""
    taken = set(CAUSES) - {GENERATE}
    named = [f"span {name}" if name in taken else name for name in records.names]
    numbers = dict(_NUMBERS)
    of = [numbers.setdefault(name, len(numbers)) for name in named]
    return list(numbers), np.array(of, dtype=np.int64)


def trajectory_pieces(records: Records, served: Mapping[int, Request]) -> Pieces:
    """Return what trajectories waited for: at each instant of one, at least one piece of it.

    An instant belongs to the innermost open spans. A ``generate`` span divides by its request. Where no span
    is open it is the trajectory's own code; ``unexplained`` in a process whose log is not whole. Until the
    first span of a trajectory that began before recording did, it ``began before the capture``: it may have
    been in a span that nobody knows.
    Then the time for which it stood still is taken out.

    Args:
        records: What was recorded.
        served: The request of each span that has one, by the span's number.
    """
    spans = records.spans
    causes, of_name = _causes(records)
    rows = np.flatnonzero(spans.trajectory >= 0)
    owner, begin, end = spans.trajectory[rows], spans.begin[rows], spans.end[rows]
    number = np.full(len(spans.trajectory), -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    parent = np.where(spans.parent[rows] >= 0, number[spans.parent[rows]], -1)
    index, first, last = innermost(owner, begin, end, parent)
    index, first, last, cause = _divided(rows[index], first, last, of_name[spans.name], served, records)
    goes_on = (spans.open[index] > 0) & (last == spans.end[index])
    loop = np.where(_held(cause) | goes_on, -1, spans.loop[index])
    gaps = _gaps(records, owner, begin, end)
    columns = (
        np.concatenate((spans.trajectory[index], gaps[0])),
        np.concatenate((first, gaps[1])),
        np.concatenate((last, gaps[2])),
        np.concatenate((cause, gaps[3])),
        np.concatenate((loop, gaps[4])),
    )
    return _with_lag(records, causes, *columns)


def _held(cause: Ints) -> NDArray[np.bool_]:
    """Return whether pieces are in the engine's hands: a blocked loop does not hold them up."""
    engine = cause < len(PARTS)
    return engine & ~np.isin(cause, _ON_THE_WAY)


def _divided(
    index: Ints, first: Ints, last: Ints, cause_of: Ints, served: Mapping[int, Request], records: Records
) -> tuple[Ints, Ints, Ints, Ints]:
    """Divide the pieces of ``generate`` spans by their requests."""
    cause = cause_of[index]
    if not served:
        return index, first, last, cause
    begin, end = records.spans.begin, records.spans.end
    numbers, marks, labels = divided_requests(
        served, {n: int(begin[n]) for n in served}, {n: int(end[n]) for n in served}
    )
    row_of = np.full(len(begin), -1, dtype=np.int64)
    row_of[numbers] = np.arange(len(numbers))
    asked = row_of[index] >= 0
    rows = row_of[index[asked]]
    edges = np.clip(marks[rows], first[asked, None], last[asked, None])
    low, high, label = edges[:, :-1].ravel(), edges[:, 1:].ravel(), labels[rows].ravel()
    of = np.repeat(index[asked], labels.shape[1])
    some = high > low
    return (
        np.concatenate((index[~asked], of[some])),
        np.concatenate((first[~asked], low[some])),
        np.concatenate((last[~asked], high[some])),
        np.concatenate((cause[~asked], label[some])),
    )


def _gaps(records: Records, owner: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return when trajectories were in no span: trajectory, begin, end, cause, loop."""
    found = records.trajectories
    from_ns = np.array([one.begin_ns for one in found], dtype=np.int64)
    until_ns = np.array([one.end_ns for one in found], dtype=np.int64)
    axes = Axes(len(found), from_ns, until_ns, begin, end)
    whole = axes.put(np.arange(len(found)), from_ns, until_ns)
    of, first, last = axes.left(whole, axes.put(owner, begin, end))
    whole_log = np.array([one.whole_log for one in found], dtype=bool)
    unseen = np.array([one.unseen_begin for one in found], dtype=bool)
    cause = np.where(whole_log[of], _NUMBERS[OWN_CODE], _NUMBERS[UNEXPLAINED])
    cause[unseen[of] & (first == from_ns[of])] = _NUMBERS[BEFORE]
    loop = np.array([one.loop for one in found], dtype=np.int64)
    return of, first, last, cause, loop[of]


def _with_lag(
    records: Records, causes: list[str], owner: Ints, begin: Ints, end: Ints, cause: Ints, loop: Ints
) -> Pieces:
    """Take out the time for which trajectories stood still, as pieces with that cause."""
    number, low, high = standing_still(owner, loop, begin, end, records.blocks)
    axes = Axes(len(owner), begin, end, low, high)
    left, first, last = axes.left(
        axes.put(np.arange(len(owner)), begin, end), union(axes.put(number, low, high))
    )
    rows = np.concatenate((left, number))
    lagged = np.arange(len(rows)) >= len(left)
    return Pieces(
        owner=owner[rows],
        begin=np.concatenate((first, low)),
        end=np.concatenate((last, high)),
        cause=np.where(lagged, _NUMBERS[LOOP_LAG], cause[rows]),
        loop=loop[rows],
        causes=causes,
        uncertain=lagged & (cause[rows] != _NUMBERS[FROM_THE_ENGINE]),
    )


def process_pieces(records: Records) -> Pieces:
    """Return what processes did outside of trajectories: their innermost spans."""
    spans = records.spans
    causes, of_name = _causes(records)
    rows = np.flatnonzero(spans.trajectory < 0)
    number = np.full(len(spans.trajectory), -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    parent = np.where(spans.parent[rows] >= 0, number[spans.parent[rows]], -1)
    index, first, last = innermost(spans.process[rows], spans.begin[rows], spans.end[rows], parent)
    index = rows[index]
    return Pieces(
        owner=spans.process[index],
        begin=first,
        end=last,
        cause=of_name[spans.name[index]],
        loop=spans.loop[index],
        causes=causes,
        uncertain=np.zeros(len(index), dtype=bool),
    )
